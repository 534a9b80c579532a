"""What an exchange remembers from one step to the next."""

import dataclasses

import jax
import jax.numpy as jnp

from gcjax._core.mixing import Mixing
from gcjax._core.owned import Owned
from gcjax._kernels.bits import LANES, WORD, blocks_for
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.hashing import quick_bits
from gcjax._types import Array

# Words are dealt to owners in rounds of one word each. A hash rotates the order of each round. So owners get equally
# many words, and no period in the model's layout can give one owner all the busy words.


def _rotation(turn: Array, workers: int) -> Array:
    return (quick_bits(jnp.uint32(0), turn) % workers).astype(jnp.int32)


def word_of(owner: Array, turn: Array, workers: int) -> Array:
    """Number of the word that `owner` gets in round `turn`, int32."""
    return turn * workers + (owner + _rotation(turn, workers)) % workers


def owner_of(word: Array, workers: int) -> tuple[Array, Array]:
    """The inverse of `word_of`: (owner, round)."""
    turn = word // workers
    return (word - _rotation(turn, workers)) % workers, turn


def rounds_for(words: int, workers: int) -> int:
    """Rounds in which so many words are dealt, in whole blocks."""
    return blocks_for(-(-words // workers)) * LANES


def _owned_shape(bucket: Bucket, workers: int) -> tuple[int, ...]:
    return rounds_for(bucket.size // WORD, workers) // LANES, WORD, LANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransportState:
    """State of the exchange of one worker and bucket.

    Attributes:
      owed: float32[own blocks, 32, 128]: of the words that this worker owns, in the order in which they were dealt,
        what it has received and not yet passed on, divided by the number of workers. None without owners.
      rank: int32, this worker's number in the last step.
      start_word: int32, the round at which owners start to assign slots.
      name: "all_gather", "two_phase" or "auto". Static.
    """

    owed: Owned
    rank: Array
    start_word: Array
    name: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, bucket: Bucket, name: str = "all_gather") -> "TransportState":
        """The state of one worker before the first step."""
        owed = Owned.create(bucket, None if name == "all_gather" else _owned_shape)
        return cls(owed, jnp.int32(0), jnp.int32(0), name)

    def residual(self) -> Array:
        """float32 of the bucket's shape: what this worker owes, times the number of workers."""
        bucket, workers, owed = self.owed.bucket, self.owed.workers, self.owed.value
        if owed is None:
            return jnp.zeros(bucket.shape)
        owner, turn = owner_of(jnp.arange(bucket.size // WORD), workers)
        words = jnp.where(owner == self.rank, owed[turn // LANES, :, turn % LANES].T, 0)
        return workers * words.reshape(WORD, -1, LANES).swapaxes(0, 1)

    def mixed(self, mixing: Mixing) -> tuple["TransportState", Array]:
        """The new workers' state, in which what is owed is dealt anew; and of that what no owner holds any more."""
        owed = jnp.mean(jax.vmap(TransportState.residual)(self), axis=0)
        new = Owned.create(self.owed.bucket, self.owed.shape_for, mixing.new)
        state = TransportState(new, mixing.ranks(), mixing.zeros(self.start_word), self.name)
        if new.value is None:
            return state, owed
        words = owed.swapaxes(0, 1).reshape(WORD, -1)
        turns = rounds_for(words.shape[1], mixing.new)
        words = jnp.pad(words, ((0, 0), (0, mixing.new * turns - words.shape[1])))
        dealt = words[:, word_of(jnp.arange(mixing.new)[:, None], jnp.arange(turns), mixing.new)]
        value = dealt.reshape(WORD, mixing.new, -1, LANES).transpose(1, 2, 0, 3)
        return dataclasses.replace(state, owed=new.with_value(value)), jnp.zeros_like(owed)

    def kept_unless(self, all_finite: Array, old: "TransportState") -> "TransportState":
        """This state; the old one after a step that is skipped."""
        return jax.tree.map(lambda new, before: jnp.where(all_finite, new, before), self, old)
