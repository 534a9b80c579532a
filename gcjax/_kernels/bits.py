"""Bits: masks as words, small integers packed into words.

A bucket's arrays have the shape [blocks, 32, 128]: blocks of 4,096 entries, 32 rows of 128 lanes. A mask word holds a
column of a block: bit r of word 128 * b + l stands for entry [b, r, l]. So no entry moves between the lanes of a vector
unit, which TPUs are slow at, and a block is 4 whole tiles of a TPU's memory.

XLA's CPU backend compiles these forms to vector code; others that look alike are several times slower. Results need the
three axes, or XLA divides for every entry to find them again. Reductions need few steps, which LLVM unrolls, and
several operands: XLA hands those of one operand to slower code.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.floats import magnitude_bits
from gcjax._types import Array

WORD = 32  # entries in a mask word; rows of a block
LANES = 128  # words of a block
BLOCK = WORD * LANES  # entries of a block

Merge = Callable[[Array, Array], Array]


def blocks_for(words: int) -> int:
    """Blocks that hold `words` mask words."""
    return -(-words // LANES)


def to_blocks(x: Array) -> Array:
    """A flat array as [blocks, 32, 128], padded with zeros."""
    return jnp.pad(x, (0, -len(x) % BLOCK)).reshape(-1, WORD, LANES)


def position_of(index: Array) -> Array:
    """The place of an entry in the flattened bucket. Its index counts word by word: 32 * word + bit."""
    block, row, lane = index // BLOCK, index % WORD, index // WORD % LANES
    return block * BLOCK + row * LANES + lane


def word_and_bit(position: Array) -> tuple[Array, Array]:
    """The mask word of an entry, int32, and the word with its bit set, uint32."""
    word = position // BLOCK * LANES + position % LANES
    return word, jnp.uint32(1) << (position // LANES % WORD).astype(jnp.uint32)


def pack_mask(mask: Array) -> Array:
    """bool[blocks, 32, 128] -> uint32[128 * blocks]; bit r of word 128 * b + l is entry [b, r, l]. Or of other lanes.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> mask = jnp.zeros((1, 32, 128), bool).at[0, 3, 5].set(True)
    >>> words = gx.pack_mask(mask)
    >>> print(words.shape, words[5])  # bit 3
    (128,) 8
    """
    return pack_masks(mask)[0]


def pack_masks(*masks: Array) -> list[Array]:
    """`pack_mask` of each, in one pass over the arrays that they are computed from."""
    return reduce_rows(*map(_in_words, masks))


def _in_words(mask: Array) -> tuple[Merge, Array]:
    """The mask as words, for `reduce_rows`."""
    return lax.bitwise_or, jnp.where(mask, jnp.uint32(1) << _rows(), jnp.uint32(0))


def _rows() -> Array:
    """uint32[32, 1], the numbers of the rows."""
    return jnp.arange(WORD, dtype=jnp.uint32)[:, None]


def reduce_rows(*pairs: tuple[Merge, Array]) -> list[Array]:
    """Reduce the rows of each block, [blocks, 32, lanes] -> [lanes * blocks] for each pair, in one pass over the data.

    A pair is merge(x, y), associative with 0 as its neutral element, and an array of any dtype.
    """
    merges, arrays = zip(*pairs, strict=True)
    return lax.platform_dependent(
        *arrays, cpu=functools.partial(_reduce_in_short, merges), default=functools.partial(_reduce, merges)
    )


def _reduce(merges: tuple[Merge, ...], *arrays: Array) -> list[Array]:
    return [
        lax.reduce(x, jnp.zeros((), x.dtype), merge, (1,)).reshape(-1) for merge, x in zip(merges, arrays, strict=True)
    ]


def _reduce_in_short(merges: tuple[Merge, ...], *arrays: Array) -> list[Array]:
    """Eight steps over two halves of each array, then two merges: see the module's docstring."""
    if len(arrays) > 4:  # more operands do not fit into registers
        return _reduce_in_short(merges[:4], *arrays[:4]) + _reduce_in_short(merges[4:], *arrays[4:])
    split = [x.reshape(-1, 2, 2, 8, x.shape[-1]) for x in arrays]
    halves = [x[:, :, half] for x in split for half in (0, 1)]
    merge_of = [merge for merge in merges for _ in (0, 1)]

    def merge_all(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(merge(x, y) for merge, x, y in zip(merge_of, a, b, strict=True))

    reduced = lax.reduce(tuple(halves), tuple(jnp.zeros((), x.dtype) for x in halves), merge_all, (2,))
    eighths = [merge(x, y) for merge, x, y in zip(merges, reduced[::2], reduced[1::2], strict=True)]
    return [merge(x[:, 0], x[:, 1]).reshape(-1) for merge, x in zip(merges, eighths, strict=True)]


def pack_mask_and_peak(mask: Array, x: Array) -> list[Array]:
    """`pack_mask`, and the bits of the largest selected |x| of each word (0 in an empty one), in one pass."""
    return reduce_rows(_in_words(mask), (lax.max, jnp.where(mask, magnitude_bits(x), jnp.uint32(0))))


def unpack_mask(words: Array) -> Array:
    """uint32[m] -> bool[blocks, 32, 128], the inverse of `pack_mask`; missing words of the last block count as 0.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.unpack_mask(jnp.uint32([0, 8]))[0, 3, :3])
    [False  True False]
    """
    return _unpack(words) != 0


def _unpack(words: Array) -> Array:
    """uint32[m] -> uint32[blocks, 32, 128], 0 or 1."""
    return jnp.pad(words, (0, -len(words) % LANES)).reshape(-1, 1, LANES) >> _rows() & 1


def pack_planes(values: Array, bits: int, words: int | None = None) -> Array:
    """Integers below 2**bits as packed masks: of all bits 0, then of all bits 1, and so on.

    uint32[blocks, 32, 128] -> uint32[bits * words], the first `words` words of each plane; all with None.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> twos = jnp.full((1, 32, 128), 2, jnp.uint32)
    >>> [hex(word) for word in gx.pack_planes(twos, bits=2, words=1)]  # of bits 0, of bits 1
    ['0x0', '0xffffffff']
    """
    planes = pack_masks(*(values >> b & 1 != 0 for b in range(bits)))
    return jnp.concatenate([plane[:words] for plane in planes])


def unpack_planes(words: Array, bits: int) -> Array:
    """The inverse of `pack_planes`, of any number of words: uint32[blocks, 32, 128].

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.unpack_planes(jnp.uint32([0, 1, 1, 1]), bits=2)[0, 0, :3])
    [2 3 0]
    """
    planes = words.reshape(bits, -1)
    return functools.reduce(lax.bitwise_or, [_unpack(planes[b]) << b for b in range(bits)])


def count_bits(words: Array) -> Array:
    """Set bits of each word, int32."""
    return lax.population_count(words).astype(jnp.int32)


def prefix_count(words: Array) -> Array:
    """Set bits in words[: i + 1] for each i, int32[n]; n must be a multiple of 128.

    Two levels (within blocks of 128 words, then over the blocks): a plain cumsum of this length was slower on CPU.
    """
    counts = count_bits(words).reshape(-1, LANES)
    counts = lax.platform_dependent(counts, cpu=lambda x: jnp.cumsum(x, axis=1), default=_cumsum_by_matmul)
    total = counts[:, -1]
    return (counts + (jnp.cumsum(total) - total)[:, None]).reshape(-1)


def _cumsum_by_matmul(counts: Array) -> Array:
    """Along rows of 128, of integers up to 256, which bfloat16 holds exactly. TPUs compile a long cumsum slowly."""
    triangle = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16))
    return jnp.matmul(counts.astype(jnp.bfloat16), triangle, preferred_element_type=jnp.float32).astype(jnp.int32)


