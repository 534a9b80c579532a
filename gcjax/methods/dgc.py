"""Deep Gradient Compression: exact top-k of accumulated velocities, with momentum, clipping and warm-up.

**Source.** Yujun Lin, Song Han, Huizi Mao, Yu Wang, William Dally, "Deep Gradient Compression: Reducing the
Communication Bandwidth for Distributed Training", ICLR 2018, arXiv 1712.01887: momentum correction, local gradient
clipping, momentum factor masking, warm-up.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); an index per slot; a
float32 value per slot. Besides one float32 all-reduce of the entries of the small leaves.

**Deviations.** (1) k counts over all compressed leaves (of a part of 2**28 entries above that), not for each leaf: what
is small next to the rest of the model can wait. (2) The k-th largest is exact; the paper samples it and cuts what is
too much. (3) Leaves are sent densely for their size alone; the authors do so with those of one axis, which would take a
flat vector of parameters for a bias. Their momentum is taken before the all-reduce, which gives the same. (4) The
paper's run-length code of the indices has no static size; plain indices are sent. (5) Above 2**28 entries the norm for
clipping is that of each such part. (6) Zeros are not sent.
"""

import math

import jax
import jax.numpy as jnp
import optax

from gcjax._types import Array, ArrayLike, PyTree
from gcjax._validation import check_flag, check_integer, check_number
from gcjax.extend import (
    Bucket,
    Compressor,
    Message,
    Segment,
    SparseState,
    capacities_for,
    check_capacity,
    check_transport,
    compress,
    count_for_density,
    exchange,
    float_code,
    top_k_mask,
    whole_group,
)

WARMUP = tuple(4.0**-i for i in range(1, 15))  # densities of its stages, down to one entry of the largest bucket
PROBED_STEPS = (0, *(1 << k for k in range(21)))  # where a schedule is read at construction


