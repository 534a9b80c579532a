"""A pytree of gradients as flat float32 buckets, leaf boundaries kept.

Every leaf starts at a multiple of 32, so no mask word belongs to two leaves. The padding between leaves stays zero. A
bucket holds at most 2**28 entries, because indices have 28 bits. A larger model is split into several buckets, in the
middle of a leaf if necessary.
"""

import dataclasses
import math
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._kernels.bits import LANES, words_for
from gcjax._types import PyTree

MAX_BUCKET = 1 << 28  # what a 28-bit index can name

# Entries of a bucket at most. Tests set it lower, to see models split into several buckets.
bucket_limit: ContextVar[int] = ContextVar("bucket_limit", default=MAX_BUCKET)


class Segment(NamedTuple):
    """A leaf, or a part of one, in a bucket.

    Attributes:
      leaf: number of the leaf.
      begin: its first entry here, in C order; 0 unless the leaf is split between buckets.
      size: number of entries here.
      offset: position of the first one in the bucket.
      shape: shape of the leaf, or (size,) for a part of a leaf.
    """

    leaf: int
    begin: int
    size: int
    offset: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Where the leaves lie in one flat vector.

    Attributes:
      segments: the leaves, in order.
      size: length of the vector, padding between leaves included.
    """

    segments: tuple[Segment, ...]
    size: int

    @property
    def entries(self) -> int:
        """Number of parameters."""
        return sum(s.size for s in self.segments)

    @property
    def words(self) -> int:
        """Length of a packed mask of the bucket."""
        return words_for(self.size)

    def leaf_word_ranges(self) -> list[tuple[int, int]]:
        """For each segment, its first mask word and the word after its last."""
        return [(s.offset // LANES, -(-(s.offset + s.size) // LANES)) for s in self.segments]

    def valid_words(self) -> np.ndarray:
        """The packed mask of the entries that are parameters, uint32[words]: all but the padding between leaves."""
        words = np.zeros(self.words, np.uint32)
        for s, (begin, end) in zip(self.segments, self.leaf_word_ranges(), strict=True):
            words[begin:end] = 0xFFFFFFFF
            if s.size % LANES:
                words[end - 1] = (1 << s.size % LANES) - 1
        return words

    def leaf_of_word(self) -> np.ndarray:
        """Number of each mask word's segment, int32[words]; words after the last segment belong to it.

        A NumPy constant: XLA would spend seconds on folding the computation of it.
        """
        starts = [s.offset // LANES for s in self.segments] + [self.words]
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
    segments: list[Segment] = []
    offset = 0

    def close():
        nonlocal segments, offset
        if segments:
            buckets.append(Bucket(tuple(segments), segments[-1].offset + segments[-1].size))
        segments, offset = [], 0

    for leaf, shape in enumerate(shapes):
        begin, size = 0, math.prod(shape)
        while begin < size:
            if offset == max_bucket:
                close()
            take = min(size - begin, max_bucket - offset)
            segments.append(Segment(leaf, begin, take, offset, shape if take == size else (take,)))
            offset += -(-take // LANES) * LANES
            begin += take
    close()
    return tuple(buckets)


def flatten(layout: Layout, tree: PyTree) -> list[jax.Array]:
    """The leaves of `tree` as float32[bucket.size], one per bucket."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in layout.treedef.flatten_up_to(tree)]
    return [_flatten_bucket(bucket, leaves) for bucket in layout.buckets]


def _flatten_bucket(bucket: Bucket, leaves: list[jax.Array]) -> jax.Array:
    return join(bucket.size, [(s.offset, leaves[s.leaf][s.begin : s.begin + s.size]) for s in bucket.segments])


def join(size: int, parts: list[tuple[int, jax.Array]]) -> jax.Array:
    """float32[size] from flat parts and the offsets at which they begin, with zeros in between."""
    if len(parts) == 1 and len(parts[0][1]) == size:
        return parts[0][1]
    # The largest part goes first: XLA turns the first write into a padding and fuses it with what made the part, so a
    # sum behind a small part would be redone for every entry of the bucket.
    flat = jnp.zeros(size)
    for offset, part in sorted(parts, key=lambda pair: -len(pair[1])):
        flat = flat.at[offset : offset + len(part)].set(part)
    return flat


def unflatten(layout: Layout, flat: list[jax.Array]) -> PyTree:
    """The inverse of `flatten`: a pytree with the leaves' own shapes and dtypes."""
    parts: list[list[jax.Array]] = [[] for _ in layout.shapes]
    for bucket, values in zip(layout.buckets, flat, strict=True):
        for s in bucket.segments:
            parts[s.leaf].append(values[s.offset : s.offset + s.size])
    leaves = []
    for pieces, shape, dtype in zip(parts, layout.shapes, layout.dtypes, strict=True):
        leaf = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0] if pieces else jnp.zeros(0)
        leaves.append(leaf.reshape(shape).astype(dtype))
    return jax.tree_util.tree_unflatten(layout.treedef, leaves)
