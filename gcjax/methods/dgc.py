"""Deep Gradient Compression: exact top-k of accumulated velocities, with momentum and warm-up.

**Source.** Yujun Lin, Song Han, Huizi Mao, Yu Wang, William Dally, "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, arXiv 1712.01887: momentum correction, momentum factor
masking, warm-up.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then the entries with
float32 values, in the compact form of `gcjax._sparse.wire`. In addition, one float32 all-reduce of
the entries of the small leaves.

**Deviations.** (1) k counts the entries of all compressed leaves of a bucket, not of each leaf: leaves with small
gradients wait. (2) The k-th largest is exact; the paper estimates it from a sample and truncates the excess. (3) A leaf
is sent densely if it is small; the authors do so if it has one axis, which a flat vector of parameters has too. Small
leaves apply momentum before the all-reduce, which gives the same result. (4) The paper's run-length code of the indices
has no static size; Elias-Fano's takes its place. (5) Gradients are not clipped. The paper's
clipping is `optax.clip_by_global_norm(limit / sqrt(workers))` before it. (6) Zeros are not sent.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax

from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_integer, check_number, static_share
from gcjax.extend import (
    Bucket,
    Comm,
    Compressor,
    Message,
    SparseState,
    StepInput,
    StepResult,
    capacities_for,
    check_transport,
    compress,
    count_for_density,
    exchange,
    float_code,
    top_k_mask,
    unpack_mask,
)

WARMUP = tuple(4.0**-i for i in range(1, 15))  # densities of the stages, down to one entry of the largest bucket
DENSE_BELOW = 4096  # leaves of fewer entries are sent whole; divides ResNet-50 as the authors do


def _reset(values: tuple[Array, ...], is_small: PyTree) -> tuple[ArrayLike, ...]:
    """v <- 0, u <- 0; u of small leaves stays."""
    return 0, jnp.where(is_small, values[1], 0)


def dgc_compress(
    density: float = 0.001,
    *,
    momentum: ArrayLike = 0.9,
    warmup_steps: int = 0,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the k entries of largest accumulated velocity, k = max(1, floor(density * entries)).

        u <- m u + g
        v <- v + u
        send the k entries with the largest |v|; there u <- 0, v <- 0

    The update is the mean over workers of the sent entries. Leaves of fewer than 4,096 entries (biases, scales) send
    all of u in each step, which is momentum SGD. Resetting u (momentum factor masking) stops stale momentum, but loses
    it: workers that send an entry seldom then count more, which biases the optimum where their gradients do not vanish
    there.

    State: two float32 and a bit per parameter. Wire: 41 bits per sent entry at density 1/100 and a small all-reduce.
    The optimiser after it is plain SGD, with the learning rate that momentum SGD would have:
    `optax.chain(gcjax.dgc_compress(0.001), optax.sgd(0.1))`. Weight decay stands between the two, and has no momentum
    there.

    Args:
      density: share of the entries to send, in (0, 1].
      momentum: m, in [0, 1). With 0 it is `gcjax.top_k_compress`, and nothing is lost. May be traced.
      warmup_steps: steps before `density` applies, divided equally between stages that send 1/4, 1/16, 1/64, ... of the
        entries; in the paper each stage is an epoch. 0 for none.
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a value out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.dgc_compress(density=1 / 4096, momentum=0.5)
    >>> g = jnp.zeros(4096).at[:2].set(jnp.array([4.0, 2.0]))
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # v of the second entry: 2 from the first step, then 1 + 2
    >>> print(first[:2], second[:2])
    [4. 0.] [0. 5.]
    """
    method = compressor(density, momentum, warmup_steps, transport, DENSE_BELOW)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)


def compressor(
    density: float, momentum: ArrayLike, warmup_steps: int, transport: str, dense_below: int
) -> Compressor[SparseState]:
    """The method, with leaves of fewer than `dense_below` entries sent whole."""
    density = static_share("density", density)
    check_number("momentum", momentum, 0.0, 1.0, low_included=True, high_included=False)
    check_integer("warmup_steps", warmup_steps, 0)
    check_transport(transport)
    densities = [*(share for share in WARMUP if share > density and warmup_steps), density]
    code = float_code()

    def is_small(bucket: Bucket) -> np.ndarray:
        return np.array([s.size < dense_below for s in bucket.segments])

    def init(bucket: Bucket) -> SparseState:
        return SparseState.create(
            bucket, reset=_reset, transport=transport, arrays=2, sent_with=jnp.asarray(is_small(bucket))
        )

    def update(step: StepInput, state: SparseState) -> StepResult[SparseState]:
        bucket, small = state.bucket, is_small(state.bucket)
        # v in a pass of its own, from the chosen u: XLA then computes both in the buffers of the old ones.
        _, u = state.take_in(add_to_velocity, step.gradient, go=step.go)
        v = state.accumulated[0]
        v = jnp.where(step.go, jnp.where(unpack_mask(state.to_reset), 0, v) + u, v)

        dense = sum(s.size for s in bucket.segments if s.size < dense_below)
        small_words = jnp.asarray(np.where(small[bucket.leaf_of_word()], ~np.uint32(0), np.uint32(0)))
        entries = max(bucket.entries - dense, 1)
        slots = tuple(math.ceil(share * entries) for share in densities)
        mask = top_k_mask(v, count_at(state.step, entries), candidates=~small_words if dense else None)
        message = Message(v, mask, code, bucket, capacities_for(slots, bucket.entries))
        exchanged = exchange(message, state.transport, step.comm, step.go)
        mean, report = exchanged.mean, exchanged.report
        if dense:  # all of v of a small leaf is sent, so it holds just what this step has added
            mean = _with_means(mean, bucket.split(v), small, step.comm, step.go)
            exchanged = exchanged._replace(sent=exchanged.sent | small_words)
            report = report._replace(
                selected=report.selected + dense,
                sent=report.sent + dense,
                capacity=report.capacity + dense,
                payload_bits=report.payload_bits + 32 * dense,
                entropy_bits=report.entropy_bits + 32 * dense,
            )
        return StepResult(mean, state.after(exchanged, (v, u), step.go, sent_with=jnp.asarray(small)), report)

    def count_at(step: Array, entries: int) -> int | Array:
        counts = [count_for_density(share, entries) for share in densities]
        if len(counts) == 1:
            return counts[0]
        stage = jnp.minimum(step, warmup_steps) * (len(counts) - 1) // warmup_steps
        return jnp.asarray(counts, jnp.int32)[stage]

    def add_to_velocity(values: tuple[Array, ...], inputs: tuple[Array, ...], was_sent: Array) -> tuple[Array, ...]:
        (v, u), (g,) = values, inputs
        return v, u * momentum + g

    return Compressor(init, update)


def _with_means(
    mean: Sequence[Array], own: Sequence[Array], small: np.ndarray, comm: Comm, go: Array
) -> tuple[Array, ...]:
    """`mean`, in the small leaves replaced by the mean of the workers' own values, by one all-reduce."""
    values = comm.mean(jnp.concatenate([x.reshape(-1) for x, dense in zip(own, small, strict=True) if dense]))
    values = jnp.where(go, values, jnp.nan)
    ends = np.cumsum([x.size for x in mean] * small)
    leaves = zip(mean, small, ends, strict=True)
    return tuple(values[end - x.size : end].reshape(x.shape) if dense else x for x, dense, end in leaves)
