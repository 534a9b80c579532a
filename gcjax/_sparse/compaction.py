"""From a mask to the indices of its set entries, in a fixed number of slots.

No cumsum, sort or top_k of gradient length is used. The mask is packed into words of 32 entries and the words are
counted. Each non-empty word then writes its number into the slot of its first entry, and the largest number among the
32 slots up to its own tells every slot its word.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gcjax._jax_compat import vary_like
from gcjax._kernels.bits import WORD, count_bits, nth_set_bit, prefix_count
from gcjax._types import Array, ArrayLike
from gcjax._xla import entries_once


class Slots(NamedTuple):
    """Slots for the set entries of a mask, word by word.

    Attributes:
      words: uint32[m], the mask.
      first_slot: int32[m], slot of each word's first entry, ascending.
      total: int32, set entries in all.
    """

    words: Array
    first_slot: Array
    total: Array


def assign_slots(words: Array) -> Slots:
    """Assign slots to the set entries of `words`, uint32[m] with m a multiple of 128."""
    end = prefix_count(words)
    return Slots(words, end - count_bits(words), end[-1])


def truncate(words: Array, start_word: Array, capacity: int) -> tuple[Array, Array]:
    """The entries that fit into `capacity` slots, in whole words so that no second pass over the entries is needed.

    Starting where the last step had to stop starves no entries.

    Args:
      words: uint32[m], the mask, with m a multiple of 128.
      start_word: int32, the word to begin with, wrapping around.
      capacity: at least 32, or a full word would wait for ever.

    Returns:
      The words that fit, with the others 0; and the word with which the next step must begin, 0 if all fitted.
    """
    slots = assign_slots(_rotated(words, start_word))
    fits = slots.first_slot + count_bits(slots.words) <= capacity
    kept = _rotated(jnp.where(fits, slots.words, jnp.uint32(0)), (len(words) - start_word) % len(words))
    resume = (start_word + jnp.sum(fits, dtype=jnp.int32)) % len(words)
    return kept, jnp.where(slots.total <= capacity, 0, resume)


def _rotated(words: Array, start: Array) -> Array:
    return lax.dynamic_slice(jnp.concatenate([words, words]), (start,), words.shape)


def slot_indices(slots: Slots, capacity: int) -> Array:
    """The entry's index for each slot, int32[capacity]: 32 * word + bit.

    Slots beyond the last entry hold any valid number.
    """
    size = len(slots.words)
    # Empty words write to the slot of the next word that is not empty, which has a larger number.
    number = jnp.arange(size, dtype=jnp.int32)
    at_first = jnp.zeros(capacity, jnp.int32).at[slots.first_slot].max(number, mode="drop", indices_are_sorted=True)
    place = _running_max(at_first)
    rank = jnp.arange(capacity, dtype=jnp.int32) - slots.first_slot[place]
    return entries_once(_index, place, slots.words[place], rank)


def _index(place: Array, word: Array, rank: Array) -> Array:
    """Index of the `rank`-th entry of a word, of which `place` is the number."""
    return place * WORD + nth_set_bit(word, rank)


class Cursor(NamedTuple):
    """A place among the set bits of a row of words.

    Attributes:
      word: int32, number of the word with the next set bit, or of one before it without any left.
      passed: int32, set bits of that word that lie behind.
    """

    word: ArrayLike
    passed: ArrayLike


START = Cursor(0, 0)


def next_set_bits(words: Array, end: ArrayLike, cursor: Cursor, count: int, window: int) -> tuple[Array, Cursor]:
    """The places of the next `count` set bits: with it any number of them is read with arrays of one size.

    Words are looked at in windows, until all slots are filled or no word is left. As in `slot_indices`, each word
    writes its number into the slot of its first bit.

    Args:
      words: uint32[m], with `window` further words behind the last that counts.
      end: words that count.
      cursor: where to begin; `START`, or what the last call returned.
      count: slots to fill. Static.
      window: words looked at in a round, a multiple of 128. Static.

    Returns:
      int32[count], 32 * word + bit of each, ascending; any number in slots beyond the last set bit. And the cursor for
      the next call.
    """
    slot = jnp.arange(count, dtype=jnp.int32)

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        word, filled, _ = state
        return (filled < count) & (word < end)

    def look(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        word, filled, number_at = state
        number = word + jnp.arange(window, dtype=jnp.int32)
        seen = jnp.where(number < end, lax.dynamic_slice_in_dim(words, word, window), 0)
        stop = filled + prefix_count(seen)
        first = jnp.clip(stop - count_bits(seen), 0, count)
        number_at = number_at.at[first].max(number + 1, mode="drop", indices_are_sorted=True)
        return word + window, stop[-1], number_at

    word, passed = (jnp.asarray(x, jnp.int32) for x in cursor)
    start = (word, -passed, jnp.zeros(count, jnp.int32))
    _, _, number_at = lax.while_loop(unfinished, look, vary_like(start, (words, end, word)))
    first = _running_max(jnp.where(number_at > 0, slot, 0))  # of the slot's word
    place = jnp.maximum(number_at[first] - 1, 0)
    rank = slot - first + jnp.where(place == word, passed, 0)
    return entries_once(_index, place, words[place], rank), Cursor(place[-1], rank[-1] + 1)


def _running_max(x: Array) -> Array:
    """The largest of the 32 values up to each slot, int32[k], none negative: enough, as no word has more entries.

    Rounds that double the reach, in a loop so that XLA does not repeat them in each use. cummax, which reaches over all
    slots, took a fifth of the whole update at density 1/10.
    """

    def double(k: Array, x: Array) -> Array:
        behind = lax.dynamic_slice(jnp.pad(x, (WORD // 2, 0)), (WORD // 2 - (1 << k),), x.shape)
        return jnp.maximum(x, behind)

    return lax.fori_loop(0, WORD.bit_length() - 1, double, x)