def _masking_reset(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """v <- 0, u <- 0."""
    return 0, 0


def _velocity_reset(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """v <- 0; u goes on."""
    return 0, values[1]


def dgc_compress(
    density=0.001,
    *,
    momentum=0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm=None,
    warmup_steps: int = 0,
    dense_below: int = 4096,
    capacity=None,
    transport="all_gather",
    axis_name=None,
    inner_axis_name=None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the k entries of largest accumulated velocity, k = max(1, floor(density * entries)).

    .. math::
        u \leftarrow m u + g, \qquad v \leftarrow v + u, \qquad \text{send the } k \text{ entries with the largest }
        |v|, \qquad u, v \leftarrow 0 \text{ there}

    and the update is the mean over workers of what they sent. With `nesterov`, :math:`u \leftarrow m (u + g)` and
    :math:`v \leftarrow v + u + g`. Momentum is taken here, by every worker of its own gradient, so that an entry that
    has waited arrives with all the velocity it would have had.

    Setting u to zero where it was sent (momentum factor masking) keeps stale momentum from driving an entry on. It also
    cuts momentum short, to none for an entry sent in every step: among workers whose gradients do not vanish at the
    optimum, those that send an entry seldom then count for more, and training ends beside it. With `masking=False` all
    that momentum SGD would do is done in the end.

    The optimiser after it is plain SGD: `optax.chain(gcjax.dgc_compress(0.001), optax.sgd(0.1))`, with the learning
    rate that momentum SGD would have. Weight decay before it would fill u, so it stands between the two:
    `optax.add_decayed_weights(d)`. There it has no momentum; momentum SGD with decay c pulls like d = c / (1 - m).

    Leaves of fewer than `dense_below` entries (biases, scales) send all their u in each step, so that they see momentum
    SGD. 4,096 divides ResNet-50 as the authors do.

    Costs two float32 and a bit per parameter in state; 64 bits per sent entry on the wire and a small all-reduce.

    Args:
      density: share of the entries to send, in (0, 1], or a function of the step that returns it (an optax schedule).
        The payload is made for the values at steps 0, 1, 2, 4, ... 2**20; what does not fit between them waits.
      momentum: m, in [0, 1). With 0 it is `gcjax.top_k_compress`. May be traced.
      nesterov, masking: see above.
      clip_norm: threshold for the norm of the sum of the workers' gradients, above 0, or None. Each worker first scales
        its own to a norm of at most clip_norm / sqrt(workers). The update is their mean: for a threshold c of that,
        give workers * c. May be traced.
      warmup_steps: steps in which 1/4, 1/16, 1/64, ... of the entries are sent, for equally long, before `density`; the
        paper has an epoch for each. 0 for none, and with a schedule.
      dense_below: see above; 0 compresses everything.
      capacity: as in `gcjax.variance_compress`; None for one that fits each stage.
      transport: as in `gcjax.variance_compress`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a value out of range, also of a schedule.
      TypeError: for an argument of the wrong type.

    **Randomness**: none. **Bias**: entries are delayed. With `momentum=0` or `masking=False` nothing is lost; else the
    momentum that an entry has when it is sent ends there. **Non-finite input**: the update is NaN on all workers and
    every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.dgc_compress(density=0.5, momentum=0.5, dense_below=0)
    >>> g = jnp.array([4.0, 2.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # the second has 2 from the first step, and 1 + 2 from this one
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
    code, no_scales = float_code(32), jnp.zeros(0, jnp.uint32)
    reset = _masking_reset if masking else _velocity_reset

    def init(bucket: Bucket) -> SparseState:
        return SparseState.create(bucket, reset=reset, transport=transport, arrays=2)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket = state.bucket
        small = [s for s in bucket.segments if s.size < dense_below]
        g = gradient if clip_norm is None else _clipped(gradient, clip_norm / math.sqrt(comm.size), bucket)
        old_v, old_u = state.accumulated
        v, u = state.settled()
        # What follows uses nothing but the chosen u, which is then computed once, in the old one's buffer.
        u = jnp.where(all_finite, momentum * (u + g) if nesterov else momentum * u + g, old_u)
        added = u + g if nesterov else u
        v = _emptied(jnp.where(all_finite, v + added, old_v), small)

        dense = sum(s.size for s in small)
        entries = max(bucket.entries - dense, 1)
        slots = tuple(math.ceil(share * entries) for share in densities) if capacity is None else capacity
        mask = top_k_mask(v, k_at(state.step, entries))
        message = Message(v, mask, code, no_scales, bucket, capacities_for(slots))
        exchanged = exchange(message, state.transport, comm, all_finite)
        mean, report = exchanged.mean, exchanged.report
        if small:
            mean = _joined(mean, jnp.where(all_finite, comm.mean(_take(added, small)), jnp.nan), small)
            report = report._replace(
                selected=report.selected + dense,
                sent=report.sent + dense,
                capacity=report.capacity + dense,
                payload_bits=report.payload_bits + 32 * dense,
            )
        return mean, state.after(exchanged, (v, u), all_finite), report

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _density_schedule(density, warmup_steps: int):
    """(densities that the payloads are made for, k_at), with k_at(step, entries) -> k of that step."""
    check_integer("warmup_steps", warmup_steps, 0)
    if callable(density):
        if warmup_steps:
            raise ValueError(f"a density that is a function brings its own warm-up: got warmup_steps={warmup_steps!r}")
        return _probed(density), lambda step, entries: count_for_density(jnp.float32(density(step)), entries)
    if isinstance(density, jax.core.Tracer):
        raise TypeError(f"density sets the size of the payload and cannot be traced, got {density}; give a function")
    check_number("density", density, 0.0, 1.0)
    stages = [*(share for share in WARMUP if share > density and warmup_steps), float(density)]
    if len(stages) == 1:
        return stages, lambda step, entries: count_for_density(stages[0], entries)

    def k_at(step, entries):
        stage = jnp.minimum(step, warmup_steps) * (len(stages) - 1) // warmup_steps
        return jnp.asarray([count_for_density(share, entries) for share in stages], jnp.int32)[stage]

    return stages, k_at


def _probed(schedule) -> list[float]:
    """Values of a schedule, thinned out to those at least half as large again as the next below, and the largest."""
    with jax.ensure_compile_time_eval():
        values = {step: schedule(step) for step in PROBED_STEPS}
    for step, value in values.items():
        check_number(f"density({step})", value, 0.0, 1.0)
    shares = sorted(map(float, values.values()))
    kept = shares[:1]
    for share in shares:
        if share >= 1.5 * kept[-1]:
            kept.append(share)
    return [*kept, shares[-1]]


def _clipped(g, limit, bucket: Bucket):
    """g scaled to a norm of at most `limit`."""
    everything = whole_group(bucket)
    (largest,) = everything.maxima(jnp.abs(g))
    norm = everything.norms(g, largest)[0]
    return g * jnp.where(norm > limit, limit / norm, 1)


def _take(x, segments: list[Segment]):
    """The entries of some segments, one behind the other."""
    return jnp.concatenate([x[s.offset : s.offset + s.size] for s in segments])


def _emptied(x, segments: list[Segment]):
    """x with zeros in some segments."""
    for s in segments:
        x = x.at[s.offset : s.offset + s.size].set(0)
    return x


def _joined(x, values, segments: list[Segment]):
    """x with `values`, as `_take` lines them up, in some segments.

    Put together from slices, out of which the leaves are cut again: of writes into x, XLA would make a copy of x.
    """
    pieces, begin, end = [], 0, 0
    for s in segments:
        pieces += [x[end : s.offset], values[begin : begin + s.size]]
        begin, end = begin + s.size, s.offset + s.size
    return jnp.concatenate([*pieces, x[end:]])
