"""Adaptive quantisation: send a fixed share of the largest entries of each sign as one bit and a position.

**Source.** Nikoli Dryden, Sam Ade Jacobs, Tim Moon, Brian Van Essen, "Communication Quantization for Data-Parallel
Training of Deep Neural Networks", MLHPC 2016, doi 10.1109/MLHPC.2016.004, the adaptive quantisation.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); a float32 mean for each
leaf's positive class, then one for each leaf's negative class; then the entries, with
signs of 1 bit, in the compact form of `gcjax._sparse.wire`.

**Deviations.** (1) The paper codes the gaps between indices with varying length. That has no static size;
Elias-Fano's code takes its place. (2) The paper adds the messages with an all-reduce of its own that quantises again at
each hop; here every worker gets every message as it is, or owners quantise their sums once. (3) On overflow the largest
entries are sent and the others stay in the residual; the means are still those of all selected entries.
"""

import jax
import jax.numpy as jnp
import optax

from gcjax._kernels.bits import pack_masks
from gcjax._kernels.floats import to_unit
from gcjax._sparse.capacities import capacities_around
from gcjax._sparse.selection import SAMPLE, quantile_threshold, sampled
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import static_share
from gcjax.extend import (
    Bucket,
    Compressor,
    Groups,
    Message,
    SparseState,
    StepInput,
    StepResult,
    add_gradient,
    capacities_for,
    check_capacity,
    check_transport,
    class_mean_code,
    compress,
    count_for_density,
    exchange,
    float_bits,
    leaf_groups,
)

LEAF_SAMPLE = 1 << 12  # smallest sample of a leaf
CAPACITIES = (0.25, 0.5, 1.0, 1.25, 1.5, 2.0)  # the default ones, relative to the wanted count


def _reset(values: tuple[Array, ...], means: PyTree) -> tuple[ArrayLike, ...]:
    """e <- a - the mean of its class."""
    (a,), (plus, minus) = values, means
    return (a - jnp.where(a < 0, minus, plus),)


def dryden_compress(
    density: float = 0.01,
    *,
    capacity: float | tuple[int, ...] | None = None,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the largest entries of each sign of gradient plus residual as their class's mean.

        a = g + e
        send  m+  where a >=  t+,  m-  where a <= -t-
        e <- a - sent

    For each leaf, a share `density` of its positive entries reaches t+, the same share of the magnitudes of its
    negative ones t-, and m+ and m- are the means of the selected ones. The update is the mean over workers of the sent
    entries. The code is biased, which the residual corrects; nothing is lost, and |e|^2 = |a|^2 - |sent|^2 without
    overflow. Thresholds of leaves above 4,096 entries come from a sample (65,536 entries in all, at least 4,096 per
    leaf): the number sent varies by 4 % (one standard deviation) in a single leaf at density 0.01. Each class sends at
    least one entry, or all of its entries if the sample has none of them. Equal entries are sent together.

    State: a float32 and a bit per parameter. Wire: 5 bits per sent entry at density 1/4, 9.6 at 1/100, and 64 per leaf.
    The optimiser comes after it: `optax.chain(gcjax.contrib.dryden_compress(0.01), optax.sgd(0.1))`.

    Args:
      density: share of each class to send, in (0, 1]. May be traced if `capacity` is given.
      capacity: see docs/common.md; None for six from 1/4 to 2 times the wanted count.
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density or capacity out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.dryden_compress(density=0.5)
    >>> g = jnp.array([1.0, 5.0, 3.0, 2.0, -6.0])
    >>> first, state = tx.update(g, tx.init(g))  # 5 and 3 are sent as 4; -6 is alone in its class
    >>> second, state = tx.update(jnp.zeros(5), state)  # the residual is 1, 1, -1, 2, 0
    >>> print(first, second)
    [ 0.  4.  4.  0. -6.] [ 1.3333334  1.3333334 -1.         1.3333334  0.       ]
    """
    if capacity is None or not isinstance(density, jax.core.Tracer):
        density = static_share("density", density)
    check_capacity(capacity)
    check_transport(transport)
    code = class_mean_code()

    def wanted(bucket: Bucket) -> int:
        return count_for_density(density, bucket.entries) + 2 * len(bucket.segments)  # each class rounds its share up

    capacities = capacities_around(wanted, CAPACITIES, capacity)

    def init(bucket: Bucket) -> SparseState:
        no_means = (jnp.zeros(len(bucket.segments)),) * 2
        return SparseState.create(bucket, reset=_reset, transport=transport, sent_with=no_means)

    def update(step: StepInput, state: SparseState) -> StepResult[SparseState]:
        bucket = state.bucket
        (a,) = state.take_in(add_gradient, step.gradient, go=step.go)
        mask, means = _select(a, density, bucket, state.step)
        message = Message(a, mask, code, bucket, capacities_for(capacities(bucket), bucket.entries), float_bits(means))
        exchanged = exchange(message, state.transport, step.comm, step.go)
        new = state.after(exchanged, (a,), step.go, sent_with=tuple(jnp.split(means, 2)))
        return StepResult(exchanged.mean, new, exchanged.report)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _select(a: Array, density: float, bucket: Bucket, step: Array) -> tuple[Array, Array]:
    """Packed mask of the entries to send; the means of each leaf's positive class, then of each negative class."""
    groups = leaf_groups(bucket)
    samples = sampled(a, bucket, max(SAMPLE // len(groups), LEAF_SAMPLE), step)
    classes = jnp.maximum(jnp.concatenate([samples, -samples]), 0)
    least, most = _spread(groups, quantile_threshold(classes, jnp.sum(classes > 0, axis=1), density))
    plus, minus = a >= least, a <= -most
    words = pack_masks(plus, minus)
    # The unit keeps sums of huge numbers finite. At most 1, because the sample may not have the largest entry.
    unit = jnp.minimum(to_unit(jnp.max(classes, axis=1)), 1)
    plus_unit, minus_unit = _spread(groups, unit)
    sums = groups.sums(jnp.where(plus, a * plus_unit, 0), jnp.where(minus, a * minus_unit, 0))
    counts = [groups.set_bits(of_class) for of_class in words]
    return words[0] | words[1], jnp.concatenate(sums) / jnp.maximum(jnp.concatenate(counts), 1) / unit


def _spread(groups: Groups, values: Array) -> tuple[Array, Array]:
    """[2 * groups] -> each entry's value for the positive class of its leaf, and for the negative class."""
    return groups.per_entry(values[: len(groups)]), groups.per_entry(values[len(groups) :])
