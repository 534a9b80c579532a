"""Selection of the largest entries: exactly, without a sort of gradient length, or by a threshold from a sample.

Magnitudes are compared as the integers of their bits (`floats.magnitude_bits`). Zeros and numbers below float32's
normal range are never selected: there is nothing to send.
"""

import math
from collections.abc import Callable
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.bits import (
    count_bits,
    nth_set_bit,
    pack_mask,
    pack_masks,
    position_of,
    prefix_count,
    to_blocks,
    word_and_bit,
)
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.floats import TINY, bits_float, magnitude_bits
from gcjax._kernels.hashing import scatter_positions
from gcjax._sparse.compaction import Slots, assign_slots, slot_indices
from gcjax._types import Array, ArrayLike

SAMPLE = 1 << 16
_TINY_BITS = int(np.float32(TINY).view(np.uint32))
_TOP_BITS = 0x7F7FFFFF  # those of the largest finite number


@overload
def count_for_density(density: float, size: int) -> int: ...
@overload
def count_for_density(density: Array, size: int) -> Array: ...
def count_for_density(density: float | Array, size: int) -> int | Array:
    """k = max(1, floor(density * size)), at most `size`: an int for a float, int32 for an array.

    >>> from gcjax.extend import count_for_density
    >>> count_for_density(0.01, 1050)
    10
    """
    if not isinstance(density, jax.Array):
        return min(max(1, math.floor(float(density) * size)), size)
    return jnp.clip(jnp.floor(density * size), 1, size).astype(jnp.int32)


def kth_largest(bits: Array, k: Array) -> Array:
    """The k-th largest of each row, exactly: uint32[..., m] below 2**31, int32[...] from 1 to m -> uint32[...].

    Found bit by bit from the top: 31 counts, no sort.
    """

    def at_least(trial: Array) -> Array:
        return jnp.sum(bits >= trial[..., None], axis=-1, dtype=jnp.int32)

    return _search(at_least, k, jnp.zeros_like(bits[..., 0]))


def _kth_of_bucket(x: Array, k: int | Array, candidates: Array | None = None) -> Array:
    """`kth_largest` of the magnitudes of x, float32[blocks, 32, 128], but at least the bits of the smallest normal."""

    def at_least(trial: Array) -> Array:  # as floats: magnitudes would be computed before the loop, and held in memory
        limit = bits_float(trial)
        return jnp.sum(count_bits(_among(candidates, pack_mask((x >= limit) | (x <= -limit)))))

    return jnp.maximum(_search(at_least, jnp.int32(k), zeros((), jnp.uint32, x)), _TINY_BITS)


