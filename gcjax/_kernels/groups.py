"""Sums and maxima over groups of entries: whole leaves, or blocks within them.

A group is a run of mask words (32 entries each) of one leaf. A reduction makes a value of each word in one pass and
goes on with these, in a fixed order. The padding between leaves is zero and adds nothing.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._kernels.bits import LANES, WORD, count_bits, reduce_rows
from gcjax._kernels.buckets import Bucket, run_of_word
from gcjax._kernels.floats import FLOAT_MAX, to_unit
from gcjax._types import Array
from gcjax._xla import larger


@dataclasses.dataclass(frozen=True)
class Groups:
    """Consecutive groups of mask words of a bucket.

    Attributes:
      ranges: (begin, end) of the mask words of each group.
      sizes: parameters in each group.
      words: mask words of the bucket's blocks.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(0, 0, 6, 0, (2, 3)), gx.Segment(1, 0, 4, 1, (4,))))
    >>> groups = gx.leaf_groups(bucket)
    >>> (sums,) = groups.sums(bucket.join([jnp.ones((2, 3)), jnp.full(4, 2.0)]))
    >>> print(sums, groups.per_entry(sums).shape)
    [6. 8.] (1, 1, 128)
    """

    ranges: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    words: int

    def __len__(self) -> int:
        return len(self.ranges)

    def group_of_word(self) -> np.ndarray:
        """The group of each word, int32[words]; words after the last group belong to it."""
        return run_of_word([begin for begin, _ in self.ranges], self.words)

    def counts(self) -> Array:
        """Parameters in each group, float32[groups]."""
        return jnp.asarray(np.asarray(self.sizes, np.float32))

    def sums(self, *xs: Array) -> list[Array]:
        """Sums over each group: float32[blocks, 32, 128] -> float32[groups] for each x, all in one pass."""
        return [self.reduce_words(per_word, _sum) for per_word in reduce_rows(*((lax.add, x) for x in xs))]

    def maxima(self, *xs: Array) -> list[Array]:
        """Maxima over each group, like `sums`; the entries must not be negative."""
        return [self.reduce_words(per_word, jnp.max) for per_word in reduce_rows(*((larger, x) for x in xs))]

    def norms(self, x: Array, largest: Array) -> Array:
        """2-norms, float32[groups]. `largest`, the groups' largest magnitudes, keeps squares in float32's range."""
        unit = to_unit(largest)
        (squares,) = self.sums(jnp.square(x * self.per_entry(unit)))
        return jnp.minimum(jnp.sqrt(squares) / unit, FLOAT_MAX)

    def set_bits(self, words: Array) -> Array:
        """Number of entries of each group that a packed mask has set, float32[groups]."""
        return self.reduce_words(count_bits(words).astype(jnp.float32), jnp.sum)

    def reduce_words(self, per_word: Array, operation: Callable[..., Array]) -> Array:
        """`jnp.max`, or a sum, of one value per word: [words] -> [groups]."""
        if len(self) == 1:
            return operation(per_word)[None]
        width = max(end - begin for begin, end in self.ranges)
        if len(self) * width > 2 * self.words:  # of very different lengths
            return jnp.stack([operation(per_word[begin:end]) for begin, end in self.ranges])
        begins, ends = np.asarray(self.ranges, np.int32).T[:, :, None]
        word = begins + np.arange(width, dtype=np.int32)
        return operation(jnp.where(word < ends, per_word[np.minimum(word, self.words - 1)], 0), axis=1)

    def per_entry(self, values: Array) -> Array:
        """The value of each entry's group, [groups] -> [blocks, 1, 128], or a scalar for a single group."""
        if len(self) == 1:
            return values[0]
        return values[self.group_of_word()].reshape(-1, 1, LANES)


def _sum(x: Array, axis: int = -1) -> Array:
    """In two levels: XLA's CPU backend adds one after the other, and the error would grow with the length."""
    rows = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[axis] % 64)]).reshape(*x.shape[:-1], -1, 64)
    partial = lax.reduce_precision(jnp.sum(rows, axis=-2), 8, 23)  # changes nothing; XLA would merge the two sums
    return jnp.sum(partial, axis=axis)


def leaf_groups(bucket: Bucket) -> Groups:
    """One group per leaf, or per part of a leaf that is split between buckets.

    >>> import gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(0, 0, 6, 0, (2, 3)), gx.Segment(1, 0, 4, 1, (4,))))
    >>> gx.leaf_groups(bucket).sizes
    (6, 4)
    """
    return Groups(tuple(bucket.leaf_word_ranges()), tuple(s.size for s in bucket.segments), bucket.size // WORD)


def whole_group(bucket: Bucket) -> Groups:
    """One group of the whole bucket.

    >>> import gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(0, 0, 6, 0, (2, 3)), gx.Segment(1, 0, 4, 1, (4,))))
    >>> gx.whole_group(bucket).sizes
    (10,)
    """
    words = bucket.size // WORD
    return Groups(((0, words),), (bucket.entries,), words)


def block_groups(bucket: Bucket, block: int) -> Groups:
    """Each leaf in groups of `block` entries, a multiple of 32: of neighbouring mask words. The last may be smaller.

    >>> import gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(leaf=0, begin=0, size=100, word=0, shape=(100,)),))
    >>> gx.block_groups(bucket, block=64).sizes
    (50, 50)
    """
    width = block // WORD
    ranges = tuple(
        (first, min(first + width, end))
        for begin, end in bucket.leaf_word_ranges()
        for first in range(begin, end, width)
    )
    before = np.concatenate([[0], np.cumsum(np.bitwise_count(bucket.valid_words()), dtype=np.int64)])
    return Groups(ranges, tuple(int(before[end] - before[begin]) for begin, end in ranges), bucket.size // WORD)
