"""Natural compression: the sign and a power of two, drawn without bias.

**Source.** Samuel Horvath, Chen-Yu Ho, Ludovit Horvath, Atal Narayan Sahu, Marco Canini, Peter Richtarik, "Natural
Compression for Distributed Deep Learning", MSML 2022, arXiv 1905.10988, the operator C_nat.

**Wire format.** One uint32 vector per worker and bucket: nine packed masks with one bit per entry
(`gcjax.extend.pack_mask`). The first eight are the bits of float32's biased exponent, lowest first (0 for zero); the
ninth is the sign, 1 for negative. In two phases: such a vector to each owner, for its pieces of the leaves; then one
from each owner to all.

**Deviations.** Numbers below the normal range (about 1e-38) become zero: eight bits have no exponents for them, and
backends flush them.
"""

import jax.numpy as jnp
import optax

from gcjax._kernels.floats import TINY
from gcjax._types import Array, AxisNames
from gcjax._validation import check_random_key
from gcjax.extend import Bucket, bits_float, compress, dense_codec, float_bits, hash_bits, pack_planes, unpack_planes

BITS = 9
_MANTISSA = 23


def natural_compress(
    *,
    key: Array,
    transport: str = "all_gather",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the sign of every entry and one of the two powers of two around it.

        p = the largest power of two up to |t|
        C(t) = sign(t) * 2p  with probability |t| / p - 1
               sign(t) * p   otherwise

    The update is the mean over workers of C(g). C is unbiased, but below 1e-38 (see the deviations), and its variance
    at most t^2 / 8. In two phases owners round the mean to the nearest power of two and owe the rest.

    State: none; in two phases a float32 per owned parameter. Wire: 9 bits per parameter. The optimiser comes after it:
    `optax.chain(gcjax.contrib.natural_compress(key=jax.random.key(0)), optax.sgd(0.1))`.

    Args:
      key: random key, the same on all workers.
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for an unknown transport.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.contrib.natural_compress(key=jax.random.key(0))
    >>> g = jnp.array([4.0, -0.25, 0.0, 3.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> print(first[:3], first[3] in (2.0, 4.0))
    [ 4.   -0.25  0.  ] True
    """
    check_random_key("key", key)

    def encode(x: Array, bucket: Bucket, key: Array) -> tuple[Array, int]:
        # 23 random bits are added to the mantissa: they carry into the exponent with the mantissa as the probability.
        return encoded(x, bucket, hash_bits(key, bucket.positions()) >> (32 - _MANTISSA))

    def encode_mean(x: Array, bucket: Bucket, key: Array) -> tuple[Array, int]:
        del key
        return encoded(x, bucket, jnp.uint32(1 << (_MANTISSA - 1)))  # to the nearest power of two

    def encoded(x: Array, bucket: Bucket, draw: Array) -> tuple[Array, int]:
        x = jnp.where(jnp.abs(x) < TINY, 0, x)
        code = (float_bits(x) + draw) >> _MANTISSA
        return pack_planes(code, BITS, bucket.words), BITS * bucket.entries

    def decode(payload: Array, bucket: Bucket) -> Array:
        del bucket
        return bits_float(unpack_planes(payload, BITS) << _MANTISSA)

    codec = dense_codec(encode, decode, feedback=False, key=key, transport=transport, encode_mean=encode_mean)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name)
