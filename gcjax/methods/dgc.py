"""Deep Gradient Compression: exact top-k of accumulated velocities, with momentum, clipping and warm-up.

**Source.** Yujun Lin, Song Han, Huizi Mao, Yu Wang, William Dally, "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, arXiv 1712.01887: momentum correction, local gradient
clipping, momentum factor masking, warm-up.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then the entries with
float32 values, in the compact form of `gcjax._sparse.wire`. In addition, one float32 all-reduce of
the entries of the small leaves.

**Deviations.** (1) k counts the entries of all compressed leaves of a bucket, not of each leaf: leaves with small
gradients wait. (2) The k-th largest is exact; the paper estimates it from a sample and truncates the excess. (3) A leaf
is sent densely if it is small; the authors do so if it has one axis, which a flat vector of parameters has too. Small
leaves apply momentum before the all-reduce, which gives the same result. (4) The paper's run-length code of the indices
has no static size; Elias-Fano's takes its place. (5) In a model above 2**28 entries, each bucket is clipped by its own
norm. (6) Zeros are not sent.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_flag, check_integer, check_number
from gcjax.extend import (
    Bucket,
    Comm,
    Compressor,
    Message,
    SparseState,
    StepResult,
    capacities_for,
    check_capacity,
    check_transport,
    compress,
    count_for_density,
    exchange,
    float_code,
    top_k_mask,
    unpack_mask,
    whole_group,
)

WARMUP = tuple(4.0**-i for i in range(1, 15))  # densities of the stages, down to one entry of the largest bucket
PROBED_STEPS = (0, *(1 << k for k in range(21)))  # where a schedule is evaluated at construction

Schedule = Callable[[ArrayLike], float | Array]


def _masking_reset(values: tuple[Array, ...], is_small: PyTree) -> tuple[ArrayLike, ...]:
    """v <- 0, u <- 0; u of small leaves stays."""
    return 0, jnp.where(is_small, values[1], 0)


def _velocity_reset(values: tuple[Array, ...], is_small: PyTree) -> tuple[ArrayLike, ...]:
    """v <- 0; u stays."""
    return 0, values[1]


def dgc_compress(
    density: float | Schedule = 0.001,
    *,
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: ArrayLike | None = None,
    warmup_steps: int = 0,
    dense_below: int = 4096,
    capacity: float | tuple[int, ...] | None = None,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the k entries of largest accumulated velocity, k = max(1, floor(density * entries)).

        u <- m u + g
        v <- v + u
        send the k entries with the largest |v|; there u <- 0, v <- 0

    and the update is the mean over workers of what they sent. With `nesterov`, u <- m (u + g) and v <- v + u + g. Every
    worker applies momentum to its own gradient, so that an entry that has waited arrives with all the velocity it would
    have had.

    Resetting u where it was sent (momentum factor masking) stops stale momentum. It also shortens momentum, to none for
    an entry sent in every step. If the workers' gradients do not vanish at the optimum, workers that send an entry
    seldom then count more, and training misses the optimum. With `masking=False` the updates add up to those of
    momentum SGD.

    The optimiser after it is plain SGD, with the learning rate that momentum SGD would have:
    `optax.chain(gcjax.dgc_compress(0.001), optax.sgd(0.1))`. Weight decay stands between the two, because before the
    compressor it would fill u: `optax.add_decayed_weights(d)`. There it has no momentum; d = c / (1 - m) pulls like the
    decay c of momentum SGD.

    Leaves of fewer than `dense_below` entries (biases, scales) send all of u in each step, which is momentum SGD. 4,096
    divides ResNet-50 as the authors do.

    State: two float32 and a bit per parameter. Wire: 41 bits per sent entry at density 1/100 and a small all-reduce.

    Args:
      density: share of the entries to send, in (0, 1], or a function of the step that returns it (an optax schedule).
        The capacities fit its values at steps 0, 1, 2, 4, ... 2**20; what exceeds them in other steps waits.
      momentum: m, in [0, 1). With 0 it is `gcjax.top_k_compress`. May be traced.
      nesterov: see above.
      masking: see above.
      clip_norm: bound on the norm of the sum of the workers' gradients, above 0, or None. Each worker scales its own
        gradient to a norm of at most clip_norm / sqrt(workers). To bound the norm of their mean, the update, by c, give
        workers * c. May be traced.
      warmup_steps: steps before `density` applies, divided equally between stages that send 1/4, 1/16, 1/64, ... of the
        entries; in the paper each stage is an epoch. 0 for none; must be 0 with a schedule.
      dense_below: see above; 0 compresses everything.
      capacity: as in `gcjax.variance_compress`; None for one capacity per stage.
      transport: as in `gcjax.variance_compress`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Raises:
      ValueError: for a value out of range, also of a schedule.
      TypeError: for an argument of the wrong type.

    **Randomness**: none. **Bias**: entries are delayed. With `momentum=0` or `masking=False` nothing is lost; otherwise
    an entry loses its momentum when it is sent. **Non-finite input**: the update is NaN on all workers and every
    worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.dgc_compress(density=0.5, momentum=0.5, dense_below=0)
    >>> g = jnp.array([4.0, 2.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # v of the second entry: 2 from the first step, then 1 + 2
    >>> print(first, second)
    [4. 0.] [0. 5.]
    """
    check_number("momentum", momentum, 0.0, 1.0, low_included=True, high_included=False)
    check_flag("nesterov", nesterov)
    check_flag("masking", masking)
    check_integer("dense_below", dense_below, 0)
    if clip_norm is not None:
        check_number("clip_norm", clip_norm, 0.0)
    check_capacity(capacity)
    check_transport(transport)
    densities, k_at = _density_schedule(density, warmup_steps)
    code = float_code(32)
    reset = _masking_reset if masking else _velocity_reset

    def is_small(bucket: Bucket) -> np.ndarray:
        return np.array([s.size < dense_below for s in bucket.segments])

    def init(bucket: Bucket) -> SparseState:
        return SparseState.create(
            bucket, reset=reset, transport=transport, arrays=2, sent_with=jnp.asarray(is_small(bucket))
        )

    def update(step, state):
        bucket, small = state.bucket, is_small(state.bucket)
        g = (
            step.gradient
            if clip_norm is None
            else _clipped(step.gradient, clip_norm / math.sqrt(step.comm.size), bucket)
        )
        # v in a pass of its own, from the chosen u: XLA then computes both in the buffers of the old ones.
        _, u = state.take_in(add_to_velocity, g, go=step.go)
        v, added = state.accumulated[0], u + bucket.join(g) if nesterov else u
        v = jnp.where(step.go, jnp.where(unpack_mask(state.to_reset), 0, v) + added, v)

        dense = sum(s.size for s in bucket.segments if s.size < dense_below)
        small_words = jnp.asarray(np.where(small[bucket.leaf_of_word()], ~np.uint32(0), np.uint32(0)))
        entries = max(bucket.entries - dense, 1)
        slots = tuple(math.ceil(share * entries) for share in densities) if capacity is None else capacity
        mask = top_k_mask(v, k_at(state.step, entries), candidates=~small_words if dense else None)
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

    def add_to_velocity(values, inputs, was_sent):
        (v, u), (g,) = values, inputs
        return v, momentum * (u + g) if nesterov else momentum * u + g

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _density_schedule(
    density: float | Schedule, warmup_steps: int
) -> tuple[list[float], Callable[[Array, int], int | Array]]:
    """The densities that need a capacity, and k_at(step, entries) -> k of that step."""
    check_integer("warmup_steps", warmup_steps, 0)
    if callable(density):
        if warmup_steps:
            raise ValueError(f"a density schedule contains its own warm-up; leave out warmup_steps={warmup_steps!r}")
        return _probed(density), lambda step, entries: count_for_density(jnp.float32(density(step)), entries)
    if isinstance(density, jax.core.Tracer):
        raise TypeError(f"density fixes the size of the payload and cannot be traced, got {density}; give a function")
    check_number("density", density, 0.0, 1.0)
    stages = [*(share for share in WARMUP if share > density and warmup_steps), float(density)]
    if len(stages) == 1:
        return stages, lambda step, entries: count_for_density(stages[0], entries)

    def k_at(step, entries):
        stage = jnp.minimum(step, warmup_steps) * (len(stages) - 1) // warmup_steps
        return jnp.asarray([count_for_density(share, entries) for share in stages], jnp.int32)[stage]

    return stages, k_at