def _search(at_least: Callable[[Array], Array], k: Array, start: Array) -> Array:
    """The largest number below 2**31 with at_least(number) >= k."""

    def settle_bit(i: Array, found: Array) -> Array:
        trial = found | (jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        return jnp.where(at_least(trial) >= k, trial, found)

    return lax.fori_loop(0, 31, settle_bit, start)


def _among(candidates: Array | None, words: Array) -> Array:
    return words if candidates is None else words & candidates


def kth_magnitude(x: Array, k: int | Array, candidates: Array | None = None) -> Array:
    """Bits of the k-th largest magnitude of x, exactly.

    A sample gives a bracket that nearly always holds the wanted number. One pass counts the entries above it and
    gathers those inside, and the search goes on among these few. Where the bracket misses, or ties fill it, all entries
    are searched. With fewer than k entries to select, the bits of the smallest normal number are returned.

    Args:
      x: float32[blocks, 32, 128].
      k: int or int32, from 1 to the number of entries.
      candidates: packed mask of the entries that count. A masked copy of x would be one more array of gradient length.
    """
    bits, size = magnitude_bits(x), x.size
    if size <= 2 * SAMPLE:
        return _kth_of_bucket(x, k, candidates)
    place = scatter_positions(size, SAMPLE, 0)
    sample = bits.reshape(-1)[place]
    if candidates is not None:
        word, bit = word_and_bit(place)
        sample = jnp.where(candidates[word] & bit > 0, sample, 0)
    rank = k * (SAMPLE / size)
    slack = 4 * rank**0.5 + 8
    ranks = jnp.clip(jnp.array([rank - slack, rank + slack]), 1, SAMPLE).astype(jnp.int32)
    high, low = kth_largest(jnp.broadcast_to(sample, (2, SAMPLE)), ranks)
    high = jnp.where(rank - slack < 1, _TOP_BITS, high)
    low = jnp.maximum(jnp.where(rank + slack > SAMPLE, 0, low), _TINY_BITS)
    above, inside = (_among(candidates, words) for words in pack_masks(bits > high, (bits >= low) & (bits <= high)))
    count_above, slots = jnp.sum(count_bits(above)), assign_slots(inside)
    room = size // 32 if isinstance(slack, Array) else min(size // 32, round(3 * slack * size / SAMPLE))
    found = (count_above < k) & (k <= count_above + slots.total) & (slots.total <= room)
    too_few = (low == _TINY_BITS) & (count_above + slots.total < k)

    def among_these(x: Array, slots: Slots) -> Array:
        return jnp.where(too_few, _TINY_BITS, _kth_of_bucket(_values_in(slots, x, room), k - count_above))

    def among_all(x: Array, slots: Slots) -> Array:
        del slots
        return _kth_of_bucket(x, k, candidates)

    return lax.cond(found | too_few, among_these, among_all, x, slots)


def _values_in(slots: Slots, x: Array, room: int) -> Array:
    """The entries of x that have slots, as blocks with zeros behind them."""
    taken = x.reshape(-1)[position_of(slot_indices(slots, room))]
    return to_blocks(jnp.where(jnp.arange(room, dtype=jnp.int32) < slots.total, taken, 0))


def top_k_mask(x: Array, k: int | Array, candidates: Array | None = None) -> Array:
    """Packed mask of the k entries of largest magnitude of x; of equal ones, those with the lowest index.

    The index counts word by word. Fewer are set only where fewer are not zero. Arguments: as for `kth_magnitude`.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(leaf=0, begin=0, size=3, word=0, shape=(3,)),))
    >>> mask = gx.top_k_mask(bucket.join([jnp.array([1.0, -3.0, 2.0])]), 2)
    >>> print(bucket.split(gx.unpack_mask(mask))[0])
    [False  True  True]
    """
    threshold = kth_magnitude(x, k, candidates)
    bits = magnitude_bits(x)
    above, equal = (_among(candidates, words) for words in pack_masks(bits > threshold, bits == threshold))
    room = k - jnp.sum(count_bits(above))
    return above | lax.cond(jnp.sum(count_bits(equal)) == room, lambda words, _: words, _lowest, equal, room)


def keep_largest(limit: int, x: Array, words: Array) -> Array:
    """The `limit` entries of largest magnitude of a packed mask of x; all of them where no more are set.

    Entries that wait grow until they are among the largest, so none starves. Sending one region of the parameters after
    the other instead spoiled early training.
    """

    def largest(x: Array, words: Array) -> Array:
        return top_k_mask(x, limit, candidates=words)

    return lax.cond(jnp.sum(count_bits(words)) > limit, largest, lambda x, words: words, x, words)


def _lowest(words: Array, count: Array) -> Array:
    """The words with only their first `count` set bits, counted over all words."""
    here = count_bits(words)
    room = jnp.clip(count - (prefix_count(words) - here), 0, here)  # bits that this word may keep
    stop = nth_set_bit(words, jnp.minimum(room, jnp.maximum(here - 1, 0)))
    return jnp.where(room == here, words, words & ((jnp.uint32(1) << stop.astype(jnp.uint32)) - 1))


def sampled(x: Array, bucket: Bucket, count: int, step: Array) -> Array:
    """A sample of up to `count` entries of each leaf (all of a smaller one): float32[leaves, count], padded with 0.

    The leaf is cut into `count` equal stretches. A hash of `step` (int32) picks one entry of each.
    """
    width = min(count, max(s.size for s in bucket.segments))
    places = jnp.stack([s.position_of(scatter_positions(s.size, width, step)) for s in bucket.segments])
    sizes = np.asarray([s.size for s in bucket.segments], np.int32)[:, None]
    return jnp.where(np.arange(width) < sizes, x.reshape(-1)[places], 0)


def quantile_threshold(samples: Array, count: ArrayLike, density: ArrayLike) -> Array:
    """The magnitude that a share `density` of each group's sample reaches, float32[groups].

    Args:
      samples: float32[groups, m].
      count: int32[groups], how many samples of each group are real; the others are 0.
      density: share, in (0, 1].
    """
    k = jnp.clip(jnp.ceil(count * density), 1, samples.shape[-1]).astype(jnp.int32)
    return bits_float(jnp.maximum(kth_largest(magnitude_bits(samples), k), _TINY_BITS))
