"""Bits: masks as words, small integers packed into words, floats as integers.

The forms are the ones XLA's CPU backend compiles to vector code; others that look alike are several times slower.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._types import Array

LANES = 32  # entries in one mask word
BLOCK = 1024  # entries in one block of the two-level prefix count
FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest normal number; XLA flushes what lies below

_SIGN = 1 << 31
_MANTISSA = 23
_HALF = 1 << (_MANTISSA - 1)


def float_bits(x: Array) -> Array:
    """float32 -> its bits as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def bits_float(bits: Array) -> Array:
    """uint32 -> the float32 with these bits."""
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
    return exponent(magnitude_bits(x) + jnp.uint32(_HALF))


def power_of_two(biased: Array) -> Array:
    """2.0 ** (biased - 127) for a biased exponent in 1..254; 0 gives 0.0 and 255 infinity."""
    return bits_float(biased.astype(jnp.uint32) << _MANTISSA)


def _lane_bits(mask: Array) -> Array:
    """bool[..., 32] -> uint32[..., 32], lane i holding 1 << i where the mask is set."""
    return jnp.where(mask, jnp.uint32(1) << jnp.arange(LANES, dtype=jnp.uint32), jnp.uint32(0))


def to_unit(peak: Array) -> Array:
    """A power of two that scales magnitudes up to `peak` to below 4, so that sums of their squares cannot overflow."""
    return power_of_two(254 - jnp.clip(exponent(magnitude_bits(peak)), 1, 253))


def words_for(size: int) -> int:
    """Length of the packed mask of `size` entries, a multiple of 32."""
    return -(-size // BLOCK) * (BLOCK // LANES)


def pack_mask(mask: Array) -> Array:
    """bool[n] -> uint32[words_for(n)]; entry i is bit i % 32 of word i // 32, the rest is 0."""
    return by_rows(lambda rows: jnp.sum(_lane_bits(rows), axis=1, dtype=jnp.uint32), mask)


def pack_mask_and_peak(mask: Array, x: Array) -> tuple[Array, Array]:
    """`pack_mask`, and the bits of the largest selected |x| of each word, in one pass over the data.

    mask: bool[n]; x: float32[n]. Returns uint32[words_for(n)] twice; the peak of an empty word is 0.
    """
    zero = jnp.uint32(0)

    def merge(a, b):
        return a[0] | b[0], jnp.maximum(a[1], b[1])

    def pack(mask, magnitude):
        return lax.reduce((_lane_bits(mask), jnp.where(mask, magnitude, zero)), (zero, zero), merge, (1,))

    return by_rows(pack, mask, magnitude_bits(x))


def by_rows(pack: Callable[..., Any], *flats: Array) -> Any:
    """Apply `pack`, which turns rows of 32 entries (x[m, 32], ...) into y[m] or a tuple of them, to flat vectors.

    Returns y[words_for(n)]. The ragged end is padded with zeros and packed apart: padding the whole would copy it.
    """
    size = len(flats[0])
    body = size // BLOCK * BLOCK
    if body == size:
        return pack(*(flat.reshape(-1, LANES) for flat in flats))
    end = pack(*(jnp.pad(flat[body:], (0, BLOCK - size + body)).reshape(-1, LANES) for flat in flats))
    if body == 0:
        return end
    return jax.tree.map(
        lambda a, b: jnp.concatenate([a, b]), pack(*(flat[:body].reshape(-1, LANES) for flat in flats)), end
    )


def unpack_mask(words: Array, size: int) -> Array:
    """uint32[words_for(size)] -> bool[size], the inverse of `pack_mask`."""
    lanes = jnp.arange(LANES, dtype=jnp.uint32)
    return ((words[:, None] >> lanes) & 1).astype(bool).reshape(-1)[:size]


def pack_planes(values: Array, bits: int) -> Array:
    """Integers below 2**bits, shape [n] -> uint32[bits * words_for(n)]: the masks of all bits 0, all bits 1, and so on.

    A value takes exactly `bits` bits (except for padding at the end). One pass over the data.
    """
    return pack_planes_of(lambda values: values, bits, values.astype(jnp.uint32))


def pack_planes_of(code: Callable[..., Array], bits: int, *flats: Array) -> Array:
    """`pack_planes(code(*flats), bits)` for a code that works entry by entry and returns uint32, in one pass.

    Were the code applied before, XLA would write its result out, because the ragged end needs it too.
    """

    def pack(*rows):
        values, zero = code(*rows), jnp.uint32(0)
        planes = tuple(_lane_bits((values >> b) & 1 != 0) for b in range(bits))
        return lax.reduce(planes, (zero,) * bits, lambda a, b: tuple(x | y for x, y in zip(a, b, strict=True)), (1,))

    return jnp.concatenate(by_rows(pack, *flats))


def unpack_planes(words: Array, bits: int, size: int) -> Array:
    """The inverse of `pack_planes`: uint32[size]."""
    lanes = jnp.arange(LANES, dtype=jnp.uint32)
    planes = words.reshape(bits, -1, 1)
    return sum((((planes[b] >> lanes) & 1) << b for b in range(1, bits)), (planes[0] >> lanes) & 1).reshape(-1)[:size]


def count_bits(words: Array) -> Array:
    """Set bits of each word, int32."""
    return lax.population_count(words).astype(jnp.int32)


def prefix_count(words: Array) -> Array:
    """Set bits in words[: i + 1] for each i, int32[n]; n must be a multiple of 32.

    Two levels (within blocks of 32 words, then over the blocks): a plain cumsum of this length was slower on CPU.
    """
    counts = count_bits(words).reshape(-1, BLOCK // LANES)
    shift = 1
    while shift < BLOCK // LANES:
        counts = counts + jnp.pad(counts, ((0, 0), (shift, 0)))[:, : BLOCK // LANES]
        shift *= 2
    total = counts[:, -1]
    return (counts + (jnp.cumsum(total) - total)[:, None]).reshape(-1)


def nth_set_bit(words: Array, rank: Array) -> Array:
    """Position (0 to 31) of the `rank`-th set bit of each word, int32, counting from 0 at the lowest.

    Found by halving the word five times. `rank` must be below the number of set bits; otherwise the result is
    meaningless.
    """
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = (words >> position.astype(jnp.uint32)) & jnp.uint32((1 << half) - 1)
        count = count_bits(below)
        above = rank >= count
        rank = jnp.where(above, rank - count, rank)
        position = jnp.where(above, position + half, position)
    return position


def packed_size(count: int, bits: int) -> int:
    """Words that `count` integers of `bits` bits take."""
    return -(-count * bits // 32)


def pack_uint(values: Array, bits: int) -> Array:
    """Integers in 0..2**bits - 1, shape [n] -> uint32[ceil(n * bits / 32)]; `bits` must divide 32.

    Value i sits in word i // (32 / bits), the first one in the lowest bits; the rest of the last word is 0.
    """
    per_word = 32 // bits
    values = jnp.pad(values.astype(jnp.uint32), (0, -len(values) % per_word)).reshape(-1, per_word)
    return jnp.sum(values << (jnp.arange(per_word, dtype=jnp.uint32) * bits), axis=1, dtype=jnp.uint32)


def unpack_uint(words: Array, bits: int, count: int) -> Array:
    """The inverse of `pack_uint`: uint32 words -> uint32[count]."""
    if bits == 32:  # the mask below would need 33 bits
        return words[:count]
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32) * bits
    return ((words[:, None] >> shifts) & jnp.uint32((1 << bits) - 1)).reshape(-1)[:count]
