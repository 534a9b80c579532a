"""Gradient dropping: send the entries above a quantile of the magnitudes, estimated from a sample.

**Source.** Alham Fikri Aji, Kenneth Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv 1704.05021.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then the entries with
float32 values, in the compact form of `gcjax._sparse.wire`.

**Deviations.** (1) The bucket is divided into equal stretches, and the sample has one entry of each, at positions that
change with the step. Its size is fixed; the paper's 0.1 % of the entries says little about a leaf at densities of 1 %
and below. (2) The paper has a parameter server that drops entries of the sum, too; here every worker receives what the
others send. (3) In a model above 2**28 entries, each bucket has its own quantile. (4) On overflow the largest entries
are sent; the others stay in the residual. (5) Zeros are never sent.
"""

import math

import jax.numpy as jnp
import numpy as np
import optax

from gcjax._kernels.hashing import scatter_positions
from gcjax._sparse.capacities import capacities_around
from gcjax._sparse.method import method_without_padding
from gcjax._sparse.selection import SAMPLE, quantile_threshold, sampled
from gcjax._types import Array, AxisNames
from gcjax._validation import check_flag, static_share
from gcjax.extend import Bucket, check_capacity, compress, count_for_density, leaf_groups, pack_mask

LEAF_SAMPLE = 1 << 12  # smallest sample of a leaf
CAPACITIES = (0.5, 1.25, 2.0)  # the default ones, relative to the wanted count


def drop_compress(
    density: float = 0.01,
    *,
    layer_wise: bool = False,
    capacity: float | tuple[int, ...] | None = None,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the entries of gradient plus residual whose magnitude reaches a quantile, estimated from a sample.

        a = g + e
        where |a| >= t:  send a, e <- 0
        elsewhere:       e <- a

    with t the magnitude that a share `density` of the sample reaches; the update is the mean over workers of the sent
    entries. The paper's drop rate R is 1 - density. Entries are delayed, which biases a step; nothing is lost. The
    sample has 65,536 entries (all of a smaller model), at positions that follow from the step. The number sent varies
    with it: by 4 % (one standard deviation) at density 0.01, by 12 % at 0.001. `gcjax.top_k_compress` sends exactly the
    wanted number.

    State: a float32 and a bit per parameter. Wire: 41 bits per sent entry at density 1/100. The optimiser comes after
    it: `optax.chain(gcjax.contrib.drop_compress(0.01), optax.sgd(0.1))`.

    Args:
      density: share of the entries to send, in (0, 1].
      layer_wise: one threshold per leaf, for leaves with gradients of very different magnitude. Each leaf sends at
        least one entry. The samples are smaller: 65,536 entries in all, but at least 4,096 per leaf.
      capacity: see docs/common.md; None for 1/2, 5/4 and 2 times the wanted count.
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density or capacity out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.drop_compress(density=0.25)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # the third entry has accumulated 4
    >>> print(first, second)
    [3. 0. 0. 0.] [0. 0. 4. 0.]
    """
    density = static_share("density", density)
    check_flag("layer_wise", layer_wise)
    check_capacity(capacity)

    def select(a: Array, step: Array, bucket: Bucket) -> Array:
        return pack_mask(jnp.abs(a) >= (_of_leaves if layer_wise else _of_all)(a, step, bucket, density))

    def wanted(bucket: Bucket) -> int:
        if layer_wise:
            return sum(math.ceil(density * s.size) for s in bucket.segments)
        return count_for_density(density, bucket.entries)

    method = method_without_padding(select, capacities_around(wanted, CAPACITIES, capacity), transport)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _of_all(a: Array, step: Array, bucket: Bucket, density: float) -> Array:
    """The quantile of all entries. The sample has its share of the padding, which is zero and not counted."""
    samples = a.reshape(-1)[scatter_positions(bucket.size, min(bucket.size, SAMPLE), step)]
    parameters = len(samples) * (bucket.entries / bucket.size)
    return quantile_threshold(samples[None], parameters, density)[0]


def _of_leaves(a: Array, step: Array, bucket: Bucket, density: float) -> Array:
    """The quantile of each entry's leaf, as `Groups.per_entry` has it."""
    groups = leaf_groups(bucket)
    samples = sampled(a, bucket, max(SAMPLE // len(groups), LEAF_SAMPLE), step)
    counts = np.minimum(groups.sizes, samples.shape[1])
    return groups.per_entry(quantile_threshold(samples, counts, density))
