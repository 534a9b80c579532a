"""Variance-based compression: send an entry once its accumulated gradient stands out from its accumulated variance.

**Source.** Yusuke Tsuzuku, Hiroto Imachi, Takuya Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning", ICLR 2018 workshop, arXiv 1802.06058: the basic algorithm, its 4-bit quantisation, and the hybrid with
Strom's method (Interspeech 2015).

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); one exponent byte per
leaf, leaf i in word i % m of m; then the entries, in the layout that `wire` names (`gcjax._sparse.wire` describes
both). The paper's word has the sign in bit 31, the exponent below the leaf's in bits 28 to 30 and the index in bits 0
to 27; the compact form has the same 4 bits. The hybrid sends no exponents, and signs of 1 bit. In two phases every
owner gets such a vector with its entries, and sends one with the mean.

**Deviations.** (1) Entries too small for the 3-bit exponent stay in the residual by default; the paper, read literally,
drops them (`underflow="drop"`). (2) On overflow the largest entries are sent; the others stay in the residual. (3) Sent
entries are reset at the start of the next update instead of the end of this one: the same arithmetic in fewer passes.
`gcjax.info` and the residual account for it. (4) From 4 workers on, the mean goes through owners by default, rounded to
4 bits with error feedback; the paper has `transport="all_gather"` and `wire="word"`.
"""

import jax
import jax.numpy as jnp
import optax

from gcjax._kernels.bits import LANES, count_bits, pack_mask_and_peak
from gcjax._kernels.floats import FLOAT_MAX
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_choice, check_number
from gcjax.extend import (
    Bucket,
    Compressor,
    Message,
    SparseState,
    StepInput,
    StepResult,
    ValueCode,
    capacities_for,
    check_capacity,
    check_transport,
    check_wire,
    compress,
    exchange,
    leaf_groups,
    pack_mask,
    power_of_two_code,
    sign_code,
)


