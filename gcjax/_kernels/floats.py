"""Floats: their bits as integers, exponents, and rounding to narrower dtypes."""

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._types import Array

FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest normal number; XLA flushes smaller ones

_SIGN = 1 << 31
_MANTISSA = 23


def float_bits(x: Array) -> Array:
    """float32 -> its bits as uint32.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> hex(gx.float_bits(jnp.float32(1.0)))
    '0x3f800000'
    """
    return lax.bitcast_convert_type(x, jnp.uint32)


def bits_float(bits: Array) -> Array:
    """uint32 -> the float32 with these bits.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.bits_float(jnp.uint32(0x3F800000)))
    1.0
    """
    return lax.bitcast_convert_type(bits, jnp.float32)


def sign_bit(x: Array) -> Array:
    """float32 -> uint32 with only the sign, in bit 31."""
    return float_bits(x) & jnp.uint32(_SIGN)


def magnitude_bits(x: Array) -> Array:
    """float32 -> bits of |x|. As integers they have the order of the magnitudes, with NaN above infinity."""
    return float_bits(x) & jnp.uint32(_SIGN - 1)


def exponent(bits: Array) -> Array:
    """Biased exponent (int32, 0 to 255) of a float32 given by the bits of its magnitude: floor(log2) + 127."""
    return (bits >> _MANTISSA).astype(jnp.int32)


def nearest_exponent(x: Array) -> Array:
    """Biased exponent of the power of two nearest to |x| (the mid-point 1.5 * 2**k goes up), int32."""
    return exponent(magnitude_bits(x) + jnp.uint32(1 << (_MANTISSA - 1)))


def rounded(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """`x` rounded to a number of `dtype`, in its own dtype.

    XLA may leave out a conversion to a narrower dtype and back (xla_allow_excess_precision), but never a reduction of
    precision.

    >>> import jax.numpy as jnp
    >>> print(rounded(jnp.float32(1.001), jnp.bfloat16))
    1.0
    """
    of, to = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if of.bits <= to.bits:
        return x
    normal = lax.reduce_precision(x, to.nexp, to.nmant)
    if of.nexp == to.nexp:
        return normal
    step = float(to.smallest_subnormal)  # a reduction of precision makes subnormal numbers 0
    return jnp.where(jnp.abs(x) < float(to.smallest_normal), jnp.round(x * (1 / step)) * step, normal)


def power_of_two(biased: Array) -> Array:
    """2.0 ** (biased - 127) for a biased exponent in 1..254; 0 gives 0.0 and 255 infinity."""
    return bits_float(biased.astype(jnp.uint32) << _MANTISSA)


def to_unit(peak: Array) -> Array:
    """A power of two that scales magnitudes up to `peak` to below 4, so that sums of their squares cannot overflow."""
    return power_of_two(254 - jnp.clip(exponent(magnitude_bits(peak)), 1, 253))
