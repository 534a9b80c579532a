"""From a mask to the indices of its set entries in a fixed number of slots.

No cumsum, sort or top_k of gradient length: the mask is packed into words of 32 entries, the words are counted, each
non-empty word writes its number where its first entry will go, and the largest number of the 32 slots up to its own
tells every slot its word.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gcjax._bits import LANES, count_bits, nth_set_bit, prefix_count


class Queue(NamedTuple):
    """The set entries of a mask in the order in which they get slots: by index, from word `first` on, wrapping round.

    words: uint32[m].  start: int32[m], slot of each word's first entry.  total: int32, set entries in all.
    first: int32.  Starting where the last step was cut, as owners' queues do, starves no entries.
    """

    words: jnp.ndarray
    start: jnp.ndarray
    total: jnp.ndarray
    first: jnp.ndarray

    @property
    def end(self):
        """Slot behind each word's last entry, int32[m]."""
        return self.start + count_bits(self.words)


def queue(words, first) -> Queue:
    """Line up the set entries of `words` (uint32[m], m a multiple of 32), beginning with word `first`."""
    before = prefix_count(words) - count_bits(words)
    total = before[-1] + count_bits(words[-1])
    start = before - before[first] + jnp.where(jnp.arange(len(words)) < first, total, 0)
    return Queue(words, start, total, first)


def cut(q: Queue, capacity: int):
    """What fits into `capacity` slots, in whole words so that no second pass over the entries is needed.

    Returns (words, first): the words that fit, the others 0; and where the next queue must begin, 0 if all fitted.
    `capacity` must be at least 32, or a full word would wait for ever.
    """
    fits = q.end <= capacity
    words = jnp.where(fits, q.words, jnp.uint32(0))
    resume = (q.first + jnp.sum(fits, dtype=jnp.int32)) % len(q.words)
    return words, jnp.where(q.total <= capacity, 0, resume)


def indices(q: Queue, capacity: int):
    """Entry number for each slot, int32[capacity]; slots beyond what `cut` lets through hold any valid number."""
    size = len(q.words)
    number = jnp.arange(size, dtype=jnp.int32) - q.first
    number = jnp.where(number < 0, number + size, number)
    takes_slot = (q.start < q.end) & (q.end <= capacity)
    slots = jnp.zeros(capacity, jnp.int32).at[jnp.where(takes_slot, q.start, capacity)].set(number, mode="drop")
    word = (_running_max(slots) + q.first) % size
    rank = jnp.arange(capacity, dtype=jnp.int32) - q.start[word]
    index = word * LANES + nth_set_bit(q.words[word], rank)
    # Changes nothing, but XLA computes a remainder by a number it does not know once, and the index in each use else.
    return index % jnp.maximum(q.total, size * LANES)


def _running_max(slots):
    """The largest of the 32 values up to each slot, int32[k], none negative: enough, as no word has more entries.

    Rounds that double the reach, in a loop so that XLA does not repeat them in each use; cummax, which reaches over all
    slots, took a fifth of the whole update at density 1/10.
    """

    def double(k, x):
        behind = lax.dynamic_slice(jnp.pad(x, (LANES // 2, 0)), (LANES // 2 - (1 << k),), x.shape)
        return jnp.maximum(x, behind)

    return lax.fori_loop(0, LANES.bit_length() - 1, double, slots)
