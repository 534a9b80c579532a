"""Variance-based compression: send an entry once its accumulated gradient is clear against its accumulated variance.

**Source.** Yusuke Tsuzuku, Hiroto Imachi, Takuya Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning", ICLR 2018 workshop, arXiv 1802.06058: the basic algorithm, its 4-bit quantisation, and the hybrid with
Strom's method (Interspeech 2015).

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); one exponent byte per
leaf (4 to a word); then one word per slot, sign (bit 31), exponent below the leaf's (bits 28 to 30), index (bits 0 to
27). The hybrid has no exponents and words of sign and 31-bit index; float values follow the indices as vectors of their
own.

**Deviations.** (1) Entries too small for the 3-bit exponent stay in the residual by default; the paper, read literally,
drops them (`underflow="drop"`). (2) Of more entries than the largest capacity holds, the largest are sent; the others
stay in the residual. (3) Sent entries are reset at the start of the next update instead of the end of this one, which
is the same arithmetic in fewer passes: `gcjax.info` and the residual account for it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gcjax import _checks
from gcjax._bits import FLOAT_MAX, LANES, TINY, count_bits, pack_mask, pack_mask_and_peak, unpack_mask
from gcjax._codec import Code, float_code, level_code, power_of_two_code, sign_code
from gcjax._layout import Bucket
from gcjax._owners import take_back
from gcjax._random import step_key
from gcjax._select import entries_for, top_k_words
from gcjax._sparse import capacities_for, check_capacity, check_transport, default_capacities, exchange
from gcjax._transform import compress
from gcjax._types import Array, Compressor

CODES: dict[str, Callable[[], Code]] = {
    "power_of_two": power_of_two_code,
    "levels": level_code,
    "float16": functools.partial(float_code, 16),
    "float32": functools.partial(float_code, 32),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VarianceState:
    """State of one worker and bucket of n entries in g leaves.

    accumulated: float32[n], r, the gradient taken in since the entry was last sent.
    variance: float32[n], v, the decayed sum of squared per-sample gradients since then.
    reset: uint32[words_for(n)], packed mask of the entries to reset before the next gradient is added.
    scale: uint32[g], the leaves' scales of the last payload.
    threshold: float32, tau of the hybrid as it was for the last payload, 0 without.
    first: int32, where owners' queues begin next.  step: int32, updates done.
    kept: what a reset leaves in r: "nothing", "excess" (r less tau) or the name of the code whose rounding error stays.
    bucket: where the leaves lie. Both static.
    """

    accumulated: Array
    variance: Array
    reset: Array
    scale: Array
    threshold: Array
    first: Array
    step: Array
    kept: str = dataclasses.field(metadata={"static": True})
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    def after_reset(self) -> tuple[Array, Array]:
        """r and v as they stand between two updates, v not yet decayed."""
        r, v = self.accumulated, self.variance
        scale = jnp.repeat(self.scale[self.bucket.segment_of_word()], LANES)[: self.bucket.size]
        rest_r, rest_v = _left(r, v, self.kept, self.threshold, scale)
        mask = unpack_mask(self.reset, self.bucket.size)
        return jnp.where(mask, rest_r, r), jnp.where(mask, rest_v, v)

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in and not yet sent."""
        return self.after_reset()[0]


