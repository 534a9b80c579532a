"""The leaves of a bucket as matrices, batched by shape; their products, and orthonormal vectors."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.buckets import Bucket, Segment
from gcjax._kernels.floats import TINY
from gcjax._types import Array


class Batch(NamedTuple):
    """The leaves that are matrices of `rows` and `columns`."""

    rows: int
    columns: int
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.segments)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The leaves of a bucket: matrices, those of one shape together, and others."""

    bucket: Bucket
    batches: tuple[Batch, ...]
    others: tuple[Segment, ...]

    def take(self, leaves: Sequence[Array]) -> tuple[list[Array], Array]:
        """The bucket's leaves -> float32[b, rows, columns] for each batch of b matrices; the others, concatenated."""
        of = dict(zip(self.bucket.segments, leaves, strict=True))
        matrices = [jnp.stack([of[s].reshape(b.rows, b.columns) for s in b.segments]) for b in self.batches]
        return matrices, jnp.concatenate([jnp.zeros(0), *(of[s].reshape(-1) for s in self.others)])

    def leaves(self, matrices: Sequence[Array], others: Array) -> tuple[Array, ...]:
        """The inverse of `take`."""
        of: dict[Segment, Array] = {}
        begin = 0
        for batch, m in zip(self.batches, matrices, strict=True):
            of |= {s: m[i].reshape(s.shape) for i, s in enumerate(batch.segments)}
        for s in self.others:
            of[s] = others[begin : begin + s.size].reshape(s.shape)
            begin += s.size
        return tuple(of[s] for s in self.bucket.segments)


def matrices_of(bucket: Bucket, wanted: Callable[[int, int], bool]) -> Matrices:
    """The leaves of shape (..., columns), their other axes merged to rows, for which `wanted(rows, columns)` is true.

    A part of a leaf that is split between buckets counts as a vector, and a vector as a matrix of one row.
    """
    by_shape: dict[tuple[int, int], list[Segment]] = {}
    others: list[Segment] = []
    for s in bucket.segments:
        columns = math.prod(s.shape[-1:])
        rows = s.size // columns
        (by_shape.setdefault((rows, columns), []) if wanted(rows, columns) else others).append(s)
    return Matrices(bucket, tuple(Batch(*shape, tuple(parts)) for shape, parts in by_shape.items()), tuple(others))


def multiply(subscripts: str, x: Array, y: Array) -> Array:
    """`jnp.einsum` in full float32; accelerators multiply with fewer bits by default."""
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


def unit(x: Array) -> Array:
    """Vectors along the last axis scaled to length 1; one without a normal number in it becomes zero."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)  # the squares of 1e30 and 1e-30 leave float32's range
    x = jnp.where(largest >= TINY, x / largest, 0)
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1))


def orthonormal(p: Array, epsilon: float) -> Array:
    """The vectors p[:, 0], p[:, 1], ... (batch, n), made orthonormal in this order by Gram-Schmidt.

    A vector becomes zero if its projection off the earlier ones has no more than the share `epsilon` of its length.
    """

    def add(k: Array, basis: Array) -> Array:
        x = _remove(unit(p[:, k]), basis)
        left = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
        x = unit(_remove(unit(x), basis))  # the rest may be mostly rounding errors along the basis
        return basis.at[:, k].set(jnp.where(left > epsilon, x, 0))

    return lax.fori_loop(0, p.shape[1], add, jnp.zeros_like(p))


def _remove(x: Array, basis: Array) -> Array:
    """x (batch, n) minus its projection on the orthonormal `basis` (batch, k, n)."""
    return x - multiply("bk,bkn->bn", multiply("bkn,bn->bk", basis, x), basis)
