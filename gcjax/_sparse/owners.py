"""Owners of the words of a mask: who adds up which entries where a sparse exchange takes two phases.

Words are dealt to owners in rounds of one word each. A hash rotates the order of each round. So owners get equally many
words, and no period in the model's layout can give one owner all the busy words.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._core.mixing import Mixing
from gcjax._core.owned import Owned
from gcjax._kernels.bits import LANES, WORD, blocks_for, count_bits
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.hashing import quick_bits
from gcjax._sparse.compaction import truncate
from gcjax._types import Array


def _rotation(turn: Array, workers: int) -> Array:
    return (quick_bits(jnp.uint32(0), turn) % workers).astype(jnp.int32)


def word_of(owner: Array | int, turn: Array, workers: int) -> Array:
    """Number of the word that `owner` gets in round `turn`, int32."""
    return turn * workers + (owner + _rotation(turn, workers)) % workers


def owner_of(word: Array, workers: int) -> tuple[Array, Array]:
    """The inverse of `word_of`: (owner, round)."""
    turn = word // workers
    return (word - _rotation(turn, workers)) % workers, turn


def place_of(owner: Array | int, own: Array, workers: int) -> Array:
    """Place in the bucket, int32, of an entry given by its owner and its place among the owner's entries."""
    return word_of(owner, own // WORD, workers) * WORD + own % WORD


def rounds_for(words: int, workers: int) -> int:
    """Rounds in which so many words are dealt, in whole blocks."""
    return blocks_for(-(-words // workers)) * LANES


def deal_words(words: Array, workers: int) -> Array:
    """[..., words] -> [..., workers, rounds]: the words of every owner, zeros behind the last."""
    size = words.shape[-1]
    rounds = rounds_for(size, workers)
    padding = [(0, 0)] * (words.ndim - 1) + [(0, workers * rounds - size)]
    order = word_of(jnp.arange(workers)[:, None], jnp.arange(rounds), workers)
    return jnp.pad(words, padding)[..., order]


def collect_words(dealt: Array, size: int) -> Array:
    """The inverse of `deal_words`, [..., workers, rounds] -> [..., size]."""
    owner, turn = owner_of(jnp.arange(size), dealt.shape[-2])
    return dealt[..., owner, turn]


def fitting(dealt: Array, slots: int, start_word: Array) -> tuple[Array, Array]:
    """What fits into the slots of every owner's message; entries without a slot wait, round-robin.

    Args:
      dealt: uint32[workers, rounds], masks of the entries to send.
      slots: of one message, at least 32.
      start_word: int32, the round to begin with.

    Returns:
      The masks with only the entries that fit; and the round to begin with in the next step.
    """
    count, rounds = jnp.sum(count_bits(dealt), axis=1), dealt.shape[1]

    def cut(dealt: Array, start_word: Array) -> tuple[Array, Array]:
        fit, resume = jax.vmap(lambda words: truncate(words, start_word, slots))(dealt)
        # All owners start at the same round: the next step at the first one that some owner did not reach.
        reached = jnp.where(count > slots, (resume - start_word) % rounds, rounds)
        return fit, (start_word + jnp.min(reached)) % rounds

    return lax.cond(jnp.max(count) > slots, cut, lambda dealt, start_word: (dealt, start_word * 0), dealt, start_word)


@dataclasses.dataclass(frozen=True)
class DealtWords:
    """The `Sharing` of mask words. A part has the shape [own blocks, 32, 128], with words in the order of dealing."""

    def shape(self, bucket: Bucket, workers: int) -> tuple[int, ...]:
        return rounds_for(bucket.size // WORD, workers) // LANES, WORD, LANES

    def deal(self, x: Array, bucket: Bucket, workers: int) -> Array:
        dealt = deal_words(x.swapaxes(0, 1).reshape(WORD, -1), workers)
        return dealt.reshape(WORD, workers, -1, LANES).transpose(1, 2, 0, 3)

    def collect(self, parts: Array, bucket: Bucket) -> Array:
        dealt = parts.transpose(2, 0, 1, 3).reshape(WORD, len(parts), -1)
        return collect_words(dealt, bucket.size // WORD).reshape(WORD, -1, LANES).swapaxes(0, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransportState:
    """What a sparse exchange remembers from one step to the next, of one worker and bucket.

    Attributes:
      owned: what this worker keeps as an owner.
      start_word: int32, the round at which owners start to assign slots.
      name: "all_gather", "two_phase" or "auto". Static.
    """

    owned: Owned
    start_word: Array
    name: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, bucket: Bucket, name: str = "all_gather") -> "TransportState":
        """The state of one worker before the first step."""
        sharing = None if name == "all_gather" else DealtWords()
        return cls(Owned.create(bucket, sharing), jnp.int32(0), name)

    def residual(self) -> Array:
        """float32 of the bucket's shape: what this worker owes, times the number of workers."""
        return self.owned.residual()

    def mixed(self, mixing: Mixing) -> tuple["TransportState", Array]:
        """The new workers' state, and what no owner keeps of the debts: see `Owned.mixed`."""
        owned, left = self.owned.mixed(mixing)
        return TransportState(owned, mixing.zeros(self.start_word), self.name), left