def _probed(schedule: Schedule) -> list[float]:
    """Values of a schedule: the smallest, each that is at least 1.5 times the one before, and the largest."""
    with jax.ensure_compile_time_eval():
        values = {step: schedule(step) for step in PROBED_STEPS}
    for step, value in values.items():
        check_number(f"density({step})", value, 0.0, 1.0)
    shares = sorted(float(value) for value in values.values())
    kept = shares[:1]
    for share in shares:
        if share >= 1.5 * kept[-1]:
            kept.append(share)
    return [*kept, shares[-1]]


def _clipped(gradient: Sequence[Array], limit: ArrayLike, bucket: Bucket) -> list[Array]:
    """The gradient scaled to a norm of at most `limit`."""
    everything, x = whole_group(bucket), bucket.join(gradient)
    (largest,) = everything.maxima(jnp.abs(x))
    norm = everything.norms(x, largest)[0]
    return [g * jnp.where(norm > limit, limit / norm, 1) for g in gradient]


def _with_means(
    mean: Sequence[Array], own: Sequence[Array], small: np.ndarray, comm: Comm, go: Array
) -> tuple[Array, ...]:
    """`mean`, in the small leaves replaced by the mean of the workers' own values, by one all-reduce."""
    values = comm.mean(jnp.concatenate([x.reshape(-1) for x, dense in zip(own, small, strict=True) if dense]))
    values = jnp.where(go, values, jnp.nan)
    ends = np.cumsum([x.size for x in mean] * small)
    leaves = zip(mean, small, ends, strict=True)
    return tuple(values[end - x.size : end].reshape(x.shape) if dense else x for x, dense, end in leaves)
