"""A pytree of gradients as buckets: arrays of 4,096-entry blocks, in which every mask word belongs to one leaf.

A large leaf has blocks of its own: its entries in C order, padded with zeros. Smaller leaves share blocks. Each takes
some columns of them, next to each other: as a matrix of 32 rows in C order, padded to whole columns. Large leaves come
first. Padding stays zero.

The mask words of a bucket are numbered block by block, so each leaf has a run of them. The last block may have unused
words. A bucket has at most 2**28 / 32 words, because indices have 28 bits; a larger model is split into several
buckets, in the middle of a leaf if necessary.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._kernels.bits import BLOCK, LANES, WORD, blocks_for
from gcjax._types import Array, PyTree

MAX_BUCKET = 1 << 28  # what a 28-bit index can name

# Entries of a bucket at most. Tests set it lower, to see models split into several buckets.
bucket_limit: ContextVar[int] = ContextVar("bucket_limit", default=MAX_BUCKET)

_OWN_BLOCKS = 8  # a leaf of so many blocks does not share any: at most an eighth of it is padding


class Segment(NamedTuple):
    """A leaf, or a part of one, in a bucket.

    Attributes:
      leaf: number of the leaf.
      begin: its first entry here, in C order; 0 unless the leaf is split between buckets.
      size: number of entries here.
      word: its first mask word in the bucket.
      shape: shape of the leaf, or (size,) for a part of a leaf.
    """

    leaf: int
    begin: int
    size: int
    word: int
    shape: tuple[int, ...]

    @property
    def has_blocks(self) -> bool:
        """Whether it has blocks of its own."""
        return _has_blocks(self.size)

    @property
    def words(self) -> int:
        """Number of its mask words."""
        return _words(self.size)

    def position_of(self, entry: Array | np.ndarray) -> Array | np.ndarray:
        """Where entries of the leaf, given by their numbers in C order, lie in the flattened bucket."""
        if self.has_blocks:
            return self.word * WORD + entry
        row, column = entry // self.words, self.word + entry % self.words
        return column // LANES * BLOCK + row * LANES + column % LANES

    @property
    def blocks(self) -> slice:
        """Its own blocks, if it has any."""
        return slice(self.word // LANES, (self.word + self.words) // LANES)


class Part(NamedTuple):
    """Some blocks of a bucket: those of one large leaf, or those that the small leaves share.

    Attributes:
      begin: the first block.
      end: the block after the last.
      segments: positions in `Bucket.segments` of the leaves.
    """

    begin: int
    end: int
    segments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Where the leaves lie in an array of shape [blocks, 32, 128].

    Attributes:
      segments: the leaves: first those with blocks of their own, in the tree's order, then the others.
    """

    segments: tuple[Segment, ...]

    @property
    def entries(self) -> int:
        """Number of parameters."""
        return sum(s.size for s in self.segments)

    @property
    def words(self) -> int:
        """Number of mask words, unused ones at the end not counted."""
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
        parts = [Part(s.blocks.start, s.blocks.stop, (i,)) for i, s in enumerate(self.segments) if s.has_blocks]
        small = tuple(range(len(parts), len(self.segments)))
        return [*parts, Part(parts[-1].end if parts else 0, self.shape[0], small)] if small else parts

    def join(self, leaves: Sequence[Array]) -> Array:
        """float32[blocks, 32, 128] from arrays of the segments' shapes."""
        return _concatenated([self.join_part(part, leaves) for part in self.parts()])

    def join_part(self, part: Part, leaves: Sequence[Array]) -> Array:
        """The blocks of one part, from arrays of all segments' shapes."""
        count = part.end - part.begin
        if self.segments[part.segments[0]].has_blocks:
            flat = leaves[part.segments[0]].reshape(-1)
            return jnp.pad(flat, (0, count * BLOCK - len(flat))).reshape(count, WORD, LANES)
        columns = [jnp.pad(leaves[i].reshape(-1), (0, -leaves[i].size % WORD)).reshape(WORD, -1) for i in part.segments]
        joined = _concatenated(columns, axis=1)
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
        ones = [np.ones(s.size, bool) for s in self.segments]
        flags = np.zeros(self.shape[0] * LANES * WORD, bool).reshape(-1, WORD)  # by word
        for s, one in zip(self.segments, ones, strict=True):
            rows = (-1, WORD, LANES) if s.has_blocks else (WORD, -1)
            padded = np.pad(one, (0, s.words * WORD - s.size)).reshape(rows)
            flags[s.word : s.word + s.words] = np.moveaxis(padded, -2, -1).reshape(-1, WORD)
        return np.packbits(flags, axis=1, bitorder="little").view(np.uint32).reshape(-1)

    def leaf_of_word(self) -> np.ndarray:
        """Number of each mask word's segment, int32[128 * blocks]; unused words count as the last segment's.

        A NumPy constant: XLA would spend seconds on folding the computation of it.
        """
        starts = [s.word for s in self.segments] + [self.shape[0] * LANES]
        return np.repeat(np.arange(len(self.segments), dtype=np.int32), np.diff(starts))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of one pytree lie in buckets. Made from shapes alone, it is the same for every worker.

    Attributes:
      treedef: structure of the pytree.
      shapes: shape of each leaf.
      dtypes: dtype of each leaf.
      buckets: the buckets.
    """

    treedef: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    buckets: tuple[Bucket, ...]

    @property
    def entries(self) -> int:
        return sum(b.entries for b in self.buckets)


def path_name(path: tuple) -> str:
    """The path of a leaf, for an error message."""
    return jax.tree_util.keystr(path) or "(the tree itself)"


def layout_of(tree: PyTree, max_bucket: int | None = None) -> Layout:
    """The layout of a pytree of arrays or `jax.ShapeDtypeStruct`s.

    Raises TypeError, with the leaf's path, for a leaf that is not of a real floating-point dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    shapes, dtypes = [], []
    for path, leaf in leaves:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"leaf {path_name(path)} has dtype {dtype}; gradients must be of a "
                "real floating-point dtype. Keep integer and complex leaves out of the compressor with optax.partition."
            )
        shapes.append(shape)
        dtypes.append(dtype)
    return Layout(
        treedef, tuple(shapes), tuple(dtypes), _fill(shapes, bucket_limit.get() if max_bucket is None else max_bucket)
    )