def _paper_reset(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """r <- 0, v <- 0."""
    return 0, 0


def _hybrid_reset(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """r <- r - tau sign(r); v falls by as much as r squared does."""
    (r, v), (tau, _) = values, sent_with
    return r - jnp.copysign(tau, r), jnp.maximum(v - 2 * jnp.abs(r) * tau + tau * tau, 0.0)


def variance_compress(
    alpha: ArrayLike | optax.Schedule = 0.5,
    *,
    decay: ArrayLike = 0.999,
    threshold: ArrayLike | None = None,
    underflow: str = "keep",
    capacity: float | tuple[int, ...] | None = None,
    transport: str = "auto",
    wire: str = "compact",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends an entry when its accumulated gradient stands out from its accumulated variance.

        r <- r + sum_z g_z / |B|        g_z: gradient of sample z of this worker's batch B
        v <- v + sum_z (g_z / |B|)^2
        where r^2 > alpha v:  send r, r <- 0, v <- 0;  elsewhere:  v <- zeta v

    The update is the mean over workers of the sent entries. Each is rounded to the nearest power of two, at most that
    of the leaf's largest and at least 2**-7 of it: biased, as in the paper. In the hybrid with Strom's method, an entry
    also needs |r| > tau. It sends tau sign(r), keeps the rest of r, v falls by as much as r^2, and all v decay.
    `update` takes the sum that v adds up as `sum_grad_squared`, a pytree like the gradient (`gcjax.value_and_moments`
    computes it). Without it the batch counts as one sample.

    State: two float32 and a bit per parameter, in two phases a float32 more per owned parameter. Wire: 8 bits per sent
    entry at density 1/4, 12.6 at 1/100. No scaling or clipping may stand before it, except in `gcjax.scale_first`.

    Args:
      alpha: criterion, above 0; larger sends less; 1 to 2 in the paper. May be traced, or a schedule.
      decay: zeta, in (0, 1]. May be traced.
      threshold: tau above 0 for the hybrid, or None. May be traced.
      underflow: "keep" leaves entries too small for the code in r; "drop" resets them (the paper read literally).
      wire: "compact", or "word" for the paper's word per entry.
      capacity, transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a value out of range, also of a schedule in step 0; for `threshold` with `underflow="drop"`.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = optax.chain(gcjax.variance_compress(alpha=1.5), optax.sgd(1.0))
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> squares = jnp.array([0.01, 0.5])  # the first entry passes, the second does not
    >>> updates, state = tx.update(jnp.array([0.5, 0.5]), state, params, sum_grad_squared=squares)
    >>> print(updates)
    [-0.5 -0. ]
    """
    _check(alpha, decay, threshold, underflow)
    check_capacity(capacity)
    check_transport(transport)
    hybrid = threshold is not None
    tau = 0.0 if threshold is None else threshold
    code = sign_code(tau) if hybrid else power_of_two_code()
    check_wire(wire, code.bits)
    reset = _hybrid_reset if hybrid else _paper_reset

    def init(bucket: Bucket) -> SparseState:
        sent_with = jnp.float32(tau), jnp.zeros(len(bucket.segments), jnp.uint32)
        return SparseState.create(bucket, reset=reset, transport=transport, arrays=2, squares=(1,), sent_with=sent_with)

    def update(step: StepInput, state: SparseState) -> StepResult[SparseState]:
        bucket = state.bucket
        squares = [g * g for g in step.gradient] if step.squares is None else step.squares
        r, v = state.take_in(accumulate, step.gradient, squares, go=step.go)

        criterion = alpha(state.step) if callable(alpha) else alpha
        passed, sendable, scales = _encodable(passes(r, v, criterion), r, code, bucket)
        message = Message(r, sendable, code, bucket, capacities_for(capacity, bucket.entries), scales, wire)
        exchanged = exchange(message, state.transport, step.comm, step.go)
        if underflow == "drop":  # reset as if it had been sent
            exchanged = exchanged._replace(sent=exchanged.sent | passed & ~sendable)
        new = state.after(exchanged, (r, v), step.go, sent_with=(jnp.float32(tau), scales))

        selected, report = jnp.sum(count_bits(passed)), exchanged.report
        return StepResult(exchanged.mean, new, report._replace(selected=selected, underflow=selected - report.selected))

    def accumulate(values: tuple[Array, ...], inputs: tuple[Array, ...], was_sent: Array) -> tuple[Array, ...]:
        (r, v), (gradient, squares) = values, inputs  # r <- 0, v <- 0 where the last step sent; elsewhere v <- zeta v:
        v = v * decay if hybrid else jnp.where(was_sent, v, v * decay)
        return r + gradient, jnp.minimum(v + squares, FLOAT_MAX)

    def passes(r: Array, v: Array, criterion: ArrayLike) -> Array:
        clear = r * r > jnp.minimum(criterion * v, FLOAT_MAX)  # FLOAT_MAX: an r whose square overflows must be sent
        return clear & (jnp.abs(r) > tau) if hybrid else clear

    method = Compressor(init, update, uses_squares=True)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _check(alpha: ArrayLike | optax.Schedule, decay: ArrayLike, threshold: ArrayLike | None, underflow: str) -> None:
    if callable(alpha):
        with jax.ensure_compile_time_eval():
            check_number("alpha(0)", alpha(0), 0.0)
    else:
        check_number("alpha", alpha, 0.0)
    check_number("decay", decay, 0.0, 1.0)
    check_choice("underflow", underflow, ("keep", "drop"))
    if threshold is not None:
        check_number("threshold", threshold, 0.0)
        if underflow != "keep":
            raise ValueError(
                f"threshold={threshold!r} sends only signs and keeps the rest: leave underflow at its default, "
                f"got underflow={underflow!r}"
            )


def _encodable(clear: Array, r: Array, code: ValueCode, bucket: Bucket) -> tuple[Array, Array, Array]:
    """Packed masks of the entries that passed and of those that the code can send, and the leaves' scales."""
    leaf_of_word = jnp.asarray(bucket.leaf_of_word())
    if not code.scale_bits:
        passed = pack_mask(clear)
        scales = jnp.zeros(len(bucket.segments), jnp.uint32)
    else:
        passed, peak = pack_mask_and_peak(clear, r)
        scales = code.to_scale(leaf_groups(bucket).reduce_words(peak, jnp.max))
    smallest = code.smallest(scales)[leaf_of_word].reshape(-1, 1, LANES)
    return passed, passed & pack_mask(jnp.abs(r) >= smallest), scales
