"""Buckets: leaves in arrays of 4,096-entry blocks, in which every mask word belongs to one leaf.

First come large leaves, each with blocks of its own: its entries in C order. Smaller leaves share blocks, each with
neighbouring columns of them: a matrix of 32 rows in C order. Padding is zero and stays so.

Mask words are numbered block by block, so each leaf has a run of them. The last block may have unused words.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gcjax._kernels.bits import BLOCK, LANES, WORD, blocks_for, pack_planes, unpack_planes
from gcjax._types import Array

_OWN_BLOCKS = 8  # a leaf of so many blocks does not share any: at most an eighth of it is padding


class Segment(NamedTuple):
    """A leaf, or a part of one, in a bucket.

    Attributes:
      leaf: number of the leaf.
      begin: its first entry here, in C order; 0 unless the leaf is split between buckets.
      size: number of entries here.
      word: its first mask word in the bucket.
      shape: shape of the leaf, or (size,) for a part of a leaf.

    >>> from gcjax.extend import Segment
    >>> Segment(leaf=0, begin=0, size=70, word=0, shape=(7, 10)).words  # of 32 entries each
    3
    """

    leaf: int
    begin: int
    size: int
    word: int
    shape: tuple[int, ...]

    @property
    def has_blocks(self) -> bool:
        """Whether it has blocks of its own."""
        return has_own_blocks(self.size)

    @property
    def words(self) -> int:
        """Number of its mask words."""
        return words_of(self.size)

    def position_of(self, entry: Array | np.ndarray) -> Array | np.ndarray:
        """Positions in the flattened bucket of entries of the leaf, given by their numbers in C order."""
        if self.has_blocks:
            return self.word * WORD + entry
        row, column = entry // self.words, self.word + entry % self.words
        return column // LANES * BLOCK + row * LANES + column % LANES


class Part(NamedTuple):
    """The blocks `begin` to `end` of a bucket: of one large leaf, or of all small ones, the segments numbered here."""

    begin: int
    end: int
    segments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The places of some leaves in an array of shape [blocks, 32, 128].

    Attributes:
      segments: the leaves: first those with blocks of their own, in the tree's order, then the others.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(0, 0, 6, 0, (2, 3)), gx.Segment(1, 0, 4, 1, (4,))))
    >>> x = bucket.join([jnp.ones((2, 3)), jnp.zeros(4)])
    >>> print(x.shape, bucket.entries, [leaf.shape for leaf in bucket.split(x)])
    (1, 32, 128) 10 [(2, 3), (4,)]
    """

    segments: tuple[Segment, ...]

    @property
    def entries(self) -> int:
        """Number of parameters."""
        return sum(s.size for s in self.segments)

    @property
    def words(self) -> int:
        """Number of mask words, without unused ones at the end."""
        last = self.segments[-1]
        return last.word + last.words

    @property
    def shape(self) -> tuple[int, int, int]:
        """(blocks, 32, 128), the shape of the bucket's arrays."""
        return blocks_for(self.words), WORD, LANES

    @property
    def size(self) -> int:
        """Entries of such an array, padding included."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """The last parameter's position in the flattened array, plus 1."""
        last = self.segments[-1]
        return last.word * WORD + last.size if last.has_blocks else self.size

    def parts(self) -> list[Part]:
        """All blocks, by the leaves that they belong to."""
        large = [(i, s) for i, s in enumerate(self.segments) if s.has_blocks]
        parts = [Part(s.word // LANES, (s.word + s.words) // LANES, (i,)) for i, s in large]
        small = tuple(range(len(parts), len(self.segments)))
        return [*parts, Part(parts[-1].end if parts else 0, self.shape[0], small)] if small else parts

    def join(self, leaves: Sequence[Array]) -> Array:
        """float32[blocks, 32, 128] from arrays of the segments' shapes."""
        return concatenated([self.join_part(part, leaves) for part in self.parts()])

    def join_part(self, part: Part, leaves: Sequence[Array]) -> Array:
        """The blocks of one part, from arrays of all segments' shapes."""
        count = part.end - part.begin
        if self.segments[part.segments[0]].has_blocks:
            flat = leaves[part.segments[0]].reshape(-1)
            return jnp.pad(flat, (0, count * BLOCK - len(flat))).reshape(count, WORD, LANES)
        columns = [jnp.pad(leaves[i].reshape(-1), (0, -leaves[i].size % WORD)).reshape(WORD, -1) for i in part.segments]
        joined = concatenated(columns, axis=1)
        joined = jnp.pad(joined, ((0, 0), (0, count * LANES - joined.shape[1])))
        return joined.reshape(WORD, count, LANES).transpose(1, 0, 2)

    def split(self, x: Array) -> tuple[Array, ...]:
        """The inverse of `join`, of a bucket's array or of the first `span` entries of a flattened one."""
        flat, leaves = x.reshape(-1), []
        parts = self.parts()
        begin = parts[-1].begin
        if not self.segments[-1].has_blocks:
            shared = x.reshape(-1, WORD, LANES)[begin:].transpose(1, 0, 2).reshape(WORD, -1)
        for s in self.segments:
            if s.has_blocks:
                leaf = flat[s.word * WORD : s.word * WORD + s.size]
            else:
                first = s.word - begin * LANES
                leaf = shared[:, first : first + s.words].reshape(-1)[: s.size]
            leaves.append(leaf.reshape(s.shape))
        return tuple(leaves)

    def positions(self) -> Array:
        """int32[blocks, 32, 128], the position of each entry in the flattened array."""
        return jnp.arange(self.size, dtype=jnp.int32).reshape(self.shape)

    def leaf_word_ranges(self) -> list[tuple[int, int]]:
        """For each segment, its first mask word and the word after its last."""
        return [(s.word, s.word + s.words) for s in self.segments]

    def valid_words(self) -> np.ndarray:
        """The packed mask of the entries that are parameters, uint32[128 * blocks]."""
        flags = np.zeros((self.size // WORD, WORD), bool)
        for s in self.segments:
            rows = (-1, WORD, LANES) if s.has_blocks else (WORD, -1)
            padded = (np.arange(s.words * WORD) < s.size).reshape(rows)
            flags[s.word : s.word + s.words] = np.moveaxis(padded, -2, -1).reshape(-1, WORD)
        return np.packbits(flags, axis=1, bitorder="little").view(np.uint32).reshape(-1)

    def leaf_of_word(self) -> np.ndarray:
        """Number of each mask word's segment, int32[128 * blocks]; unused words count as the last segment's."""
        return run_of_word([s.word for s in self.segments], self.size // WORD)


def run_of_word(begins: list[int], words: int) -> np.ndarray:
    """The number of the run of each word, int32[words], from the first word of each run.

    A NumPy constant: XLA would spend seconds on folding the computation of it.
    """
    return np.repeat(np.arange(len(begins), dtype=np.int32), np.diff([*begins, words]))


def bucket_of(parts: list[tuple[int, int, int]], shapes: list[tuple[int, ...]]) -> Bucket:
    """The bucket of some parts of leaves, (leaf, begin, size) each, with the shapes of all leaves."""
    segments: list[Segment] = []
    word = 0
    for leaf, begin, size in sorted(parts, key=lambda part: not has_own_blocks(part[2])):
        shape = shapes[leaf] if size == math.prod(shapes[leaf]) else (size,)
        segments.append(Segment(leaf, begin, size, word, shape))
        word += segments[-1].words
    return Bucket(tuple(segments))


def vector_bucket(size: int) -> Bucket:
    """The bucket of a single vector, of any size."""
    return Bucket((Segment(0, 0, size, 0, (size,)),))


def pack_vector(values: Array, bits: int) -> Array:
    """Integers below 2**bits, [n] -> uint32[packed_vector_size(n, bits)], the bit planes of the vector's bucket."""
    bucket = vector_bucket(len(values))
    return pack_planes(bucket.join([values.astype(jnp.uint32)]), bits, bucket.words)


def unpack_vector(words: Array, bits: int, count: int) -> Array:
    """The inverse of `pack_vector`: uint32[count]."""
    return vector_bucket(count).split(unpack_planes(words, bits))[0]


def packed_vector_size(count: int, bits: int) -> int:
    """Words that `pack_vector` makes of `count` integers."""
    return bits * vector_bucket(count).words if count else 0


def has_own_blocks(size: int) -> bool:
    """Whether a leaf of `size` entries shares no block."""
    return size >= _OWN_BLOCKS * BLOCK or (size > 0 and size % BLOCK == 0)


def words_of(size: int) -> int:
    """Mask words of a leaf of `size` entries."""
    return -(-size // BLOCK) * LANES if has_own_blocks(size) else -(-size // WORD)


def concatenated(arrays: list[Array], axis: int = 0) -> Array:
    """`jnp.concatenate`; a single array as it is."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def split_vector(vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Consecutive parts of a vector, in these shapes."""
    parts = jnp.split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
