"""The transport "two_phase" of the sparse exchange, whose traffic does not grow with the number of workers.

Every mask word has an owner among the workers. In the first phase all workers send each owner their entries of its
words. The owner adds up what arrives and what it still owes. In the second phase it sends the result to all: as a
sparse message, or as the codes of all its entries where that is shorter. Rounding errors, and what exceeds
`owner_density`, it owes: they join the next result.

Owners send values of 4 bits in the paper's code, and float16 and float32 values as they are. Where nothing bounds them,
they send the entries of which something arrived; a rounding error waits for the next arrival, or for codes of all
entries. On overflow in the first phase the largest entries are kept, and entries for which their owner has no slot
wait, round-robin.

**Source**: Renggli et al., "SparCML", SC 2019, arXiv 1802.08021, split and all-gather; Li and Hoefler, "Near-Optimal
Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022, arXiv 2201.07598; Tang et al., "DoubleSqueeze",
ICML 2019, arXiv 1905.05957, for error feedback in both phases. **Deviation**: a hash assigns words to owners. Ok-Topk
gives owners regions and rebalances them during training.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import (
    LANES,
    WORD,
    count_bits,
    pack_mask,
    pack_planes,
    position_of,
    reduce_rows,
    unpack_mask,
    unpack_planes,
)
from gcjax._kernels.floats import magnitude_bits
from gcjax._sparse.capacities import in_groups, ladder
from gcjax._sparse.compaction import truncate
from gcjax._sparse.message import Exchanged, Header, Message, add_messages, choose_capacity, move, start_of_mean
from gcjax._sparse.selection import keep_largest
from gcjax._sparse.transport import TransportState, owner_of, rounds_for, word_of
from gcjax._sparse.value_codes import ValueCode, power_of_two_code
from gcjax._sparse.wire import Wire, entropy_bits
from gcjax._types import Array


class TwoPhase(NamedTuple):
    """What both phases move, known when the step is traced.

    Attributes:
      workers: number of workers.
      words: words that each owns.
      rounds: the same in whole blocks.
      to_owners: entries for one owner.
      from_owners: an owner's entries in the second phase.
      code: its values.
      has_dense: whether it may send the codes of all its entries instead.
      bounded: whether `owner_density` bounds its entries.
    """

    workers: int
    words: int
    rounds: int
    to_owners: Wire
    from_owners: Wire
    code: ValueCode
    has_dense: bool
    bounded: bool

    @classmethod
    def create(cls, message: Message, workers: int) -> "TwoPhase":
        words, rounds = -(-message.bucket.words // workers), rounds_for(len(message.mask), workers)
        slots = tuple(_slots_per_owner(capacity, workers) for capacity in message.capacities)
        to_owners = Wire(message.wire, message.code.bits, WORD * words, in_groups(slots))
        as_it_is = message.code.bits >= 16 and message.code.scale_sets == 1
        code = message.code if as_it_is else power_of_two_code(has_zero=True)
        most, bounded = min(workers * to_owners.capacities[-1], WORD * words), message.owner_density is not None
        if message.owner_density is not None:
            most = max(min(most, math.ceil(message.owner_density * message.bucket.entries / workers)), WORD)
        sizes = in_groups(ladder(min(to_owners.capacities[0], most), most))
        if bounded and len(slots) == 1:  # both phases are of a fixed size
            sizes = sizes[-1:]
        shorter = [k for k in sizes if Wire("compact", code.bits, WORD * words, sizes).words(k) < code.bits * words]
        has_dense = len(shorter) < len(sizes)
        from_owners = Wire("compact", code.bits, WORD * words, tuple(shorter) or sizes[:1])
        return cls(workers, words, rounds, to_owners, from_owners, code, has_dense, bounded and not has_dense)

    def place_of(self, owner: Array, own: Array) -> Array:
        """Place in the bucket, int32, of an entry given by its owner and its place among the owner's entries."""
        return word_of(owner, own // WORD, self.workers) * WORD + own % WORD

    def lengths_to_owners(self, header: Header) -> list[int]:
        """Words of a message to an owner, for each capacity."""
        return [header.words + self.to_owners.words(slots) for slots in self.to_owners.capacities]

    def lengths_from_owners(self, header: Header) -> list[int]:
        """Words of a message from an owner: for each capacity, then with the codes of all entries."""
        dense = [header.words + self.code.bits * self.words] if self.has_dense else []
        return [header.words + self.from_owners.words(slots) for slots in self.from_owners.capacities] + dense

    def header(self, message: Message) -> Header:
        """The header of the second phase, without scales."""
        leaves = len(message.bucket.segments)
        return message._replace(code=self.code, scales=jnp.zeros(leaves, jnp.uint32)).header()

    def most_words(self, message: Message) -> int:
        """Words that a worker sends each other worker, at most."""
        return max(self.lengths_to_owners(message.header())) + max(self.lengths_from_owners(self.header(message)))


def _slots_per_owner(capacity: int, workers: int) -> int:
    """An owner's share and three standard deviations, as words are dealt at random; room for one full word at least."""
    share = capacity / workers
    return max(math.ceil(share + 3 * math.sqrt(share)), WORD)


def two_phase_exchange(
    phases: TwoPhase, message: Message, transport: TransportState, owed: Array, comm: Comm, all_finite: Array
) -> Exchanged:
    """`exchange` by this transport; `owed` is that of `transport`. The capacity reported is that of all owners."""
    header, workers = message.header(), comm.size
    selected = jnp.sum(count_bits(message.mask))
    dealt, start_word = _fitting(phases, message, transport.start_word)
    count = jnp.sum(count_bits(dealt), axis=1)
    rung, fill = choose_capacity(jnp.max(count), phases.to_owners.capacities, comm, all_finite)
    going = jnp.where(fill == 0, count, 0)

    def message_to(owner):
        def code_at(own):
            place = phases.place_of(owner, own)
            return header.encode(message.values.reshape(-1)[position_of(place)], place)

        entries = phases.to_owners.write(dealt[owner], going[owner], code_at, rung)
        return jnp.concatenate([header.packed(going[owner]), entries])

    messages = lax.map(message_to, jnp.arange(workers))
    lengths = phases.lengths_to_owners(header)
    arrived, first_bytes = move(messages, lengths, rung, comm, lambda comm, x: comm.all_to_all(x))
    rank = comm.rank()

    def placed(sender, own):
        return phases.place_of(rank, own), own

    total = add_messages(arrived, owed.reshape(-1), header, phases.to_owners, rung, workers, placed).reshape(owed.shape)
    mean, passed_on, second = _from_owners(phases, message, total, total != owed, comm, all_finite)
    new = TransportState(
        owed=transport.owed.with_value(total - passed_on),
        rank=rank,
        start_word=start_word,
        name=transport.name,
    )
    sent, headers = jnp.sum(count), workers * header.bits
    least = entropy_bits(WORD * message.bucket.words, sent, message.code.bits)
    report = SendReport(
        selected=selected,
        sent=sent,
        underflow=jnp.int32(0),
        overflow=selected - sent,
        capacity=jnp.asarray(phases.to_owners.capacities, jnp.int32)[rung] * workers,
        wire_bytes=first_bytes + second.wire_bytes,
        payload_bits=headers + jnp.sum(jax.vmap(phases.to_owners.bits)(count)) + second.payload_bits,
        entropy_bits=headers + least + second.entropy_bits,
    )
    sent_mask = dealt[owner_of(jnp.arange(len(message.mask)), workers)]
    return Exchanged(message.bucket.split(mean), sent_mask, new.kept_unless(all_finite, transport), report)


def _fitting(phases: TwoPhase, message: Message, start_word: Array) -> tuple[Array, Array]:
    """The words with the entries that fit, by owner, uint32[workers, rounds]; and the round to start at next."""
    size, workers, rounds = len(message.mask), phases.workers, phases.rounds
    slots = phases.to_owners.capacities[-1]
    words = keep_largest(slots * workers, message.values, message.mask)
    owner, turn = jnp.arange(workers)[:, None], jnp.arange(rounds)
    dealt = jnp.pad(words, (0, rounds * workers - size))[word_of(owner, turn, workers)]

    def cut(dealt, start_word):
        fit, resume = jax.vmap(lambda words: truncate(words, start_word, slots))(dealt)
        # All owners start at the same round: the next step at the first one that some owner did not reach.
        reached = jnp.where(count > slots, (resume - start_word) % rounds, rounds)
        return fit, (start_word + jnp.min(reached)) % rounds

    count = jnp.sum(count_bits(dealt), axis=1)
    return lax.cond(jnp.max(count) > slots, cut, lambda dealt, start_word: (dealt, start_word * 0), dealt, start_word)


class _Second(NamedTuple):
    """What the report says of the second phase."""

    wire_bytes: Array
    payload_bits: Array
    entropy_bits: Array


def _from_owners(
    phases: TwoPhase, message: Message, total: Array, changed: Array, comm: Comm, all_finite: Array
) -> tuple[Array, Array, _Second]:
    """The second phase.

    Args:
      phases, message, comm, all_finite: as for `two_phase_exchange`.
      total: float32[own blocks, 32, 128], what this owner has for all.
      changed: bool of that shape, of which entries something has arrived.

    Returns:
      The mean, flattened blocks of the bucket; what this owner has passed on, like `total`; and the report.
    """
    code, wire, rank = phases.code, phases.from_owners, comm.rank()
    header = phases.header(message)
    scale_at = jnp.zeros((1, 1, 1), jnp.uint32)
    if code.scale_bits:
        word = jnp.minimum(word_of(rank, jnp.arange(phases.rounds), phases.workers), len(message.mask) - 1)
        leaf = jnp.asarray(message.bucket.leaf_of_word())[word]
        (peak,) = reduce_rows((lax.max, magnitude_bits(total)))
        peaks = jax.ops.segment_max(peak, leaf, len(header.scales), indices_are_sorted=True)
        header = header._replace(scales=code.to_scale(peaks))
        scale_at = header.scales[leaf].reshape(-1, 1, LANES)
    sendable = jnp.abs(total) >= code.smallest(scale_at)
    if phases.bounded:
        going = keep_largest(wire.capacities[-1], total, pack_mask(sendable))
    else:
        going = pack_mask(sendable & changed)
    count = jnp.sum(count_bits(going))
    # With codes of all entries there is one capacity more, which holds any number.
    capacities = (*wire.capacities, WORD * phases.words) if phases.has_dense else wire.capacities
    rung, fill = choose_capacity(count, capacities, comm, all_finite)
    count = jnp.where(fill == 0, count, 0)
    rounded = code.round(total, scale_at)

    def sparse(total):
        def code_at(own):
            return header.encode(total.reshape(-1)[position_of(own)], phases.place_of(rank, own))

        entries = wire.write(going, count, code_at, rung)
        return _padded(entries, room), jnp.where(unpack_mask(going), rounded, 0)

    def dense(total):
        codes = code.encode(total, scale_at)
        return _padded(pack_planes(codes, code.bits, phases.words), room), rounded

    room = max(wire.room, code.bits * phases.words if phases.has_dense else 0)
    lengths = phases.lengths_from_owners(header)
    is_dense = rung == len(wire.capacities)
    entries, passed_on = lax.cond(is_dense, dense, sparse, total) if phases.has_dense else sparse(total)
    own = jnp.concatenate([header.packed(count), entries])
    gathered, wire_bytes = move(own, lengths, rung, comm, lambda comm, x: comm.gather(x))

    def placed(owner, own):
        return (phases.place_of(owner, own),) * 2

    def add_sparse(gathered, fill):
        mean = start_of_mean(fill, gathered, jnp.asarray(wire.capacities, jnp.int32)[rung], message.bucket.span)
        return add_messages(gathered, mean, header, wire, rung, 1, placed)

    def add_dense(gathered, fill):
        return _dense_mean(phases, header, gathered, len(message.mask))[: message.bucket.span] + fill

    mean = lax.cond(is_dense, add_dense, add_sparse, gathered, fill) if phases.has_dense else add_sparse(gathered, fill)
    bits, least = wire.bits(count), entropy_bits(wire.places, count, code.bits)
    all_bits = jnp.float32(code.bits * WORD * phases.words)
    bits, least = (header.bits + jnp.where(is_dense, all_bits, of_sparse) for of_sparse in (bits, least))
    return mean, passed_on, _Second(wire_bytes, bits, least)


def _padded(words: Array, room: int) -> Array:
    return jnp.pad(words, (0, room - len(words)))


def _dense_mean(phases: TwoPhase, header: Header, gathered: Array, size: int) -> Array:
    """Every owner's codes of all its entries as flattened blocks of the bucket, which has `size` mask words."""
    owner, turn = owner_of(jnp.arange(size), phases.workers)
    bits = header.code.bits
    codes = gathered[:, header.words : header.words + bits * phases.words].reshape(phases.workers, bits, -1)
    scale_at = jnp.zeros((1, 1, 1), jnp.uint32)
    if header.code.scale_bits:
        scales = jax.vmap(lambda words: header.unpack(words).scales)(gathered[:, : header.words])
        scale_at = scales[owner, header.leaf_of_word].reshape(-1, 1, LANES)
    code = unpack_planes(codes[owner, :, turn].T.reshape(-1), bits)
    return header.code.decode(code, scale_at).reshape(-1)
