"""Sums and maxima over groups of entries: whole leaves, or blocks within them.

A group is a run of whole mask words (32 entries each) of one leaf. A reduction takes one pass to per-word values and
goes on with these. The padding between leaves is zero and adds nothing. The order of summation is fixed.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._kernels.bits import FLOAT_MAX, LANES, by_rows, count_bits, to_unit
from gcjax._kernels.buckets import Bucket
from gcjax._types import Array

Merge = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Consecutive groups of entries of a bucket.

    Attributes:
      ranges: (begin, end) of the mask words of each group.
      sizes: parameters in each group.
      words: mask words of the bucket.
      size: entries of the bucket.
    """

    ranges: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    words: int
    size: int

    def __len__(self) -> int:
        return len(self.ranges)

    def group_of_word(self) -> np.ndarray:
        """The group of each word, int32[words]; words after the last group belong to it."""
        ends = [begin for begin, _ in self.ranges[1:]] + [self.words]
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff([0, *ends]))

    def counts(self) -> Array:
        """Parameters in each group, float32[groups]."""
        return jnp.asarray(np.asarray(self.sizes, np.float32))

    def sums(self, *xs: Array) -> list[Array]:
        """Sums over each group: float32[size] -> float32[groups] for each x, all in one pass."""
        return [self._reduce(per_word, jnp.sum) for per_word in by_rows(self._reducer(_add), *xs)]

    def maxima(self, *xs: Array) -> list[Array]:
        """Maxima over each group, like `sums`; the entries must not be negative."""
        return [self._reduce(per_word, jnp.max) for per_word in by_rows(self._reducer(_larger), *xs)]

    def norms(self, x: Array, largest: Array) -> Array:
        """2-norms, float32[groups]. `largest`, the groups' largest magnitudes, keeps squares in float32's range."""
        unit = to_unit(largest)
        (squares,) = self.sums(jnp.square(x * self.per_entry(unit)))
        return jnp.minimum(jnp.sqrt(squares) / unit, FLOAT_MAX)

    def set_bits(self, words: Array) -> Array:
        """Number of entries of each group that a packed mask has set, float32[groups]."""
        return self._reduce(count_bits(words).astype(jnp.float32), jnp.sum)

    def _reducer(self, merge: Merge) -> Callable[..., list[Array]]:
        # A single group needs no value per word: reduced across rows, as vectors, it takes half the time.
        return _reducer(merge, (16, 16) if len(self) == 1 else (LANES, 1))

    def _reduce(self, per_word: Array, operation: Callable[..., Array]) -> Array:
        if len(self) == 1:
            return operation(per_word)[None]
        width = max(end - begin for begin, end in self.ranges)
        if len(self) * width > 2 * self.words:  # of very different lengths
            return jnp.stack([operation(per_word[begin:end]) for begin, end in self.ranges])
        begins, ends = np.asarray(self.ranges, np.int32).T[:, :, None]
        word = begins + np.arange(width, dtype=np.int32)
        return operation(jnp.where(word < ends, per_word[np.minimum(word, self.words - 1)], 0), axis=1)

    def per_entry(self, values: Array) -> Array:
        """The value of each entry's group: [groups] -> [size], or a scalar for a single group."""
        if len(self) == 1:
            return values[0]
        return jnp.repeat(values[self.group_of_word()], LANES)[: self.size]


def _reducer(merge: Merge, shape: tuple[int, int]) -> Callable[..., list[Array]]:
    """A function that reduces blocks of `shape` along their first axis.

    XLA's CPU backend hands sums and maxima that it recognises to a library, for which it first writes the operands out,
    at ten times the cost. It does not recognise these.
    """

    def reduce(*rows):
        def merge_all(a, b):
            return tuple(merge(x, y) for x, y in zip(a, b, strict=True))

        blocks = tuple(x.reshape(-1, *shape) for x in rows)
        return [x.reshape(-1) for x in lax.reduce(blocks, (jnp.float32(0),) * len(rows), merge_all, (1,))]

    return reduce


def _add(x: Array, y: Array) -> Array:
    return lax.reduce_precision(x + y, 8, 23)  # the precision of float32: changes nothing


def _larger(x: Array, y: Array) -> Array:
    return jnp.where(x > y, x, y)


def leaf_groups(bucket: Bucket) -> Groups:
    """One group per leaf, or per part of a leaf that is split between buckets."""
    return Groups(tuple(bucket.leaf_word_ranges()), tuple(s.size for s in bucket.segments), bucket.words, bucket.size)


def whole_group(bucket: Bucket) -> Groups:
    """One group of the whole bucket."""
    return Groups(((0, bucket.words),), (bucket.entries,), bucket.words, bucket.size)


def block_groups(bucket: Bucket, block: int) -> Groups:
    """Each leaf in groups of `block` entries, a multiple of 32, the last one shorter."""
    ranges, sizes = [], []
    for s, (begin, end) in zip(bucket.segments, bucket.leaf_word_ranges(), strict=True):
        for k in range(math.ceil(s.size / block)):
            first = begin + k * block // LANES
            ranges.append((first, min(first + block // LANES, end)))
            sizes.append(min(block, s.size - k * block))
    return Groups(tuple(ranges), tuple(sizes), bucket.words, bucket.size)