def variance_compress(
    alpha=1.5,
    *,
    decay=0.999,
    threshold=None,
    density=None,
    feedback: bool = False,
    underflow: str = "keep",
    values: str = "power_of_two",
    key=None,
    capacity=None,
    transport="all_gather",
    axis_name=None,
    inner_axis_name=None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends an entry when its accumulated gradient is clear against its accumulated variance, one word an entry.

    For every entry, with :math:`g_z` its gradient for sample z of this worker's batch B,

    .. math::
        r &\leftarrow r + \sum_z g_z / |B|, \qquad v \leftarrow v + \sum_z (g_z / |B|)^2 \\
        r^2 &> \alpha v \;\Rightarrow\; \text{send } r,\; r \leftarrow 0,\; v \leftarrow 0;
        \qquad \text{else } v \leftarrow \zeta v

    and the update is the mean over workers of what they sent, zero elsewhere. What is sent is the power of two nearest
    to r, at most that of the leaf's largest and at least 2**-7 of it.

    With `threshold` :math:`\tau` (the hybrid with Strom's method) an entry is sent when also :math:`|r| > \tau`; what
    is sent is :math:`\tau\,\mathrm{sign}(r)`, r keeps the rest, v falls by as much as r squared, and all v decay.

    With `density` (not in the paper) the traffic is fixed instead: the k = max(1, floor(density * parameters)) entries
    are sent for which :math:`|r| \min(1, |r| / \sqrt{\alpha v})`, size times certainty, is largest.

    Costs two float32 and a bit per parameter in state; 32 bits per sent entry on the wire. Put it before the optimiser:
    `optax.chain(gcjax.variance_compress(alpha=1.5), optax.adam(1e-3))`. Momentum, weight decay and learning rate come
    after it. Clipping may come before; the squares are then those of the unclipped gradient, which only delays more.

    Args:
      alpha: criterion, above 0; larger sends less. The paper uses 1, 1.5 and 2. May be traced (`inject_hyperparams`).
      decay: zeta, in (0, 1], factor on v of entries not sent. May be traced.
      threshold: tau above 0 for the hybrid, or None. May be traced.
      density: share of the entries to send, in (0, 1], or None for all that pass. Measured with `feedback`.
      feedback: keep the rounding error of a sent entry in r. The paper does not.
      underflow: "keep" leaves entries too small for the value code in the residual; "drop" resets them unsent.
      values: how sent values travel: "power_of_two" (the paper), "levels" (QSGD's unbiased stochastic levels; needs
        `key`), "float16" or "float32".
      key: `jax.random.key`, for `values="levels"` only. Every worker and step draws its own numbers from it.
      capacity: slots in a worker's payload: an int (fixed size), a tuple of ints (the smallest that holds every
        worker's entries is used), or None for a ladder from 1/1024 to 1/16 of the parameters. Rounded up to a multiple
        of 32; for each bucket of a model above 2**28 parameters. Of more entries than the largest holds, those of the
        largest magnitude are sent and the others stay in the residual. Temporaries take about 5 words a slot.
      transport: "all_gather" sends every worker's entries to every worker. "reduce_scatter" sends them to owners, which
        pass on the largest sums, `capacity` in all: traffic stops growing with the workers, while more entries wait.
        What an owner does not pass on joins its own residual, so nothing is lost. "auto" takes the one that moves less
        at the largest capacity: "reduce_scatter" from 4 workers on, with two words an entry from 3.
      axis_name: mesh axis or axes of the workers, None for one worker.
      inner_axis_name: mesh axis or axes over which to take the dense mean first, for fast links.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `update` takes `sum_grad_squared`, a pytree like the gradient holding
      sum_z (grad f_z / |B|)^2, as `gcjax.value_and_moments` returns; left out, the batch counts as one sample.

    Raises:
      ValueError: for a value out of range; `density` together with `threshold` or `capacity`; `feedback` together with
        `underflow="drop"` or `values="levels"`.
      TypeError: for a missing or superfluous `key`, or an argument of the wrong type.

    **Randomness**: none, or `key` per worker. **Bias**: entries are delayed, and rounding is to the nearest (biased)
    unless `values="levels"`. **Non-finite input**, or a negative `sum_grad_squared`: the update is NaN on all workers
    and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = optax.chain(gcjax.variance_compress(alpha=1.5), optax.sgd(1.0))
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> squares = jnp.array([0.01, 0.5])  # the first entry is clear, the second is not
    >>> updates, state = tx.update(jnp.array([0.5, 0.5]), state, params, sum_grad_squared=squares)
    >>> print(updates)
    [-0.5 -0. ]
    """
    _check(alpha, decay, threshold, feedback, underflow, values, key)
    _check_density(density, threshold, capacity)
    check_capacity(capacity)
    check_transport(transport)
    hybrid = threshold is not None
    tau = threshold if hybrid else 0.0
    code = sign_code(threshold) if hybrid else CODES[values]()
    kept = "excess" if hybrid else values if feedback else "nothing"

    def init(bucket: Bucket) -> VarianceState:
        return VarianceState(
            accumulated=jnp.zeros(bucket.size),
            variance=jnp.zeros(bucket.size),
            reset=jnp.zeros(bucket.words, jnp.uint32),
            scale=jnp.zeros(len(bucket.segments), jnp.uint32),
            threshold=jnp.float32(tau),
            first=jnp.int32(0),
            step=jnp.int32(0),
            kept=kept,
            bucket=bucket,
        )

    def update(gradient, sum_grad_squared, state, comm, ok):
        bucket = state.bucket
        segment_of_word = jnp.asarray(bucket.segment_of_word())
        r, v = _accumulate(gradient, sum_grad_squared, state, decay, ok)
        clear = r * r > jnp.minimum(alpha * v, FLOAT_MAX)  # FLOAT_MAX: an r whose square overflows must be sent
        ladder = default_capacities(bucket.entries) if capacity is None else capacity
        if density is not None:
            ladder = entries_for(density, bucket.entries)
            certainty = jnp.where(clear, 1, jnp.abs(r) / jnp.maximum(jnp.sqrt(alpha * v), TINY))
            clear = unpack_mask(top_k_words(jnp.abs(r) * jnp.minimum(certainty, 1), ladder), bucket.size)
        if hybrid:
            clear = clear & (jnp.abs(r) > threshold)
        passed, words, scale = _encodable(clear, r, code, segment_of_word, len(bucket.segments))
        draw = None if key is None else step_key(key, state.step, bucket, comm.rank())
        slots = capacities_for(ladder, bucket)
        out = exchange(r, words, state.first, scale, segment_of_word, code, slots, comm, ok, draw, transport)
        dropped = passed & ~words if underflow == "drop" else jnp.uint32(0)
        reset = jnp.where(ok, out.words | dropped, state.reset)
        scale = jnp.where(ok, scale, state.scale)
        of_payload = jnp.where(ok, jnp.float32(tau), state.threshold)  # by which `reset` goes

        def left(word, r, v):
            return _left(r, v, kept, of_payload, scale[segment_of_word[word]])

        reset, (r, v) = take_back(out.returned, reset, (r, v), left)
        new = dataclasses.replace(
            state,
            accumulated=r,
            variance=v,
            reset=reset,
            scale=scale,
            threshold=of_payload,
            first=jnp.where(ok, out.first, state.first),
            step=state.step + ok,
        )
        selected = jnp.sum(count_bits(passed))
        return out.mean, new, out.sent._replace(selected=selected, underflow=selected - out.sent.selected)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _check(alpha, decay, threshold, feedback, underflow, values, key):
    _checks.number("alpha", alpha, 0.0)
    _checks.number("decay", decay, 0.0, 1.0)
    _checks.flag("feedback", feedback)
    _checks.choice("underflow", underflow, ("keep", "drop"))
    _checks.choice("values", values, tuple(CODES))
    if threshold is not None:
        _checks.number("threshold", threshold, 0.0)
        if feedback or underflow != "keep" or values != "power_of_two":
            raise ValueError(
                f"threshold={threshold!r} sends only signs and keeps all the rest: leave feedback, underflow and "
                f"values at their defaults (got feedback={feedback!r}, underflow={underflow!r}, values={values!r})"
            )
    if feedback and underflow == "drop":
        raise ValueError("feedback=True keeps everything that is not sent; underflow='drop' contradicts it")
    if feedback and values == "levels":
        raise ValueError("values='levels' is unbiased without feedback; use feedback=False")
    if values == "levels":
        _checks.random_key("key (values='levels' draws random numbers)", key)
    elif key is not None:
        raise TypeError(f"key is only used with values='levels', got key={key!r} with values={values!r}")


def _check_density(density, threshold, capacity):
    if density is None:
        return
    if isinstance(density, jax.Array):
        raise TypeError("density fixes the size of the payload and cannot be traced; give a Python float")
    _checks.number("density", density, 0.0, 1.0)
    for name, value in (("threshold", threshold), ("capacity", capacity)):
        if value is not None:
            raise ValueError(f"density={density!r} says how many entries are sent; leave out {name}={value!r}")


def _left(r, v, kept: str, tau, scale):
    """What a reset leaves of r and v; scale is that of their leaves in the last payload."""
    if kept == "nothing":
        return jnp.float32(0), jnp.float32(0)
    if kept == "excess":
        return r - jnp.copysign(tau, r), jnp.maximum(v - 2 * jnp.abs(r) * tau + tau * tau, 0.0)  # v falls as r**2 does
    return r - CODES[kept]().round(r, scale), jnp.float32(0)


def _accumulate(gradient, sum_grad_squared, state: VarianceState, decay, ok):
    """r and v with this step's gradient; without change if not `ok`.

    The choice is made here, entry by entry, because a conditional around the whole step makes XLA copy the state.
    """
    if sum_grad_squared is None:
        sum_grad_squared = gradient * gradient
    r, v = state.after_reset()
    decays = True if state.kept == "excess" else ~unpack_mask(state.reset, state.bucket.size)
    v = jnp.minimum(jnp.where(decays, decay * v, v) + sum_grad_squared, FLOAT_MAX)
    # A skipped step leaves `reset` standing, so the raw values go back, not the ones after it.
    return jnp.where(ok, r + gradient, state.accumulated), jnp.where(ok, v, state.variance)


def _encodable(clear, r, code: Code, segment_of_word, segments: int):
    """Masks, as words, of what passed and of what of it the code can send; and the leaves' scales."""
    if not code.scale_bits:
        passed = pack_mask(clear)
        scale = jnp.zeros(segments, jnp.uint32)
    else:
        passed, peak = pack_mask_and_peak(clear, r)
        scale = code.to_scale(jax.ops.segment_max(peak, segment_of_word, segments, indices_are_sorted=True))
    return passed, passed & _at_least(r, code.smallest(scale), segment_of_word), scale


def _at_least(r, smallest, segment_of_word):
    """Mask, as words, of |r| >= the smallest magnitude of its segment. r: float32[n]; smallest: float32[segments]."""
    lowest = jnp.repeat(smallest[segment_of_word], LANES)[: len(r)]
    return pack_mask(jnp.abs(r) >= lowest)