def _fill(shapes: list[tuple[int, ...]], max_bucket: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    parts: list[tuple[int, int, int]] = []  # leaf, begin, size
    room = max_bucket // WORD  # words

    def close():
        nonlocal parts, room
        if parts:
            buckets.append(_bucket(parts, shapes))
        parts, room = [], max_bucket // WORD

    for leaf, shape in enumerate(shapes):
        begin, size = 0, math.prod(shape)
        while begin < size:
            take = size - begin
            if _words(take) > room:
                take = min(take, room * WORD)
                take = take // BLOCK * BLOCK if _has_blocks(take) else take
            if take == 0:
                close()
                continue
            parts.append((leaf, begin, take))
            room -= _words(take)
            begin += take
    close()
    return tuple(buckets)


def _bucket(parts: list[tuple[int, int, int]], shapes: list[tuple[int, ...]]) -> Bucket:
    segments: list[Segment] = []
    word = 0
    for leaf, begin, size in sorted(parts, key=lambda part: not _has_blocks(part[2])):
        shape = shapes[leaf] if size == math.prod(shapes[leaf]) else (size,)
        segments.append(Segment(leaf, begin, size, word, shape))
        word += segments[-1].words
    return Bucket(tuple(segments))


def vector_bucket(size: int) -> Bucket:
    """The bucket of a single vector, of any size."""
    return Bucket((Segment(0, 0, size, 0, (size,)),))


def flatten(layout: Layout, tree: PyTree) -> list[tuple[Array, ...]]:
    """The leaves of `tree` in float32, for each bucket an array of each segment's shape."""
    leaves = [jnp.asarray(leaf).astype(jnp.float32) for leaf in layout.treedef.flatten_up_to(tree)]
    return [tuple(_segment(leaves[s.leaf], s) for s in bucket.segments) for bucket in layout.buckets]


def _segment(leaf: Array, s: Segment) -> Array:
    return leaf if leaf.size == s.size else leaf.reshape(-1)[s.begin : s.begin + s.size]


def unflatten(layout: Layout, buckets: Sequence[Sequence[Array]]) -> PyTree:
    """The inverse of `flatten`: a pytree with the leaves' own shapes and dtypes."""
    pieces: list[list[Array]] = [[] for _ in layout.shapes]
    for bucket, arrays in zip(layout.buckets, buckets, strict=True):
        for s, x in zip(bucket.segments, arrays, strict=True):
            pieces[s.leaf].append(x.reshape(-1) if math.prod(layout.shapes[s.leaf]) > s.size else x)
    leaves = [
        (_concatenated(parts) if parts else jnp.zeros(0)).reshape(shape).astype(dtype)
        for parts, shape, dtype in zip(pieces, layout.shapes, layout.dtypes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(layout.treedef, leaves)


def _has_blocks(size: int) -> bool:
    return size >= _OWN_BLOCKS * BLOCK or (size > 0 and size % BLOCK == 0)


def _words(size: int) -> int:
    return -(-size // BLOCK) * LANES if _has_blocks(size) else -(-size // WORD)


def _concatenated(arrays: list[Array], axis: int = 0) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)
