"""A pytree as the leaves of one or several buckets.

A bucket has at most 2**28 / 32 mask words, because indices have 28 bits. A larger model has several buckets. Only a
leaf that is larger than a bucket is cut: PowerSGD, for one, sends the parts of a matrix uncompressed.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._kernels.bits import BLOCK, WORD
from gcjax._kernels.buckets import Bucket, Segment, bucket_of, concatenated, has_own_blocks, words_of
from gcjax._types import Array, PyTree

# Entries of a bucket at most: as many as an index of 28 bits can name. Tests set it lower, to split small models.
bucket_limit: ContextVar[int] = ContextVar("bucket_limit", default=1 << 28)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pytree as buckets: structure, shape and dtype of each leaf, and the buckets. It is equal on all workers."""

    treedef: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    buckets: tuple[Bucket, ...]

    @property
    def entries(self) -> int:
        return sum(b.entries for b in self.buckets)


def path_name(path: tuple[object, ...]) -> str:
    """The path of a leaf, for an error message."""
    return jax.tree_util.keystr(path) or "(the tree itself)"


def check_is_array(path: tuple[object, ...], leaf: object) -> None:
    """Raise TypeError for a leaf that is no array, such as an activation function in a model that is a pytree."""
    if not hasattr(leaf, "dtype") and (callable(leaf) or isinstance(leaf, str)):
        raise TypeError(
            f"leaf {path_name(path)} is {leaf!r}, not an array. Pass only the arrays of such a model: "
            "equinox.partition(model, equinox.is_inexact_array), or make these fields static"
        )


def layout_of(tree: PyTree) -> Layout:
    """The layout of a pytree of arrays or `jax.ShapeDtypeStruct`s.

    Raises TypeError, with the leaf's path, for a leaf that is no array or not of a real floating-point dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    shapes, dtypes = [], []
    for path, leaf in leaves:
        check_is_array(path, leaf)
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"leaf {path_name(path)} has dtype {dtype}; gradients must be of a "
                "real floating-point dtype. Keep integer and complex leaves out of the compressor with optax.partition."
            )
        shapes.append(jnp.shape(leaf))
        dtypes.append(dtype)
    return Layout(treedef, tuple(shapes), tuple(dtypes), _fill(shapes, bucket_limit.get()))


def _fill(shapes: list[tuple[int, ...]], max_bucket: int) -> tuple[Bucket, ...]:
    most = room = max_bucket // WORD  # words
    filled: list[list[tuple[int, int, int]]] = [[]]  # of each bucket: leaf, begin, size
    for leaf, shape in enumerate(shapes):
        begin, size = 0, math.prod(shape)
        whole = words_of(size) <= most
        while begin < size:
            take = size - begin
            if words_of(take) > room:
                take = 0 if whole else min(take, room * WORD)
                take = take // BLOCK * BLOCK if has_own_blocks(take) else take
            if take:
                filled[-1].append((leaf, begin, take))
                room -= words_of(take)
                begin += take
            else:
                filled.append([])
                room = most
    return tuple(bucket_of(parts, shapes) for parts in filled if parts)


def flatten(layout: Layout, tree: PyTree) -> list[tuple[Array, ...]]:
    """The leaves of `tree` in float32, for each bucket an array of each segment's shape."""
    leaves = [jnp.asarray(leaf).astype(jnp.float32) for leaf in layout.treedef.flatten_up_to(tree)]
    return [tuple(_segment(leaves[s.leaf], s) for s in bucket.segments) for bucket in layout.buckets]


def _segment(leaf: Array, s: Segment) -> Array:
    return leaf if leaf.size == s.size else leaf.reshape(-1)[s.begin : s.begin + s.size]


def unflatten(layout: Layout, buckets: Sequence[Sequence[Array]], *, keep_infinities: bool = False) -> PyTree:
    """The inverse of `flatten`: a pytree with the leaves' own shapes and dtypes.

    An entry beyond the range of its float16 or float8 leaf becomes the largest number of that dtype, except infinity
    under `keep_infinities`; `count_beyond_range` counts such entries.
    """
    pieces: list[list[Array]] = [[] for _ in layout.shapes]
    for bucket, arrays in zip(layout.buckets, buckets, strict=True):
        for s, x in zip(bucket.segments, arrays, strict=True):
            pieces[s.leaf].append(x.reshape(-1) if math.prod(layout.shapes[s.leaf]) > s.size else x)
    leaves = [
        _narrowed((concatenated(parts) if parts else jnp.zeros(0)).reshape(shape), dtype, keep_infinities)
        for parts, shape, dtype in zip(pieces, layout.shapes, layout.dtypes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(layout.treedef, leaves)


def count_beyond_range(layout: Layout, buckets: Sequence[Sequence[Array]]) -> Array:
    """Number of entries beyond the range of their leaf's dtype, int32; NaN does not count."""
    counts = [
        jnp.sum(jnp.abs(x) > largest, dtype=jnp.int32)
        for bucket, arrays in zip(layout.buckets, buckets, strict=True)
        for s, x in zip(bucket.segments, arrays, strict=True)
        if (largest := _largest_if_narrow(layout.dtypes[s.leaf])) is not None
    ]
    return sum(counts, jnp.int32(0))


def _narrowed(x: Array, dtype: np.dtype, keep_infinities: bool) -> Array:
    largest = _largest_if_narrow(dtype)
    if largest is None:
        return x.astype(dtype)
    clipped = jnp.clip(x, -largest, largest)
    return (jnp.where(jnp.isinf(x), x, clipped) if keep_infinities else clipped).astype(dtype)


def _largest_if_narrow(dtype: np.dtype) -> float | None:
    """The largest number of a dtype with fewer bits for the exponent than float32, such as float16; None of others."""
    info = jnp.finfo(dtype)
    return float(info.max) if info.maxexp < jnp.finfo(jnp.float32).maxexp else None
