"""How the values of sparse entries become payload words.

A code turns the entries of one payload (float32 values at int32 indices, in `capacity` slots) into uint32 words and
back. Codes that are relative to a scale get one scale per leaf, sent once in the header: the bits of the largest
selected magnitude, rounded up to what `scale_bits` can hold.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._kernels.bits import (
    TINY,
    bits_float,
    exponent,
    float_bits,
    nearest_exponent,
    pack_uint,
    power_of_two,
    sign_bit,
    unpack_uint,
)
from gcjax._types import Array, ArrayLike

INDEX_BITS = 28
_INDEX_MASK = (1 << INDEX_BITS) - 1
_SIGN_SHIFT = 31


class ValueCode(NamedTuple):
    """How values travel. `scale` arguments are per entry (per leaf in `smallest`), as `to_scale` made them.

    Attributes:
      scale_bits: bits of one leaf's scale in the header, 0 for none.
      entry_bits: bits of one entry, index included.
      to_scale: to_scale(peak) -> scale, uint32: peak holds the bits of a leaf's largest magnitude, 0 if it sends none.
      smallest: smallest(scale) -> the smallest magnitude that the code can send, float32.
      encode: encode(x, index, scale, key), of float32[k], int32[k], uint32[k] -> uint32 words, equally many for any k
        entries.
      decode: decode(words, scale_at) -> (index int32[k], y float32[k]): the inverse. scale_at(index) gives the entries'
        scales, uint32[k]; scale_at(index, which=1) those of a second set, for methods with two scales per leaf.
      round: round(x, scale) -> the value y that the receivers of x see. Raises where it is drawn at random.
    """

    scale_bits: int
    entry_bits: int
    to_scale: Callable[[Array], Array]
    smallest: Callable[[Array], Array]
    encode: Callable[..., Array]
    decode: Callable[..., tuple[Array, Array]]
    round: Callable[[Array, Array], Array]


def power_of_two_code() -> ValueCode:
    """Sign and 3-bit exponent below the leaf's largest, with a 28-bit index in one word.

    With E = floor(log2(max |x|)) of the leaf, x is sent as sign(x) * 2**(E - d), d in 0..7: the power of two nearest
    to x, but not above 2**E. Word: sign in bit 31, d in bits 28 to 30, index in bits 0 to 27.
    Source: Tsuzuku, Imachi, Akiba, "Variance-based Gradient Compression for Efficient Distributed Deep Learning",
    2018, arXiv 1802.06058, the 4-bit quantisation.
    """
    levels = 7

    def below_top(x, scale):
        return jnp.maximum(scale.astype(jnp.int32) - nearest_exponent(x), 0)

    def value(sign, below, scale):
        return bits_float(sign | float_bits(power_of_two(scale.astype(jnp.int32) - below)))

    def smallest(scale):
        return jnp.maximum(0.75 * power_of_two(jnp.maximum(scale.astype(jnp.int32) - levels, 0)), TINY)

    def encode(x, index, scale, key):
        del key
        below = below_top(x, scale).astype(jnp.uint32)
        return sign_bit(x) | (below << INDEX_BITS) | index.astype(jnp.uint32)

    def decode(words, scale_at):
        index = (words & jnp.uint32(_INDEX_MASK)).astype(jnp.int32)
        below = ((words >> INDEX_BITS) & levels).astype(jnp.int32)
        return index, value(words & jnp.uint32(1 << _SIGN_SHIFT), below, scale_at(index))

    def nearest(x, scale):
        return value(sign_bit(x), below_top(x, scale), scale)

    return ValueCode(8, 32, lambda peak: exponent(peak).astype(jnp.uint32), smallest, encode, decode, nearest)


def level_code() -> ValueCode:
    """Sign and one of 8 evenly spaced levels, drawn without bias, with a 28-bit index in one word.

    With M = max |x| of the leaf, x is sent as sign(x) * M * l / 7, l the neighbour below or above 7 |x| / M, drawn so
    that the mean is x. Same word as `power_of_two_code`, l in place of d. Source: QSGD with the maximum norm (Alistarh,
    Grubic, Li, Tomioka, Vojnovic, 2017, arXiv 1610.02132), applied to the selected entries only.
    """
    top = 7

    def encode(x, index, scale, key):
        peak = bits_float(scale)
        position = top * (jnp.abs(x) / jnp.where(peak > 0, peak, 1.0))
        low = jnp.floor(position)
        level = low + (jax.random.uniform(key, x.shape) < position - low)
        return sign_bit(x) | (jnp.minimum(level, top).astype(jnp.uint32) << INDEX_BITS) | index.astype(jnp.uint32)

    def decode(words, scale_at):
        index = (words & jnp.uint32(_INDEX_MASK)).astype(jnp.int32)
        level = ((words >> INDEX_BITS) & top).astype(jnp.float32)
        magnitude = bits_float(scale_at(index)) * (level / top)
        return index, bits_float((words & jnp.uint32(1 << _SIGN_SHIFT)) | float_bits(magnitude))

    def nearest(x, scale):
        raise NotImplementedError("levels are drawn at random: what was sent is not known from x")

    return ValueCode(32, 32, lambda peak: peak, lambda scale: jnp.full(scale.shape, TINY), encode, decode, nearest)


def float_code(bits: int) -> ValueCode:
    """Values as float32 (`bits=32`: two words an entry) or float16 (`bits=16`: a word and a half), 32-bit indices.

    float16 holds x / 2**E, E as in `power_of_two_code`, so that a leaf's size neither overflows nor underflows it.
    """
    if bits == 32:
        to_bits, from_bits = float_bits, bits_float
    else:

        def to_bits(x):
            return jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)

        def from_bits(word):
            return jax.lax.bitcast_convert_type(word.astype(jnp.uint16), jnp.float16).astype(jnp.float32)

    def unit(scale):
        return power_of_two(scale.astype(jnp.int32)) if bits == 16 else 1.0

    def smallest(scale):
        # 2**-14 is the smallest normal float16.
        lowest = power_of_two(jnp.maximum(scale.astype(jnp.int32) - 14, 0)) if bits == 16 else 0.0
        return jnp.maximum(jnp.full(scale.shape, TINY), lowest)

    def encode(x, index, scale, key):
        del key
        return jnp.concatenate([index.astype(jnp.uint32), pack_uint(to_bits(x / unit(scale)), bits)])

    def decode(words, scale_at):
        count = len(words) * 32 // (32 + bits)
        index = words[:count].astype(jnp.int32)
        return index, from_bits(unpack_uint(words[count:], bits, count)) * unit(scale_at(index))

    def nearest(x, scale):
        return from_bits(to_bits(x / unit(scale))) * unit(scale)

    to_scale = (lambda peak: exponent(peak).astype(jnp.uint32)) if bits == 16 else jnp.zeros_like
    return ValueCode(8 if bits == 16 else 0, 32 + bits, to_scale, smallest, encode, decode, nearest)


def sign_code(step: ArrayLike) -> ValueCode:
    """Only the sign, which stands for +step or -step, with a 31-bit index in one word (sign in bit 31).

    Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015.
    """

    def encode(x, index, scale, key):
        del scale, key
        return sign_bit(x) | index.astype(jnp.uint32)

    def value(sign):
        return jnp.where(sign > 0, -jnp.float32(step), jnp.float32(step))

    def decode(words, scale_at):
        del scale_at
        return (words & jnp.uint32((1 << _SIGN_SHIFT) - 1)).astype(jnp.int32), value(words >> _SIGN_SHIFT)

    def nearest(x, scale):
        del scale
        return value(sign_bit(x))

    return ValueCode(0, 32, jnp.zeros_like, lambda scale: jnp.full(scale.shape, TINY), encode, decode, nearest)


def class_mean_code() -> ValueCode:
    """Only the sign, which stands for the mean of its sign class in the leaf, with a 31-bit index in one word.

    The sign is bit 31. Scales are the bits of the means: those of the leaves' positive classes, then of the negative.

    Source: Dryden, Jacobs, Moon, Van Essen, "Communication Quantization for Data-Parallel Training of Deep Neural
    Networks", MLHPC 2016, the adaptive quantisation.
    """

    def encode(x, index, scale, key):
        del scale, key
        return sign_bit(x) | index.astype(jnp.uint32)

    def decode(words, scale_at):
        index = (words & jnp.uint32((1 << _SIGN_SHIFT) - 1)).astype(jnp.int32)
        return index, bits_float(jnp.where(words >> _SIGN_SHIFT > 0, scale_at(index, which=1), scale_at(index)))

    def nearest(x, scale):
        del x
        return bits_float(scale)

    return ValueCode(32, 32, lambda peak: peak, lambda scale: jnp.full(scale.shape, TINY), encode, decode, nearest)
