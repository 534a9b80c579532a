"""The sparse exchange: selected entries of a bucket go to every worker, with static shapes that follow the data.

XLA has no gather of varying size. So the largest number of entries on any worker picks one of a few capacities, and a
`lax.switch` runs compaction, packing, communication and decoding at that capacity. Slots left over are padding. When
more entries are selected than the largest capacity holds, the largest entries are sent and the others stay with the
caller.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import WORD, count_bits, packed_size, position_of
from gcjax._sparse.compaction import assign_slots, slot_indices
from gcjax._sparse.message import Exchanged, Header, Message, add_messages, choose_capacity
from gcjax._sparse.reduce_scatter import SUM_CODE, reduce_scatter_exchange, slots_per_owner
from gcjax._sparse.selection import keep_largest
from gcjax._types import Array
from gcjax._validation import check_choice

TRANSPORTS = ("all_gather", "reduce_scatter", "auto")

SHARES = (1024, 512, 256, 128, 64, 32, 16)  # the default capacities are the entries divided by these


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransportState:
    """State of the exchange of one worker and bucket.

    Attributes:
      start_word: int32, mask word at which owners of the transport "reduce_scatter" start to assign slots.
      name: "all_gather", "reduce_scatter" or "auto". Static.
    """

    start_word: Array
    name: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, name: str = "all_gather") -> "TransportState":
        return cls(jnp.int32(0), name)


def check_transport(transport: str) -> None:
    """Raise ValueError unless `transport` is one of `TRANSPORTS`."""
    check_choice("transport", transport, TRANSPORTS)


def check_capacity(capacity: int | tuple[int, ...] | None) -> None:
    """Raise unless `capacity` is None, a positive int, or a tuple of them."""
    slots = capacity if isinstance(capacity, tuple) else () if capacity is None else (capacity,)
    for value in slots:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"capacity must be an int, a tuple of ints or None, got {capacity!r}")
        if value < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity!r}")
    if capacity == ():
        raise ValueError("capacity must name at least one size, got ()")


def default_capacities(entries: int) -> tuple[int, ...]:
    """1/1024 to 1/16 of the entries, in factors of two. Early in training more entries pass than the largest holds."""
    return capacities_for(tuple(-(-entries // share) for share in SHARES))


def capacities_for(capacity: int | tuple[int, ...]) -> tuple[int, ...]:
    """The wanted numbers of slots, rounded up to whole mask words, without repetitions, ascending."""
    wanted = capacity if isinstance(capacity, tuple) else (capacity,)
    return tuple(sorted({max(-(-slots // WORD) * WORD, WORD) for slots in wanted}))


def exchange(message: Message, transport: TransportState, comm: Comm, all_finite: Array) -> Exchanged:
    """Send this worker's message; return the mean over the workers of what all of them sent.

    The transport "auto" takes the one that moves fewer bytes at the largest capacity. `all_finite` is a bool scalar,
    equal on all workers; where it is False the mean is NaN.
    """
    if transport.name == "all_gather" or comm.size == 1:
        return _all_gather_exchange(message, transport.start_word, comm, all_finite)
    if transport.name == "auto" and not _owners_move_less(message.header(), message.capacities[-1], comm.size):
        return _all_gather_exchange(message, transport.start_word, comm, all_finite)
    return reduce_scatter_exchange(message, transport.start_word, comm, all_finite)


def _owners_move_less(header: Header, capacity: int, workers: int) -> bool:
    """Compare the words that a worker sends to each other worker."""

    def payload(slots):
        return 1 + header.words + packed_size(slots, header.code.entry_bits)

    slots = slots_per_owner(capacity, workers)
    return payload(slots) + 1 + packed_size(slots, SUM_CODE.entry_bits) < payload(capacity)


def _all_gather_exchange(message: Message, start_word: Array, comm: Comm, all_finite: Array) -> Exchanged:
    header, code, bucket = message.header(), message.code, message.bucket
    sent_mask = keep_largest(message.capacities[-1], message.values, message.mask)
    slots, selected = assign_slots(sent_mask), jnp.sum(count_bits(message.mask))
    sent = slots.total
    which, fill = choose_capacity(sent, message.capacities, comm, all_finite)

    def at_capacity(capacity):
        def run(values, slots, sent, fill):
            metered = comm.metered()
            index = slot_indices(slots, capacity)
            body = code.encode(values.reshape(-1)[position_of(index)], index, header.scale_at(index), message.key)
            count = jnp.where(fill == 0, sent, 0).astype(jnp.uint32)
            payloads = metered.gather(jnp.concatenate([count[None], header.packed(), body]))
            mean = add_messages(payloads, jnp.full(bucket.span, fill), header, capacity)
            return mean, jnp.int32(capacity), jnp.float32(metered.bytes_moved())

        return run

    branches = [at_capacity(capacity) for capacity in message.capacities]
    mean, capacity, wire_bytes = lax.switch(which, branches, message.values, slots, sent, fill)
    bits = (header.bits + code.entry_bits * sent).astype(jnp.float32)
    report = SendReport(selected, sent, jnp.int32(0), selected - sent, capacity, wire_bytes, bits)
    return Exchanged(bucket.split(mean), sent_mask, start_word, report, None)
