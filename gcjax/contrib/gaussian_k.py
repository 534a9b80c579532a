"""GaussianK: send the entries above a threshold that would pass k of them if they were normally distributed.

**Source.** Shaohuai Shi, Xiaowen Chu, Ka Chun Cheung, Simon See, "Understanding Top-k Sparsification in Distributed
Deep Learning", 2019, arXiv 1911.08772, Gaussian_k as in the authors' code: two-sided, and the last threshold that was
counted is applied.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then the entries with
float32 values, in the compact form of `gcjax._sparse.wire`.

**Deviations.** (1) The standard deviation divides by d; d - 1 would divide by zero for a single parameter. (2) On
overflow the largest entries are sent; the others stay in the residual. (3) Zeros are never sent.
"""

import statistics

import jax.numpy as jnp
import optax

from gcjax._kernels.bits import count_bits
from gcjax._kernels.floats import TINY, to_unit
from gcjax._sparse.capacities import capacities_around
from gcjax._sparse.method import method_without_padding
from gcjax._types import Array, AxisNames
from gcjax._validation import static_share
from gcjax.extend import Bucket, check_capacity, compress, count_for_density, pack_mask, parameters_only, whole_group

ROUNDS = 3  # most thresholds for which entries are counted
CAPACITIES = (0.5, 4 / 3, 4.0)  # the default ones, relative to k; the rounds aim at no more than 4/3


def gaussian_k_compress(
    density: float,
    *,
    capacity: float | tuple[int, ...] | None = None,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the entries of gradient plus residual above a threshold taken from their mean and standard deviation.

        a = g + e
        t = mean(a) - q * std(a)
        where |a| > t:  send a, e <- 0;  elsewhere:  e <- a

    with q the quantile of the normal distribution at half the density, k / (2 d), which is negative. If fewer than 2k/3
    entries pass, t is halved; if more than 4k/3 pass, it is multiplied by 3/2; they are counted three times at most.
    The update is the mean over workers of the sent entries. Entries are delayed, which biases a step; nothing is lost.
    The number sent follows the density only while the entries are near normal: expect 0.3 to 3 times k, and 6 times for
    some distributions. If the mean is far below zero, everything passes. `gcjax.contrib.drop_compress` fits any
    distribution.

    State: a float32 and a bit per parameter. Wire: 41 bits per sent entry at density 1/100. The optimiser comes after
    it: `optax.chain(gcjax.contrib.gaussian_k_compress(0.01), optax.sgd(0.1))`.

    Args:
      density: wanted share of the entries to send, in (0, 1].
      capacity: see docs/common.md; None for 1/2, 4/3 and 4 times k.
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density or capacity out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.gaussian_k_compress(density=0.25)
    >>> g = jnp.array([3.0, -1.0, -2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # the third entry has accumulated -4
    >>> print(first, second)
    [3. 0. 0. 0.] [ 0.  0. -4.  0.]
    """
    density = static_share("density", density)
    check_capacity(capacity)
    quantile = statistics.NormalDist().inv_cdf(density / 2)

    def wanted(bucket: Bucket) -> int:
        return count_for_density(density, bucket.entries)

    def select(a: Array, step: Array, bucket: Bucket) -> Array:
        del step
        x, threshold = _normal_threshold(a, bucket, quantile)
        return _adjusted_mask(x, threshold, wanted(bucket))

    method = method_without_padding(select, capacities_around(wanted, CAPACITIES, capacity), transport)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _normal_threshold(a: Array, bucket: Bucket, quantile: float) -> tuple[Array, Array]:
    """The magnitudes and the threshold, both in a unit of about the largest magnitude.

    In this unit no sum or square leaves float32's range. The deviations from the mean are squared in a pass of their
    own, because the mean of the squares minus the square of the mean loses all digits where the mean is large.
    """
    group = whole_group(bucket)
    (peak,) = group.maxima(jnp.abs(a))
    x = a * to_unit(peak[0])
    mean = group.sums(x)[0][0] / bucket.entries
    variance = group.sums(jnp.square(parameters_only(x - mean, bucket)))[0][0] / bucket.entries
    return jnp.abs(x), mean - quantile * jnp.sqrt(variance)


def _adjusted_mask(x: Array, threshold: Array, k: int) -> Array:
    """Packed mask of the entries of x, none negative, above the threshold, adjusted to pass about k."""

    def above(threshold: Array) -> tuple[Array, Array]:
        words = pack_mask((x > threshold) & (x >= TINY))
        return words, jnp.sum(count_bits(words))

    words, count = above(threshold)
    for _ in range(ROUNDS - 1):  # once the count is right, the factor is 1 in all following rounds
        threshold = threshold * jnp.where(3 * count < 2 * k, 0.5, jnp.where(3 * count > 4 * k, 1.5, 1.0))
        words, count = above(threshold)
    return words
