"""How the values of sparse entries become a few bits, and back.

Codes that are relative to a scale get one scale per leaf, sent once in the header: the bits of the largest selected
magnitude, or its exponent alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from gcjax._kernels.floats import (
    TINY,
    bits_float,
    exponent,
    float_bits,
    nearest_exponent,
    power_of_two,
    sign_bit,
)
from gcjax._types import Array, ArrayLike

_SIGN_SHIFT = 31


class ValueCode(NamedTuple):
    """How values travel. `scale` arguments are per entry (per leaf in `smallest`), as `to_scale` made them.

    Attributes:
      bits: bits of one value.
      scale_bits: bits of one leaf's scale in the header, 0 for none.
      to_scale: to_scale(peak) -> scale, uint32: peak holds the bits of a leaf's largest magnitude, 0 if it sends none.
      smallest: smallest(scale) -> the smallest magnitude that the code can send, float32.
      encode: encode(x, scale) -> uint32 below 2**bits, of float32 and uint32 arrays of one shape.
      decode: decode(code, *scales) -> float32, the inverse. Of codes with several scales per leaf it gets all of them.
      round: round(x, scale) -> the value that the receivers of x see. Raises where it is not known from these two.
      scale_sets: scales per leaf.

    In two phases owners send float32 values as they are. Otherwise they use `power_of_two_code`.
    """

    bits: int
    scale_bits: int
    to_scale: Callable[[Array], Array]
    smallest: Callable[[Array], Array]
    encode: Callable[[Array, Array], Array]
    decode: Callable[..., Array]
    round: Callable[[Array, Array], Array]
    scale_sets: int = 1


def power_of_two_code(has_zero: bool = False) -> ValueCode:
    """Sign and 3-bit exponent below the leaf's largest: 4 bits.

    With E = floor(log2(max |x|)) of the leaf, x is sent as sign(x) * 2**(E - d), d in 0..7: the power of two nearest
    to x, but not above 2**E. Bit 3 is the sign, bits 0 to 2 are d. With `has_zero`, d = 7 stands for zero.
    Source: Tsuzuku, Imachi, Akiba, "Variance-based Gradient Compression for Efficient Distributed Deep Learning",
    2018, arXiv 1802.06058, the 4-bit quantisation.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> code = gx.power_of_two_code()
    >>> scale = code.to_scale(gx.float_bits(jnp.full(3, 5.0)))  # the leaf's largest magnitude
    >>> print(code.decode(code.encode(jnp.array([5.0, -0.7, 0.3]), scale), scale))
    [ 4.   -0.5   0.25]
    """
    lowest = 6 if has_zero else 7

    def below_top(x: Array, scale: Array) -> Array:
        return jnp.maximum(scale.astype(jnp.int32) - nearest_exponent(x), 0)

    def value(sign: Array, below: Array, scale: Array) -> Array:
        magnitude = float_bits(power_of_two(jnp.maximum(scale.astype(jnp.int32) - below, 0)))
        return bits_float(sign | (jnp.where(below > lowest, 0, magnitude) if has_zero else magnitude))

    def smallest(scale: Array) -> Array:
        return jnp.maximum(0.75 * power_of_two(jnp.maximum(scale.astype(jnp.int32) - lowest, 0)), TINY)

    def encode(x: Array, scale: Array) -> Array:
        return (sign_bit(x) >> (_SIGN_SHIFT - 3)) | jnp.minimum(below_top(x, scale), 7).astype(jnp.uint32)

    def decode(code: Array, scale: Array) -> Array:
        return value(_sign_of(code, 3), (code & 7).astype(jnp.int32), scale)

    def nearest(x: Array, scale: Array) -> Array:
        return value(sign_bit(x), below_top(x, scale), scale)

    return ValueCode(4, 8, _exponent_of, smallest, encode, decode, nearest)


def float_code() -> ValueCode:
    """Values as they are, float32.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> code, none = gx.float_code(), jnp.uint32(0)
    >>> print(code.decode(code.encode(jnp.float32(0.1), none), none))
    0.1
    """
    return ValueCode(
        32,
        0,
        jnp.zeros_like,
        _any_normal,
        lambda x, scale: float_bits(x),
        lambda code, scale: bits_float(code),
        lambda x, scale: x,
    )


def sign_code(step: ArrayLike) -> ValueCode:
    """Only the sign, which stands for +step or -step: 1 bit.

    Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> code, none = gx.sign_code(0.5), jnp.uint32(0)
    >>> print(code.decode(code.encode(jnp.array([3.0, -0.1]), none), none))
    [ 0.5 -0.5]
    """

    def decode(code: Array, scale: Array) -> Array:
        del scale
        return jnp.where(code > 0, -jnp.float32(step), jnp.float32(step))

    def nearest(x: Array, scale: Array) -> Array:
        return decode(_sign_bit_of(x), scale)

    return ValueCode(1, 0, jnp.zeros_like, _any_normal, _encode_sign, decode, nearest)


def class_mean_code() -> ValueCode:
    """Only the sign, which stands for the mean of its sign class in the leaf: 1 bit.

    Scales are the bits of the means: those of the leaves' positive classes, then of the negative.

    Source: Dryden, Jacobs, Moon, Van Essen, "Communication Quantization for Data-Parallel Training of Deep Neural
    Networks", MLHPC 2016, the adaptive quantisation.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> code, plus, minus = gx.class_mean_code(), *gx.float_bits(jnp.array([2.0, -1.5]))
    >>> print(code.decode(code.encode(jnp.array([3.0, -0.1]), plus), plus, minus))
    [ 2.  -1.5]
    """

    def decode(code: Array, plus: Array, minus: Array) -> Array:
        return bits_float(jnp.where(code > 0, minus, plus))

    return ValueCode(1, 32, _as_it_is, _any_normal, _encode_sign, decode, _of_two_scales, scale_sets=2)


def _exponent_of(peak: Array) -> Array:
    return exponent(peak).astype(jnp.uint32)


def _as_it_is(peak: Array) -> Array:
    return peak


def _any_normal(scale: Array) -> Array:
    return jnp.full(scale.shape, TINY)


def _sign_bit_of(x: Array) -> Array:
    """1 for negative numbers, uint32."""
    return sign_bit(x) >> _SIGN_SHIFT


def _encode_sign(x: Array, scale: Array) -> Array:
    del scale
    return _sign_bit_of(x)


def _sign_of(code: Array, bit: int) -> Array:
    """A float's sign bit, from this bit of a code."""
    return (code >> bit & 1) << _SIGN_SHIFT


def _of_two_scales(x: Array, scale: Array) -> Array:
    raise NotImplementedError("positive and negative entries have a scale each: what was sent is not known from one")
