"""The transport "reduce_scatter" of the sparse exchange, whose traffic does not grow with the number of workers.

Every mask word has an owner among the workers. All workers send the owner their entries of that word. The owner adds
them up and sends the largest of its sums to all, as many as one worker may send it. Sums that it does not pass on are
returned to it, for its own residual. A worker so moves less than three payloads of the same capacity (four where an
entry takes two words), as long as the capacity is above 32 entries per worker. On overflow the largest entries are
kept. Entries for which their owner has no slot wait, round-robin.

**Source**: Renggli et al., "SparCML", SC 2019, arXiv 1802.08021, split and all-gather; Li and Hoefler, "Near-Optimal
Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022, arXiv 2201.07598, for selecting at the owners.
**Deviation**: a hash assigns words to owners. Ok-Topk gives owners regions and rebalances them during training.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import LANES, WORD, blocks_for, count_bits, pack_mask, position_of, unpack_mask
from gcjax._kernels.hashing import quick_bits
from gcjax._sparse.compaction import Slots, assign_slots, slot_indices, truncate
from gcjax._sparse.message import Exchanged, Header, Message, Returned, add_messages, choose_capacity
from gcjax._sparse.selection import keep_largest, top_k_mask
from gcjax._sparse.value_codes import float_code
from gcjax._types import Array

SUM_CODE = float_code(32)  # owners send their sums without rounding


def slots_per_owner(capacity: int, workers: int) -> int:
    return max(-(-capacity // workers), WORD)  # a full word must fit


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


def _index_of(owner: Array, at_owner: Array, workers: int) -> Array:
    """Index in the bucket, int32, of an entry given by its owner and its index among the owner's entries."""
    return word_of(owner, at_owner // WORD, workers) * WORD + at_owner % WORD


def reduce_scatter_exchange(message: Message, start_word: Array, comm: Comm, all_finite: Array) -> Exchanged:
    """`exchange` by this transport; `start_word` counts rounds. The capacity reported is that of all owners."""
    header, x = message.header(), message.values
    size, workers = len(message.mask), comm.size
    slots_of = tuple(sorted({slots_per_owner(capacity, workers) for capacity in message.capacities}))
    selected = jnp.sum(count_bits(message.mask))
    words = keep_largest(slots_of[-1] * workers, x, message.mask)
    rounds = blocks_for(-(-size // workers)) * LANES
    owner, turn = jnp.arange(workers)[:, None], jnp.arange(rounds)
    dealt = jnp.pad(words, (0, rounds * workers - size))[word_of(owner, turn, workers)]
    wanted = jax.vmap(assign_slots, (0, None))(dealt, start_word)
    sent_words, resume = jax.vmap(lambda slots: truncate(slots, slots_of[-1]))(wanted)
    count = jnp.sum(count_bits(sent_words), axis=1)
    which, fill = choose_capacity(jnp.max(count), slots_of, comm, all_finite)

    def at_slots(slots):
        def run(x, wanted, count, fill):
            metered = comm.metered()
            body = _bodies(x, wanted, header, slots, message.key)
            count = jnp.where(fill == 0, count, 0).astype(jnp.uint32)[:, None]
            packed = jnp.broadcast_to(header.packed(), (workers, header.words))
            arrived = metered.all_to_all(jnp.concatenate([count, packed, body], axis=1))

            def at_owner(index):
                return position_of(owner_of(index // WORD, workers)[1] * WORD + index % WORD)

            nothing = (arrived[0, 0] & 0).astype(jnp.float32)  # typed as varying between workers, like the sums
            sums = add_messages(arrived, jnp.full(rounds * WORD, nothing), header, slots, at_owner)
            sums = sums.reshape(-1, WORD, LANES)
            # Few entries arrive compared with the owner's part. Ties are common because values are quantised.
            passed = top_k_mask(sums, slots, max_nonzero=slots * workers)
            mean, passed_on = _gather_sums(sums, passed, jnp.full(message.bucket.span, fill), slots, metered)
            left = jnp.where(unpack_mask(passed), 0, workers * sums)
            return mean, left, passed_on, jnp.int32(slots * workers), jnp.float32(metered.bytes_moved())

        return run

    branches = [at_slots(slots) for slots in slots_of]
    mean, left, passed_on, capacity, wire_bytes = lax.switch(which, branches, x, wanted, count, fill)
    # All owners start at the same round: the next step at the first one that some owner did not reach.
    reached = jnp.where(wanted.total > count, (resume - start_word) % rounds, rounds)
    resume = jnp.where(jnp.all(wanted.total == count), 0, (start_word + jnp.min(reached)) % rounds)
    sent = jnp.sum(count)
    bits = workers * header.bits + header.code.entry_bits * sent + 32 + SUM_CODE.entry_bits * passed_on
    report = SendReport(selected, sent, jnp.int32(0), selected - sent, capacity, wire_bytes, bits.astype(jnp.float32))
    returned = _returned(left, slots_of[-1], message.bucket.size, comm)
    sent_mask = sent_words[owner_of(jnp.arange(size), workers)]
    return Exchanged(message.bucket.split(mean), sent_mask, resume, report, returned)


def _bodies(x: Array, wanted: Slots, header: Header, slots: int, key: Array | None) -> Array:
    """The coded entries for each owner: uint32[workers, m]."""
    workers = len(wanted.words)
    keys = None if key is None else jax.random.split(key, workers)

    def body(owner, wanted, key):
        index = _index_of(owner, slot_indices(wanted, slots), workers)
        return header.code.encode(x.reshape(-1)[position_of(index)], index, header.scale_at(index), key)

    return jax.vmap(body)(jnp.arange(workers), wanted, keys)


def _gather_sums(sums: Array, passed: Array, mean: Array, slots: int, comm: Comm) -> tuple[Array, Array]:
    """Every owner's chosen sums, unrounded, added to `mean` on all workers; and how many this owner chose."""
    size = len(mean)
    chosen = assign_slots(passed)
    index = slot_indices(chosen, slots)
    body = SUM_CODE.encode(sums.reshape(-1)[position_of(index)], index, None, None)
    payloads = comm.gather(jnp.concatenate([chosen.total.astype(jnp.uint32)[None], body]))

    def decode(owner, payload):
        at_owner, y = SUM_CODE.decode(payload[1:], lambda index: None)
        return _index_of(owner, at_owner, comm.size), y

    index, y = jax.vmap(decode)(jnp.arange(comm.size), payloads)
    slot = jnp.arange(slots, dtype=jnp.int32)
    padding = size + slot + slots * jnp.arange(comm.size, dtype=jnp.int32)[:, None]
    place = jnp.where(slot < payloads[:, :1].astype(jnp.int32), position_of(index), padding)
    mean = mean.at[place.reshape(-1)].add(y.reshape(-1), mode="drop", unique_indices=True)
    return mean, chosen.total


def _returned(left: Array, slots: int, size: int, comm: Comm) -> Returned:
    """The sums that this owner did not pass on. There are no more of them than entries that may arrive."""
    room = slots * comm.size
    wanted = assign_slots(pack_mask(left != 0))
    at_owner = slot_indices(wanted, room)
    index = _index_of(comm.rank(), at_owner, comm.size)
    slot = jnp.arange(room, dtype=jnp.int32)
    return Returned(jnp.where(slot < wanted.total, index, size + slot), left.reshape(-1)[position_of(at_owner)])
