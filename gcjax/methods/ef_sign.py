"""EF-SignSGD: one bit per entry and one scale per leaf, with error feedback.

**Source.** Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi, "Error Feedback Fixes SignSGD and
other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847, algorithm 1 with one scale per layer.

**Wire format.** One uint32 vector per worker and bucket: a float32 scale for each leaf; then a packed mask with one bit
per entry, 1 for negative (`gcjax.extend.pack_mask`).

**Deviations.** The residual holds gradients, not gradients times the learning rate. The learning rate comes after the
compressor in the chain, so a change of it also scales what the residual contributes.
"""

import jax.numpy as jnp
import optax

from gcjax._types import Array, AxisNames
from gcjax.extend import Bucket, bits_float, compress, float_bits, gather_codec, leaf_groups, pack_mask, unpack_mask


def ef_sign_compress(
    *, axis_name: AxisNames = None, inner_axis_name: AxisNames = None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the sign of every entry of gradient plus residual, scaled by the leaf's mean magnitude.

    .. math::
        a = g + e, \qquad y = \frac{\|a\|_1}{d}\, \mathrm{sign}(a), \qquad e \leftarrow a - y

    with d the number of entries of the leaf; the update is the mean over workers of y. A zero is sent as plus.

    State: a float32 per parameter. Wire: 1 bit per parameter and 32 per leaf. Learning rate, weight decay and momentum
    come after it: `optax.chain(gcjax.ef_sign_compress(), optax.sgd(0.1))`.

    Args:
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    **Randomness**: none. **Bias**: biased, which the residual corrects; :math:`\|e\|^2 \le (1 - \|a\|_1^2 / (d
    \|a\|_2^2)) \|a\|^2`. **Non-finite input**: the update is NaN on all workers and every worker's state stays as it
    was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.ef_sign_compress()
    >>> g = jnp.array([3.0, -1.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # a is 4, 0
    >>> print(first, second)
    [ 2. -2.] [2. 2.]
    """
    return compress(gather_codec(_encode, _decode, feedback=True), axis_name=axis_name, inner_axis_name=inner_axis_name)


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
