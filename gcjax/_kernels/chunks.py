"""Leaves cut into chunks, the largest entries of every chunk, and sums over workers.

A matrix is cut into chunks of rows and columns. An axis is divided into the fewest equal parts of at most so many
entries, the last one padded. A leaf with three or more axes is cut like a matrix with its last axis as columns, a
vector into chunks of one row, and one longer than chunk**2 like a matrix with rows of `chunk` entries.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.buckets import Bucket, Segment
from gcjax._types import Array
from gcjax._xla import larger

RUN = 16  # neighbours whose largest is found first; one search of the whole chunk takes three times as long


class Chunks(NamedTuple):
    """A segment as chunks."""

    segment: Segment
    shape: tuple[int, int]  # (rows, columns) of the segment as a matrix
    grid: tuple[int, int]  # number of chunks (down, across)
    chunk: tuple[int, int]  # (rows, columns) of one chunk

    @property
    def number(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    def real_entries(self) -> np.ndarray:
        """Entries of each chunk that are not padding, [down, across]."""
        (_, columns), (down, across), (height, width) = self.shape, self.grid, self.chunk
        rows, rest = divmod(self.segment.size, columns)  # of the last row of a vector, only the rest is there
        of_rows = np.clip(rows - height * np.arange(down), 0, height)
        of_full, of_last = (np.clip(x - width * np.arange(across), 0, width) for x in (columns, rest))
        return of_rows[:, None] * of_full + (np.arange(down) == rows // height)[:, None] * of_last

    def divide(self, x: Array, fill: float = 0) -> Array:
        """The leaf, float32 of its shape -> [down, rows of a chunk, across, columns of a chunk], padded with `fill`."""
        (rows, columns), (down, across), (height, width) = self.shape, self.grid, self.chunk
        flat = jnp.pad(x.reshape(-1), (0, rows * columns - x.size), constant_values=fill)
        padding = (0, down * height - rows), (0, across * width - columns)
        padded = jnp.pad(flat.reshape(rows, columns), padding, constant_values=fill)
        return padded.reshape(down, height, across, width)

    def unite(self, x: Array) -> Array:
        """The inverse of `divide`."""
        (rows, columns), (down, across), (height, width) = self.shape, self.grid, self.chunk
        matrix = x.reshape(down * height, across * width)
        return matrix[:rows, :columns].reshape(-1)[: self.segment.size].reshape(self.segment.shape)

    def to_rows(self, x: Array, fill: float = 0) -> Array:
        """The leaf -> float32[chunks, entries of one], padded with `fill`."""
        return self.divide(x, fill).swapaxes(1, 2).reshape(self.number, -1)

    def from_rows(self, x: Array) -> Array:
        """The inverse of `to_rows`, of any shape with these entries."""
        (down, across), (height, width) = self.grid, self.chunk
        return self.unite(x.reshape(down, across, height, width).swapaxes(1, 2))


class ChunkGroup(NamedTuple):
    """The leaves of a bucket, in its order, whose chunks have the same number `size` of entries."""

    size: int
    leaves: list[Chunks]

    @property
    def number(self) -> int:
        """Number of chunks."""
        return sum(leaf.number for leaf in self.leaves)

    @property
    def shape(self) -> tuple[int, int]:
        """(chunks, entries of one)."""
        return self.number, self.size

    def by_leaf(self, x: Array) -> list[Array]:
        """The part of x of each leaf. The leading axis of x has equal parts for all chunks."""
        each = len(x) // self.number
        return jnp.split(x, np.cumsum([leaf.number * each for leaf in self.leaves])[:-1])

    def flat(self, indices: Array) -> Array:
        """Indices within the chunks, int32[chunks, k] -> int32[chunks * k], among all entries of the group."""
        return jnp.ravel(indices + jnp.arange(self.number, dtype=jnp.int32)[:, None] * self.size)


ByLeaf = Callable[[Chunks, Array], Array]
# Of each sum: values and their places, of which none comes twice; None if the values are of all places.
Sent = Sequence[tuple[Array | None, Array]]


def chunk_groups(bucket: Bucket, chunk: int) -> list[ChunkGroup]:
    """The groups of a bucket, smallest chunks first; `chunk` is the largest length of a chunk along an axis."""
    by_size: dict[int, list[Chunks]] = {}
    for s in bucket.segments:
        if len(s.shape) > 1:
            shape = math.prod(s.shape[:-1]), s.shape[-1]
        else:
            shape = (1, s.size) if s.size <= chunk**2 else (math.ceil(s.size / chunk), chunk)
        grid = math.ceil(shape[0] / chunk), math.ceil(shape[1] / chunk)
        each = math.ceil(shape[0] / grid[0]), math.ceil(shape[1] / grid[1])
        by_size.setdefault(math.prod(each), []).append(Chunks(s, shape, grid, each))
    return [ChunkGroup(size, leaves) for size, leaves in sorted(by_size.items())]


def into_groups(leaves: Sequence[Array], bucket: Bucket, chunk: int, divide: ByLeaf) -> list[Array]:
    """divide(chunks, leaf) of each leaf, concatenated for each of `chunk_groups`."""
    of = dict(zip(bucket.segments, leaves, strict=True))
    return [jnp.concatenate([divide(c, of[c.segment]) for c in g.leaves]) for g in chunk_groups(bucket, chunk)]


def from_groups(parts: Sequence[Array], bucket: Bucket, chunk: int, unite: ByLeaf) -> tuple[Array, ...]:
    """The inverse of `into_groups`: unite(chunks, part) is a leaf, from its part of its group's array."""
    of: dict[Segment, Array] = {}
    for x, group in zip(parts, chunk_groups(bucket, chunk), strict=True):
        of |= {leaf.segment: unite(leaf, part) for leaf, part in zip(group.leaves, group.by_leaf(x), strict=True)}
    return tuple(of[s] for s in bucket.segments)


def add_sent(sums: Sequence[Array], sent: Sent) -> list[Array]:
    """The sums, with the values that one worker sent added."""
    return [
        x + value if place is None else x.at[place].add(value, unique_indices=True)
        for x, (place, value) in zip(sums, sent, strict=True)
    ]


def sum_sent(payloads: Array, decode: Callable[[Array], Sent], sizes: Sequence[int], go: Array) -> list[Array]:
    """Sums over all workers in the order of their numbers: float32[size] for each size; NaN unless `go`.

    payloads: [workers, words]; decode: one worker's payload -> its values and places for each sum.
    """

    def add(worker: Array, sums: list[Array]) -> list[Array]:
        return add_sent(sums, decode(payloads[worker]))

    start = [zeros((size,), jnp.float32, payloads) + jnp.where(go, 0.0, jnp.nan) for size in sizes]
    return lax.fori_loop(0, len(payloads), add, start)


def largest_of_rows(magnitudes: Array, k: int) -> Array:
    """Indices of the k largest of each row, int32[rows, k]; all of a shorter row.

    They are in the k runs of neighbours with the largest maxima.
    """
    rows, size = magnitudes.shape
    run = max(d for d in range(1, RUN + 1) if size % d == 0)
    if size // run <= k:
        return lax.top_k(magnitudes, min(k, size))[1]
    split = magnitudes.reshape(rows, -1, run)
    peaks = lax.reduce(split, jnp.float32(-1), larger, (2,))
    runs = lax.top_k(peaks, k)[1]
    inside = jnp.take_along_axis(split, runs[:, :, None], axis=1).reshape(rows, -1)
    found = lax.top_k(inside, k)[1]
    return jnp.take_along_axis(runs, found // run, axis=1) * run + found % run
