"""The sparse exchange: selected entries of a bucket to every worker, with static shapes that follow the data.

XLA has no gather of varying size. So the largest number selected by any worker picks one of a few capacities, and a
`lax.switch` runs compaction, packing, communication and decoding at that capacity; the slots that are left over are
padding. Of more than fit the largest capacity, those of largest magnitude are sent; the others stay with the caller.
"""

import jax.numpy as jnp
from jax import lax

from gcjax import _checks
from gcjax._bits import LANES, count_bits, packed_size
from gcjax._codec import Code
from gcjax._compact import indices, queue
from gcjax._layout import Bucket
from gcjax._owners import SUMS, slots_of_owner, through_owners
from gcjax._payload import Exchanged, Header, add_payloads, agree_on_rung
from gcjax._select import at_most
from gcjax._types import Comm, Sent

TRANSPORTS = ("all_gather", "reduce_scatter", "auto")

SHARES = (1024, 512, 256, 128, 64, 32, 16)  # the default capacities are the entries divided by these


def default_capacities(entries: int) -> tuple[int, ...]:
    """Capacities in factors of two. Early in training more passes than the largest holds; README, "Does it train?"."""
    return tuple(sorted({_round_up(-(-entries // share)) for share in SHARES}))


def _round_up(slots: int) -> int:
    return max(-(-slots // LANES) * LANES, LANES)


def check_capacity(capacity) -> None:
    """Raise unless `capacity` is None, a positive int, or a tuple of them."""
    slots = capacity if isinstance(capacity, tuple) else () if capacity is None else (capacity,)
    for value in slots:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"capacity must be an int, a tuple of ints or None, got {capacity!r}")
        if value < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity!r}")
    if capacity == ():
        raise ValueError("capacity must name at least one size, got ()")


def capacities_for(capacity, bucket: Bucket) -> tuple[int, ...]:
    """The ladder of a bucket, ascending: `capacity` is a number of slots, or a tuple of them."""
    wanted = capacity if isinstance(capacity, tuple) else (capacity,)
    return tuple(sorted({_round_up(slots) for slots in wanted}))


def check_transport(transport) -> None:
    """Raise ValueError unless `transport` is one of `TRANSPORTS`."""
    _checks.choice("transport", transport, TRANSPORTS)


def exchange(
    x, words, first, scale, segment_of_word, code: Code, capacities, comm: Comm, ok, key=None, transport="all_gather"
) -> Exchanged:
    """Send the entries of `x` whose bits are set in `words`; return the mean over workers of what all of them sent.

    x: float32[n].  words: uint32[n / 32], the mask.  first: int32, of `through_owners`.
    scale: uint32[groups] or uint32[2 * groups], `code.to_scale` of the groups, or two scales for each of them.
    segment_of_word: int32[n / 32], each word's group; None where the code has no scale.
    capacities: slots, ascending.  ok: bool scalar, equal on all workers; if False the mean is NaN everywhere.
    transport: one of `TRANSPORTS`; with "auto" the one that moves fewer bytes at the largest capacity.
    Workers are added in the order of their numbers, so that the mean is bit-equal on all of them on any backend.
    """
    header = Header(code, scale, segment_of_word)
    if transport == "auto":
        transport = _cheaper(header, capacities[-1], comm.size)
    run = through_owners if transport == "reduce_scatter" and comm.size > 1 else _to_all
    return run(x, words, first, header, capacities, comm, ok, key)


def _cheaper(header: Header, capacity: int, workers: int) -> str:
    """By the words that a worker sends to each other one."""

    def payload(slots):
        return 1 + header.words() + packed_size(slots, header.code.entry_bits)

    slots = slots_of_owner(capacity, workers)
    through_owners = payload(slots) + 1 + packed_size(slots, SUMS.entry_bits)
    return "reduce_scatter" if through_owners < payload(capacity) else "all_gather"


def _to_all(x, words, first, header: Header, capacities, comm: Comm, ok, key) -> Exchanged:
    kept = at_most(capacities[-1], x, words)
    lined_up, selected = queue(kept, jnp.int32(0)), jnp.sum(count_bits(words))
    sent = lined_up.total
    rung, fill = agree_on_rung(sent, capacities, comm, ok)

    def at_capacity(capacity):
        def run(x, lined_up, sent, fill):
            metered = comm.metered()
            index = indices(lined_up, capacity)
            body = header.code.encode(x[index], index, header.of(index), key)
            count = jnp.where(fill == 0, sent, 0).astype(jnp.uint32)
            payloads = metered.gather(jnp.concatenate([count[None], header.packed(), body]))
            mean = add_payloads(payloads, jnp.full(len(x), fill), header, capacity)
            return mean, jnp.int32(capacity), jnp.float32(metered.bytes_moved())

        return run

    branches = [at_capacity(capacity) for capacity in capacities]
    mean, capacity, wire_bytes = lax.switch(rung, branches, x, lined_up, sent, fill)
    bits = (header.bits() + header.code.entry_bits * sent).astype(jnp.float32)
    report = Sent(selected, sent, jnp.int32(0), selected - sent, capacity, wire_bytes, bits)
    return Exchanged(mean, kept, first, report, None)