def nth_set_bit(words: Array, rank: Array) -> Array:
    """Position (0 to 31) of the `rank`-th set bit of each word, int32, found by halving the word five times.

    `rank` counts from 0 at the lowest and must be below the number of set bits.
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
    """Integers in 0..2**bits - 1, shape [n] -> uint32[m], m = ceil(n * bits / 32); `bits` must divide 32.

    Value i sits in word i % m, the first m values in the lowest bits; unused bits are 0. (With neighbours in one word
    it compiles for minutes on TPUs.)

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> [hex(word) for word in gx.pack_uint(jnp.array([1, 2, 3, 4, 5]), bits=8)]
    ['0x50301', '0x402']
    """
    per_word = 32 // bits
    rows = jnp.pad(values.astype(jnp.uint32), (0, -len(values) % per_word)).reshape(per_word, -1)
    return jnp.sum(rows << (jnp.arange(per_word, dtype=jnp.uint32) * bits)[:, None], axis=0, dtype=jnp.uint32)


def unpack_uint(words: Array, bits: int, count: int) -> Array:
    """The inverse of `pack_uint`: uint32[m] -> uint32[count].

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.unpack_uint(jnp.uint32([0x050301, 0x0402]), bits=8, count=5))
    [1 2 3 4 5]
    """
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32) * bits
    return ((words >> shifts[:, None]) & jnp.uint32((1 << bits) - 1)).reshape(-1)[:count]
