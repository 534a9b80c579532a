"""Selecting the largest entries: exactly, without a sort of gradient length, or by a threshold from a sample.

Magnitudes are compared as the integers that their bits are (`_bits.magnitude_bits`). Zeros and numbers below float32's
normal range are never selected: there is nothing to send.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._bits import (
    LANES,
    TINY,
    bits_float,
    by_rows,
    count_bits,
    magnitude_bits,
    nth_set_bit,
    pack_mask,
    prefix_count,
)
from gcjax._compact import indices, queue
from gcjax._groups import Groups
from gcjax._random import scatter_positions

SAMPLE = 1 << 16
_TINY_BITS = int(np.float32(TINY).view(np.uint32))
_TOP_BITS = 0x7F7FFFFF  # those of the largest finite number


def entries_for(density, size: int):
    """k = max(1, floor(density * size)), at most `size`; int where density is known, int32 where it is traced."""
    if isinstance(density, (int, float)):
        return min(max(1, math.floor(density * size)), size)
    return jnp.clip(jnp.floor(density * size), 1, size).astype(jnp.int32)


def kth_largest(bits, k, among=None):
    """The k-th largest of each row, exactly: uint32[..., m] below 2**31, int32[...] from 1 to m -> uint32[...].

    Found bit by bit from the top: 31 counts, no sort. among: mask words of the entries that count, of a single row.
    """

    def settle_bit(i, found):
        trial = found | (jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        return jnp.where(_count_rows(bits >= trial[..., None], among) >= k, trial, found)

    return lax.fori_loop(0, 31, settle_bit, jnp.zeros_like(bits[..., 0]))


def _count_rows(mask, among):
    if mask.ndim == 1:  # XLA's CPU backend is slow at long reductions to a scalar, fast at those of rows of 32
        return jnp.sum(count_bits(_of(among, pack_mask(mask))))
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _of(among, words):
    return words if among is None else words & among


def kth_magnitude(x, k, filled=None, among=None):
    """Bits of the k-th largest magnitude of x, exactly. float32[n]; k int or int32, from 1 to n.

    filled: no more entries than this are not zero, where that is known; only these are searched.  among: mask words of
    the entries that count. A masked copy of x would be an array of gradient length more. Without `filled` a sample
    gives a bracket that nearly always holds the wanted number; one pass counts what lies above and gathers what lies
    inside, and the search goes on among these few. Where the bracket misses, or ties fill it, all entries are searched.
    With fewer than k entries to select, the bits of the smallest normal number come back.
    """
    bits, size = magnitude_bits(x), len(x)
    if filled is not None and filled < size:
        lined_up = queue(pack_mask(bits > 0), jnp.int32(0))
        slot = jnp.arange(filled, dtype=jnp.int32)
        bits = jnp.where(slot < lined_up.total, bits[indices(lined_up, filled)], 0)
        return jnp.maximum(kth_largest(bits, jnp.int32(k)), _TINY_BITS)
    if size <= 2 * SAMPLE:
        return jnp.maximum(kth_largest(bits, jnp.int32(k), among), _TINY_BITS)
    place = scatter_positions(size, SAMPLE, 0)
    sample = bits[place]
    if among is not None:
        sample = jnp.where(among[place // LANES] >> (place % LANES).astype(jnp.uint32) & 1 > 0, sample, 0)
    rank = k * (SAMPLE / size)
    slack = 4 * rank**0.5 + 8
    ranks = jnp.clip(jnp.array([rank - slack, rank + slack]), 1, SAMPLE).astype(jnp.int32)
    high, low = kth_largest(jnp.broadcast_to(sample, (2, SAMPLE)), ranks)
    high = jnp.where(rank - slack < 1, _TOP_BITS, high)
    low = jnp.maximum(jnp.where(rank + slack > SAMPLE, 0, low), _TINY_BITS)
    above, inside = (_of(among, words) for words in _pack_two(bits > high, (bits >= low) & (bits <= high)))
    count_above, lined_up = jnp.sum(count_bits(above)), queue(inside, jnp.int32(0))
    room = min(size // 32, round(3 * slack * size / SAMPLE)) if isinstance(k, int) else size // 32
    found = (count_above < k) & (k <= count_above + lined_up.total) & (lined_up.total <= room)
    too_few = (low == _TINY_BITS) & (count_above + lined_up.total < k)

    def among_these(x, lined_up):
        slot = jnp.arange(room, dtype=jnp.int32)
        inside = jnp.where(slot < lined_up.total, magnitude_bits(x[indices(lined_up, room)]), 0)
        return jnp.where(too_few, _TINY_BITS, kth_largest(inside, k - count_above))

    def among_all(x, lined_up):
        del lined_up
        return jnp.maximum(kth_largest(magnitude_bits(x), jnp.int32(k), among), _TINY_BITS)

    return lax.cond(found | too_few, among_these, among_all, x, lined_up)


def _pack_two(a, b):
    """Two masks as words, in one pass over what they are made of."""
    lanes = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)

    def merge(x, y):
        return x[0] | y[0], x[1] | y[1]

    def pack(a, b):
        zero = jnp.uint32(0)
        return lax.reduce((jnp.where(a, lanes, zero), jnp.where(b, lanes, zero)), (zero, zero), merge, (1,))

    return by_rows(pack, a, b)


def top_k_words(x, k, filled=None, among=None):
    """Mask words of the k entries of largest magnitude, of equal ones those with the lowest index.

    float32[n]; k int or int32 from 1 to n. Fewer are set only where fewer are not zero. filled, among: as in
    `kth_magnitude`.
    """
    threshold = kth_magnitude(x, k, filled, among)
    bits = magnitude_bits(x)
    above, equal = (_of(among, words) for words in _pack_two(bits > threshold, bits == threshold))
    room = k - jnp.sum(count_bits(above))
    return above | lax.cond(jnp.sum(count_bits(equal)) == room, lambda words, _: words, _lowest, equal, room)


def at_most(limit: int, x, words):
    """`words`, a mask of entries of x, or where more than `limit` are set those of the largest magnitude.

    What waits grows until it is among them, so nothing starves. (By turns instead, one region of the parameters after
    the other, early training went wrong: README, "Does it train?".)
    """

    def largest(x, words):
        return top_k_words(x, limit, among=words)

    return lax.cond(jnp.sum(count_bits(words)) > limit, largest, lambda x, words: words, x, words)


def _lowest(words, count):
    """The words with only their first `count` set bits, counted over all words."""
    here = count_bits(words)
    room = jnp.clip(count - (prefix_count(words) - here), 0, here)  # bits that this word may keep
    stop = nth_set_bit(words, jnp.minimum(room, jnp.maximum(here - 1, 0)))
    return jnp.where(room == here, words, words & ((jnp.uint32(1) << stop.astype(jnp.uint32)) - 1))


def sampled(x, groups: Groups, count: int, step):
    """Up to `count` entries of each group (all of a smaller one): float32[groups, count], 0 where there are none.

    They stand one in each of `count` equal stretches, at a place that changes with `step` (int32) by a hash. Not for
    groups of several leaves, which have padding inside.
    """
    width = min(count, max(groups.sizes))
    begins = np.asarray([begin * 32 for begin, _ in groups.ranges], np.int32)[:, None]
    sizes = np.asarray(groups.sizes, np.int32)[:, None]
    # The last group may hold padding words between its end and the bucket's, but no parameters.
    position = jnp.stack([scatter_positions(size, width, step) for size in groups.sizes])
    taken = x[jnp.minimum(begins + position, len(x) - 1)]
    return jnp.where(np.arange(width) < sizes, taken, 0)


def quantile_threshold(samples, count, density):
    """The magnitude that a share `density` of each group exceeds or equals, by its sample.

    samples: float32[groups, m], of which `count` (int32[groups]) are real and the rest 0. Returns float32[groups].
    """
    k = jnp.clip(jnp.ceil(count * density), 1, samples.shape[-1]).astype(jnp.int32)
    return bits_float(jnp.maximum(kth_largest(magnitude_bits(samples), k), _TINY_BITS))
