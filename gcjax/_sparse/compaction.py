"""From a mask to the indices of its set entries, in a fixed number of slots.

No cumsum, sort or top_k of gradient length is used. The mask is packed into words of 32 entries and the words are
counted. Each non-empty word then writes its number into the slot of its first entry, and the largest number among the
32 slots up to its own tells every slot its word.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.bits import LANES, count_bits, nth_set_bit, prefix_count
from gcjax._types import Array


class Slots(NamedTuple):
    """Slots for the set entries of a mask: in order of index, from word `start_word` on, wrapping around.

    Starting where the last step had to stop, as owners do, starves no entries.

    Attributes:
      words: uint32[m], the mask.
      first_slot: int32[m], slot of each word's first entry.
      total: int32, set entries in all.
      start_word: int32.
    """

    words: Array
    first_slot: Array
    total: Array
    start_word: Array

    @property
    def end(self) -> Array:
        """The slot behind each word's last entry, int32[m]."""
        return self.first_slot + count_bits(self.words)


def assign_slots(words: Array, start_word: Array) -> Slots:
    """Assign slots to the set entries of `words` (uint32[m], m a multiple of 32), beginning with word `start_word`."""
    before = prefix_count(words) - count_bits(words)
    total = before[-1] + count_bits(words[-1])
    first_slot = before - before[start_word] + jnp.where(jnp.arange(len(words)) < start_word, total, 0)
    return Slots(words, first_slot, total, start_word)


def truncate(slots: Slots, capacity: int) -> tuple[Array, Array]:
    """The entries that fit into `capacity` slots, in whole words so that no second pass over the entries is needed.

    Args:
      slots: the slots wanted.
      capacity: at least 32, or a full word would wait for ever.

    Returns:
      The words that fit, with the others 0; and the word with which the next step must begin, 0 if all fitted.
    """
    fits = slots.end <= capacity
    words = jnp.where(fits, slots.words, jnp.uint32(0))
    resume = (slots.start_word + jnp.sum(fits, dtype=jnp.int32)) % len(slots.words)
    return words, jnp.where(slots.total <= capacity, 0, resume)


def slot_indices(slots: Slots, capacity: int) -> Array:
    """Entry number for each slot, int32[capacity]; slots beyond what `truncate` keeps hold any valid number."""
    size = len(slots.words)
    number = jnp.arange(size, dtype=jnp.int32) - slots.start_word
    number = jnp.where(number < 0, number + size, number)
    takes_slot = (slots.first_slot < slots.end) & (slots.end <= capacity)
    position = jnp.where(takes_slot, slots.first_slot, capacity)
    word_at = jnp.zeros(capacity, jnp.int32).at[position].set(number, mode="drop")
    word = (_running_max(word_at) + slots.start_word) % size
    rank = jnp.arange(capacity, dtype=jnp.int32) - slots.first_slot[word]
    index = word * LANES + nth_set_bit(slots.words[word], rank)
    # The remainder changes nothing. XLA computes a remainder by an unknown number once; otherwise it would compute the
    # index again in each use.
    return index % jnp.maximum(slots.total, size * LANES)


def _running_max(x: Array) -> Array:
    """The largest of the 32 values up to each slot, int32[k], none negative: enough, as no word has more entries.

    Rounds that double the reach, in a loop so that XLA does not repeat them in each use. cummax, which reaches over all
    slots, took a fifth of the whole update at density 1/10.
    """

    def double(k, x):
        behind = lax.dynamic_slice(jnp.pad(x, (LANES // 2, 0)), (LANES // 2 - (1 << k),), x.shape)
        return jnp.maximum(x, behind)

    return lax.fori_loop(0, LANES.bit_length() - 1, double, x)
