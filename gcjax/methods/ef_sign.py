"""EF-SignSGD: one bit per entry and one scale per leaf, with error feedback.

**Source.** Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi, "Error Feedback Fixes SignSGD and
other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847, algorithm 1 with one scale per layer.

**Wire format.** One uint32 vector per worker and bucket: a float32 scale for each leaf; then a packed mask with one bit
per entry, 1 for negative (`gcjax.extend.pack_mask`). In two phases: such a vector to each owner, for its pieces of the
leaves; then one from each owner to all.

**Deviations.** The residual holds gradients, not gradients times the learning rate. The learning rate comes after the
compressor in the chain, so a change of it also scales what the residual contributes. Two phases are not in the paper;
the error feedback of the owners is that of Tang et al., "DoubleSqueeze", ICML 2019, arXiv 1905.05957.
"""

import jax.numpy as jnp
import optax

from gcjax._types import Array, AxisNames
from gcjax.extend import Bucket, bits_float, compress, dense_codec, float_bits, leaf_groups, pack_mask, unpack_mask


def ef_sign_compress(
    *,
    transport: str = "all_gather",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the sign of every entry of gradient plus residual, scaled by the leaf's mean magnitude.

        a = g + e
        y = mean(|a|) * sign(a)
        e <- a - y

    The mean is over the leaf, the update is the mean over workers of y, and a zero is sent as plus. The code is biased,
    which the residual corrects: sum(e**2) <= sum(a**2) - sum(|a|)**2 / d. In two phases every owner's piece of a leaf
    has its own scale. Zeros that pad the last pieces count in the means: of a leaf of 57 entries on 8 workers the last
    entry is at first sent as an eighth of itself.

    State: a float32 per parameter; in two phases one more per owned parameter. Wire: 1 bit per parameter and 32 per
    leaf or piece. The optimiser comes after it: `optax.chain(gcjax.ef_sign_compress(), optax.sgd(0.1))`.

    Args:
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for an unknown transport.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.ef_sign_compress()
    >>> g = jnp.array([3.0, -1.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # a is 4, 0
    >>> print(first, second)
    [ 2. -2.] [2. 2.]
    """
    codec = dense_codec(_encode, _decode, feedback=True, transport=transport)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _encode(x: Array, bucket: Bucket, key: Array | None) -> tuple[Array, int]:
    del key
    groups = leaf_groups(bucket)
    (total,) = groups.sums(jnp.abs(x))
    scale = total / groups.counts()
    return jnp.concatenate([float_bits(scale), pack_mask(x < 0)[: bucket.words]]), bucket.entries + 32 * len(groups)


def _decode(payload: Array, bucket: Bucket) -> Array:
    groups = leaf_groups(bucket)
    scale = groups.per_entry(bits_float(payload[: len(groups)]))
    return jnp.where(unpack_mask(payload[len(groups) :]), -scale, scale)
