"""Leaves cut into chunks, and the largest entries of every chunk.

A matrix is cut into chunks of rows and columns. An axis is divided into the fewest equal parts of at most so many
entries, the last one padded. A leaf with three or more axes is cut like a matrix with its last axis as columns, a
vector into chunks of one row, and one longer than chunk**2 like a matrix with rows of `chunk` entries.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.buckets import Bucket, Segment
from gcjax._types import Array

RUN = 16  # neighbours whose largest is found first; one search of the whole chunk takes three times as long


class Chunks(NamedTuple):
    """How a segment is divided into chunks.

    Attributes:
      segment: the segment.
      shape: (rows, columns) of the matrix that it is divided as.
      grid: number of chunks (down, across).
      chunk: (rows, columns) of one chunk.
    """

    segment: Segment
    shape: tuple[int, int]
    grid: tuple[int, int]
    chunk: tuple[int, int]

    @property
    def number(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

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


def chunks_by_size(bucket: Bucket, chunk: int) -> dict[int, list[Chunks]]:
    """Entries of a chunk, fewest first -> the leaves that are divided into chunks of this size.

    Args:
      bucket: where the leaves lie.
      chunk: largest length of a chunk along an axis.
    """
    by_size: dict[int, list[Chunks]] = {}
    for s in bucket.segments:
        if len(s.shape) > 1:
            shape = math.prod(s.shape[:-1]), s.shape[-1]
        else:
            shape = (1, s.size) if s.size <= chunk**2 else (math.ceil(s.size / chunk), chunk)
        grid = math.ceil(shape[0] / chunk), math.ceil(shape[1] / chunk)
        each = math.ceil(shape[0] / grid[0]), math.ceil(shape[1] / grid[1])
        by_size.setdefault(math.prod(each), []).append(Chunks(s, shape, grid, each))
    return dict(sorted(by_size.items()))


def chunk_shapes(bucket: Bucket, chunk: int) -> list[tuple[int, int]]:
    """(chunks, entries of one) for each size of chunks."""
    return [(sum(leaf.number for leaf in leaves), size) for size, leaves in chunks_by_size(bucket, chunk).items()]


def largest_of_rows(magnitudes: Array, k: int) -> Array:
    """Indices of the k largest of each row, int32[rows, k]; all of a shorter row.

    They are in the k runs of neighbours with the largest maxima.
    """
    rows, size = magnitudes.shape
    run = max(d for d in range(1, RUN + 1) if size % d == 0)
    if size // run <= k:
        return lax.top_k(magnitudes, min(k, size))[1]
    split = magnitudes.reshape(rows, -1, run)
    # Not jnp.max: XLA's CPU backend passes it to a library and has to write its operand to memory first.
    peaks = lax.reduce(split, jnp.float32(-1), lambda a, b: jnp.where(a > b, a, b), (2,))
    runs = lax.top_k(peaks, k)[1]
    inside = jnp.take_along_axis(split, runs[:, :, None], axis=1).reshape(rows, -1)
    found = lax.top_k(inside, k)[1]
    return jnp.take_along_axis(runs, found // run, axis=1) * run + found % run


def flat_positions(indices: list[Array], shapes: list[tuple[int, int]]) -> list[Array]:
    """Indices within chunks, int32[chunks, k] for each size -> positions among all entries of these chunks."""
    return [
        jnp.ravel(index + jnp.arange(chunks, dtype=jnp.int32)[:, None] * size)
        for index, (chunks, size) in zip(indices, shapes, strict=True)
    ]
