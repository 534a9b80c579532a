"""The transport "reduce_scatter" of the sparse exchange, whose traffic does not grow with the number of workers.

Every mask word has an owner among the workers. All send it their entries of that word; it adds them up and sends the
largest of its sums, as many as one worker may send it, to all. What it does not pass on comes back to it, for its own
residual. So a worker moves less than three payloads of the same capacity (four where an entry takes two words), as
long as the capacity is above 32 entries for each worker. Of more entries than that the largest are sent; of those the
ones that one owner has no slots for wait, by turns.

**Source**: Renggli et al., "SparCML", SC 2019, arXiv 1802.08021, split and all-gather; Li and Hoefler, "Near-Optimal
Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022, arXiv 2201.07598, selecting again at the owners.
**Deviation**: owners are dealt words by a hash; Ok-Topk gives them regions, which it balances anew as training goes on.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._bits import LANES, count_bits, pack_mask, unpack_mask, words_for
from gcjax._codec import float_code
from gcjax._compact import cut, indices, queue
from gcjax._payload import Exchanged, Header, Returned, add_payloads, agree_on_rung
from gcjax._random import quick_bits
from gcjax._select import at_most, top_k_words
from gcjax._types import Comm, Sent

SUMS = float_code(32)  # owners send what they have added up without rounding it


def slots_of_owner(capacity: int, workers: int) -> int:
    return max(-(-capacity // workers), LANES)  # a full word must fit


# Words are dealt out in rounds of one to each worker, in an order that a hash turns round by round: owners get equal
# numbers, and no period of the model's layout can give one of them all the busy words.


def _turn(dealt_in, workers: int):
    return (quick_bits(jnp.uint32(0), dealt_in) % workers).astype(jnp.int32)


def _word_of(owner, dealt_in, workers: int):
    """Number of the word that `owner` gets in round `dealt_in`, int32."""
    return dealt_in * workers + (owner + _turn(dealt_in, workers)) % workers


def _owner_of(word, workers: int):
    """The inverse of `_word_of`: (owner, round)."""
    dealt_in = word // workers
    return (word - _turn(dealt_in, workers)) % workers, dealt_in


def _entry_of(owner, at_owner, workers: int):
    """Place in the bucket of an entry, from its owner and its place among that one's entries, int32."""
    return _word_of(owner, at_owner // LANES, workers) * LANES + at_owner % LANES


def through_owners(x, words, first, header: Header, capacities, comm: Comm, ok, key) -> Exchanged:
    """`_sparse.exchange` by this transport; `first` counts rounds, and the capacity reported is that of all owners."""
    size, workers = len(words), comm.size
    slots_of = sorted({slots_of_owner(capacity, workers) for capacity in capacities})
    selected, words = jnp.sum(count_bits(words)), at_most(slots_of[-1] * workers, x, words)
    rounds = words_for(-(-size // workers) * LANES)
    owner, dealt_in = jnp.arange(workers)[:, None], jnp.arange(rounds)
    dealt = jnp.pad(words, (0, rounds * workers - size))[_word_of(owner, dealt_in, workers)]
    lined_up = jax.vmap(queue, (0, None))(dealt, first)
    cut_to, resume = jax.vmap(lambda q: cut(q, slots_of[-1]))(lined_up)
    count = jnp.sum(count_bits(cut_to), axis=1)
    rung, fill = agree_on_rung(jnp.max(count), slots_of, comm, ok)

    def at_slots(slots):
        def run(x, lined_up, count, fill):
            metered = comm.metered()
            body = _bodies(x, lined_up, header, slots, key)
            count = jnp.where(fill == 0, count, 0).astype(jnp.uint32)[:, None]
            packed = jnp.broadcast_to(header.packed(), (workers, header.words()))
            arrived = metered.swap(jnp.concatenate([count, packed, body], axis=1))

            def at_owner(index):
                return _owner_of(index // LANES, workers)[1] * LANES + index % LANES

            nothing = (arrived[0, 0] & 0).astype(jnp.float32)  # typed as different on each worker, as the sums will be
            sums = add_payloads(arrived, jnp.full(rounds * LANES, nothing), header, slots, at_owner)
            # What arrives is few against the owner's part, and much of it equal: coded values are.
            passed = top_k_words(sums, slots, filled=slots * workers)
            mean, passed_on = _share(sums, passed, jnp.full(len(x), fill), slots, metered)
            kept = jnp.where(unpack_mask(passed, len(sums)), 0, workers * sums)
            return mean, kept, passed_on, jnp.int32(slots * workers), jnp.float32(metered.bytes_moved())

        return run

    branches = [at_slots(slots) for slots in slots_of]
    mean, kept, passed_on, capacity, wire_bytes = lax.switch(rung, branches, x, lined_up, count, fill)
    # All queues begin at the same round: the next at the first one that some owner's did not reach.
    reached = jnp.where(lined_up.total > count, (resume - first) % rounds, rounds)
    resume = jnp.where(jnp.all(lined_up.total == count), 0, (first + jnp.min(reached)) % rounds)
    sent = jnp.sum(count)
    bits = workers * header.bits() + header.code.entry_bits * sent + 32 + SUMS.entry_bits * passed_on
    report = Sent(selected, sent, jnp.int32(0), selected - sent, capacity, wire_bytes, bits.astype(jnp.float32))
    back = _listed(kept, slots_of[-1], len(x), comm)
    return Exchanged(mean, cut_to[_owner_of(jnp.arange(size), workers)], resume, report, back)


def _bodies(x, lined_up, header: Header, slots: int, key):
    """Every owner's entries, coded: uint32[workers, m]."""
    workers = len(lined_up.words)
    keys = None if key is None else jax.random.split(key, workers)

    def body(owner, lined_up, key):
        index = _entry_of(owner, indices(lined_up, slots), workers)
        return header.code.encode(x[index], index, header.of(index), key)

    return jax.vmap(body)(jnp.arange(workers), lined_up, keys)


def _share(sums, passed, mean, slots: int, comm: Comm):
    """Every owner's chosen sums, exactly, in their places of `mean` on all workers; and how many this one chose."""
    size = len(mean)
    lined_up = queue(passed, jnp.int32(0))
    index = indices(lined_up, slots)
    body = SUMS.encode(sums[index], index, None, None)
    payloads = comm.gather(jnp.concatenate([lined_up.total.astype(jnp.uint32)[None], body]))

    def spread(owner, payload):
        at_owner, y = SUMS.decode(payload[1:], lambda index: None)
        return _entry_of(owner, at_owner, comm.size), y

    index, y = jax.vmap(spread)(jnp.arange(comm.size), payloads)
    slot = jnp.arange(slots, dtype=jnp.int32)
    padding = size + slot + slots * jnp.arange(comm.size, dtype=jnp.int32)[:, None]
    index = jnp.where(slot < payloads[:, :1].astype(jnp.int32), index, padding)
    mean = mean.at[index.reshape(-1)].add(y.reshape(-1), mode="drop", unique_indices=True)
    return mean, lined_up.total


def _listed(kept, slots: int, size: int, comm: Comm) -> Returned:
    """The sums that stay, with their places in the bucket; there are no more of them than entries that may arrive."""
    room = slots * comm.size
    lined_up = queue(pack_mask(kept != 0), jnp.int32(0))
    at_owner = indices(lined_up, room)
    index = _entry_of(comm.rank(), at_owner, comm.size)
    slot = jnp.arange(room, dtype=jnp.int32)
    return Returned(jnp.where(slot < lined_up.total, index, size + slot), kept[at_owner])


def take_back(returned: Returned | None, reset, held: tuple, left: Callable):
    """Add what came back to the state of a method that resets sent entries at the start of its next update.

    reset: uint32[n / 32], mask of the entries still to be reset.  held: float32[n] each, the accumulated gradient
    first.  left(word, *x): what the reset leaves of entries x, float32[m] of each of `held`, in mask words int32[m].
    Returns (reset, held), in which the entries concerned are reset already and hold what came back on top of that.
    """
    if returned is None:
        return reset, held
    index, values = returned
    word, bit = index // LANES, jnp.uint32(1) << (index % LANES).astype(jnp.uint32)
    waiting = reset[word] & bit
    entries = [x[index] for x in held]
    settled = [jnp.where(waiting > 0, rest, x) for rest, x in zip(left(word, *entries), entries, strict=True)]
    settled[0] = settled[0] + values
    held = tuple(x.at[index].set(y, mode="drop", unique_indices=True) for x, y in zip(held, settled, strict=True))
    return reset.at[word].add(-waiting, mode="drop"), held  # every bit is taken off once
