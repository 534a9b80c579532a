"""Sums and maxima over groups of entries: whole leaves, or blocks within them.

A group is a run of whole mask words (32 entries each) of one leaf, so that a reduction takes one pass to per-word
values, of which the rest works. The padding between leaves is zero and adds nothing. The order of summation is fixed.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._bits import LANES, by_rows
from gcjax._layout import Bucket
from gcjax._types import Array


@dataclasses.dataclass(frozen=True)
class Groups:
    """Consecutive groups of a bucket, by the words (begin, end) that each takes; `words` in all, `size` entries."""

    ranges: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    words: int
    size: int

    def __len__(self) -> int:
        return len(self.ranges)

    def group_of_word(self) -> np.ndarray:
        """Each word's group, int32[words]; the words behind the last group count to it."""
        ends = [begin for begin, _ in self.ranges[1:]] + [self.words]
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff([0, *ends]))

    def counts(self) -> Array:
        """Parameters in each group, float32[groups]."""
        return jnp.asarray(np.asarray(self.sizes, np.float32))

    def sums(self, *xs) -> list[Array]:
        """Each float32[size] -> float32[groups]; all in one pass over what they are made of."""
        return [self._reduce(per_word, jnp.sum) for per_word in by_rows(_reducer(_add), *xs)]

    def maxima(self, *xs) -> list[Array]:
        """The same for maxima; nothing may be negative."""
        return [self._reduce(per_word, jnp.max) for per_word in by_rows(_reducer(_larger), *xs)]

    def _reduce(self, per_word, operation) -> Array:
        width = max(end - begin for begin, end in self.ranges)
        if len(self) * width > 2 * self.words:  # of very different lengths
            return jnp.stack([operation(per_word[begin:end]) for begin, end in self.ranges])
        begins, ends = np.asarray(self.ranges, np.int32).T[:, :, None]
        word = begins + np.arange(width, dtype=np.int32)
        return operation(jnp.where(word < ends, per_word[np.minimum(word, self.words - 1)], 0), axis=1)

    def spread(self, values) -> Array:
        """Each entry's value of its group: [groups] -> [size], or a scalar for a single group."""
        if len(self) == 1:
            return values[0]
        return jnp.repeat(values[self.group_of_word()], LANES)[: self.size]


def _reducer(merge):
    """Reduces rows of 32. XLA's CPU backend hands sums and maxima that it recognises to a library, for which it writes
    the operands out first, at ten times the cost; these it does not recognise."""

    def reduce(*rows):
        def merge_all(a, b):
            return tuple(merge(x, y) for x, y in zip(a, b, strict=True))

        return lax.reduce(rows, (jnp.float32(0),) * len(rows), merge_all, (1,))

    return reduce


def _add(x, y):
    return lax.reduce_precision(x + y, 8, 23)  # those of float32: changes nothing


def _larger(x, y):
    return jnp.where(x > y, x, y)


def leaf_groups(bucket: Bucket) -> Groups:
    """One group for each leaf (each part of a leaf that is split between buckets)."""
    return Groups(tuple(bucket.leaf_words()), tuple(s.size for s in bucket.segments), bucket.words, bucket.size)


def whole_group(bucket: Bucket) -> Groups:
    """One group of everything."""
    return Groups(((0, bucket.words),), (bucket.entries,), bucket.words, bucket.size)


def block_groups(bucket: Bucket, block: int) -> Groups:
    """Each leaf in groups of `block` entries, a multiple of 32, the last one shorter."""
    ranges, sizes = [], []
    for s, (begin, end) in zip(bucket.segments, bucket.leaf_words(), strict=True):
        for k in range(math.ceil(s.size / block)):
            first = begin + k * block // LANES
            ranges.append((first, min(first + block // LANES, end)))
            sizes.append(min(block, s.size - k * block))
    return Groups(tuple(ranges), tuple(sizes), bucket.words, bucket.size)
