"""SIDCo: send the entries above a threshold from an exponential distribution, fitted in stages further and further out.

**Source.** Ahmed M. Abdelmoniem, Ahmed Elzanaty, Mohamed-Slim Alouini, Marco Canini, "An Efficient Statistical-based
Gradient Compression Technique for Distributed Training Systems", MLSys 2021, arXiv 2101.10761, with exponential fits
(SIDCo-E).

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); an index per slot; a
float32 value per slot.

**Deviations.** (1) The number of stages is fixed; the paper adds and removes stages by the counts of past steps. (2) A
stage fits what exceeds the threshold before it, less that threshold; the authors' code takes the smallest that exceeds
it in place of the threshold, which is nearly the same and takes one reduction more. (3) A threshold above the largest
magnitude is lowered to it, or of equal magnitudes, and of a single parameter, none would ever be sent. (4) What
exceeds the largest capacity stays in the residual. (5) Zeros are never sent.
"""

import math

import jax.numpy as jnp
import optax

from gcjax._kernels.bits import TINY, to_unit
from gcjax._validation import check_integer, check_number
from gcjax.extend import (
    Bucket,
    check_capacity,
    compress,
    count_for_density,
    pack_mask,
    sparse_method,
    whole_group,
)

FIRST_RATIO = 0.25
RUNGS = (0.75, 1.25, 2.0)  # default capacities, as shares of the wanted count


def sidco_compress(
    density, *, stages: int = 3, capacity=None, transport="all_gather", axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the entries of gradient plus residual above a threshold that fits an exponential to their magnitudes.

    .. math::
        a = g + e, \qquad |a| \ge \theta_M \;\Rightarrow\; \text{send } a,\; e \leftarrow 0; \qquad \text{else }
        e \leftarrow a

    .. math::
        \theta_m = \theta_{m-1} - \ln(\delta_m)\, \mathrm{mean}\{|a| - \theta_{m-1} : |a| \ge \theta_{m-1}\}, \qquad
        \theta_0 = 0

    with the density :math:`\delta = \delta_1 \cdots \delta_M`, the first :math:`\delta_1 = 1/4` and the others equal;
    from a density of 1/4 on there is only one stage. The update is the mean over workers of what they sent.

    Every stage is one pass. At densities of 0.01 and 0.001, three stages send 0.65 to 1.2 times the wanted number of
    entries that are distributed normally, or as Student's t down to three degrees of freedom, and one stage 0 to 5
    times; the residual, which is cut off at the threshold, adds up to a half. More stages are better for lighter tails
    than exponential and for lower densities.

    Costs a float32 and a bit per parameter in state; 64 bits per sent entry on the wire. Momentum, weight decay and
    learning rate come after it, clipping may stand before it:
    `optax.chain(gcjax.sidco_compress(0.01), optax.sgd(0.1))`.

    Args:
      density: :math:`\delta`, share of the entries meant to be sent, in (0, 1].
      stages: M, at least 1.
      capacity: as in `gcjax.variance_compress`; None for 3/4, 5/4 and 2 times the wanted count.
      transport: as in `gcjax.variance_compress`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a density, number of stages or capacity out of range.
      TypeError: for an argument of another type.

    **Randomness**: none. **Bias**: entries are delayed; nothing is lost. **Non-finite input**: the update is NaN on all
    workers and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.sidco_compress(density=0.25)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.0])
    >>> first, state = tx.update(g, tx.init(g))  # the mean magnitude is 1.5, the threshold 1.5 ln 4 = 2.08
    >>> second, state = tx.update(g, state)  # of 3, -2, 4, 0 the threshold is 3.12
    >>> print(first, second)
    [3. 0. 0. 0.] [0. 0. 4. 0.]
    """
    check_number("density", density, 0.0, 1.0)
    check_integer("stages", stages, 1)
    check_capacity(capacity)
    ratios = _ratios(density, stages)

    def select(a, step, bucket):
        del step
        return _above(a, bucket, ratios)

    def slots(bucket):
        wanted = count_for_density(density, bucket.entries)
        around = tuple(min(math.ceil(rung * wanted), bucket.entries) for rung in RUNGS)
        return around if capacity is None else capacity

    return compress(sparse_method(select, slots, transport), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _ratios(density: float, stages: int) -> tuple[float, ...]:
    if stages == 1 or density >= FIRST_RATIO:
        return (density,)
    return FIRST_RATIO, *[(density / FIRST_RATIO) ** (1 / (stages - 1))] * (stages - 1)


def _above(a, bucket: Bucket, ratios):
    """Mask words of the entries from the last stage's threshold on."""
    group = whole_group(bucket)
    (peak,) = group.maxima(jnp.abs(a))
    x, largest = jnp.abs(a) * to_unit(peak[0]), peak[0] * to_unit(peak[0])
    total, count = group.sums(x)[0][0], jnp.float32(bucket.entries)
    threshold = jnp.minimum(-jnp.log(ratios[0]) * total / count, largest)
    for ratio in ratios[1:]:
        exceeds = x >= threshold
        total, count = (s[0] for s in group.sums(jnp.where(exceeds, x - threshold, 0), exceeds.astype(jnp.float32)))
        threshold = jnp.minimum(threshold - jnp.log(ratio) * total / count, largest)
    return pack_mask((x >= threshold) & (jnp.abs(a) >= TINY))
