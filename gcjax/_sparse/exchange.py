"""The sparse exchange: selected entries of a bucket go to every worker, with static shapes that follow the data.

XLA has no gather of varying size. So the largest number of entries on any worker picks one of many capacities, and a
`lax.switch` runs the collective at that capacity, and nothing else. Slots left over are padding. When more entries are
selected than the largest capacity holds, the largest entries are sent and the others stay with the caller.
"""

import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import WORD, count_bits, position_of
from gcjax._sparse.message import Exchanged, Message, add_messages, choose_capacity, move, start_of_mean
from gcjax._sparse.selection import keep_largest
from gcjax._sparse.transport import TransportState
from gcjax._sparse.two_phase import TwoPhase, two_phase_exchange
from gcjax._sparse.wire import Wire, entropy_bits
from gcjax._types import Array


def exchange(message: Message, transport: TransportState, comm: Comm, all_finite: Array) -> Exchanged:
    """Send this worker's message; return the mean over the workers of what all of them sent.

    The transport "auto" takes the one that moves fewer bytes at the largest capacity; where messages must have a fixed
    length, two phases only if theirs do. `all_finite` is a bool scalar, equal on all workers; where it is False the
    mean is NaN.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def init(bucket):
    ...     return gx.SparseState.create(bucket, reset=gx.reset_to_zero, transport="auto")
    >>> def update(gradient, sum_grad_squared, state, comm, all_finite):
    ...     values = state.take_in(gx.add_gradient, gradient, all_finite=all_finite)
    ...     mask = gx.pack_mask(values[0] > 0)
    ...     slots = gx.capacities_for(32, state.bucket.entries)
    ...     message = gx.Message(values[0], mask, gx.float_code(32), state.bucket, slots)
    ...     sent = gx.exchange(message, state.transport, comm, all_finite)
    ...     return sent.mean, state.after(sent, values, all_finite), sent.report
    >>> tx = gx.compress(gx.Compressor(init, update))
    >>> print(tx.update(jnp.array([1.0, -3.0]), tx.init(jnp.zeros(2)))[0])
    [1. 0.]
    """
    if transport.owed.value is None:
        return _all_gather_exchange(message, transport, comm, all_finite)
    phases = TwoPhase.create(message, comm.size)
    if transport.name == "auto" and phases.most_words(message) >= _words(message)[-1]:
        return _all_gather_exchange(message, transport, comm, all_finite)
    return two_phase_exchange(phases, message, transport, transport.owed.value, comm, all_finite)


def _wire(message: Message) -> Wire:
    return Wire(message.wire, message.code.bits, WORD * message.bucket.words, message.capacities)


def _words(message: Message) -> list[int]:
    """Words of the message, for each capacity."""
    return [message.header().words + _wire(message).words(slots) for slots in message.capacities]


def _all_gather_exchange(message: Message, transport: TransportState, comm: Comm, all_finite: Array) -> Exchanged:
    header, bucket, wire = message.header(), message.bucket, _wire(message)
    selected = jnp.sum(count_bits(message.mask))
    sent_mask = keep_largest(message.capacities[-1], message.values, message.mask)
    sent = jnp.sum(count_bits(sent_mask))
    rung, fill = choose_capacity(sent, message.capacities, comm, all_finite)
    going = jnp.where(fill == 0, sent, 0)

    def code_at(place):
        return header.encode(message.values.reshape(-1)[position_of(place)], place)

    words = jnp.concatenate([header.packed(going), wire.write(sent_mask, going, code_at, rung)])
    arrived, wire_bytes = move(words, _words(message), rung, comm, lambda comm, x: comm.gather(x))
    capacity = jnp.asarray(message.capacities, jnp.int32)[rung]
    mean = start_of_mean(fill, arrived, capacity, bucket.span)
    mean = add_messages(arrived, mean, header, wire, rung, comm.size)
    bits, least = header.bits + wire.bits(sent), header.bits + entropy_bits(wire.places, sent, wire.code_bits)
    report = SendReport(selected, sent, jnp.int32(0), selected - sent, capacity, wire_bytes, bits, least)
    return Exchanged(bucket.split(mean), sent_mask, transport, report)
