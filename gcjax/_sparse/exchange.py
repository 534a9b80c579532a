"""The sparse exchange: selected entries of a bucket go to every worker, with static shapes that follow the data.

By the transport "all_gather" every worker's entries go to every worker. The traffic of "two_phase" does not grow with
the number of workers: every mask word has an owner among them (`gcjax._sparse.owners`). All workers send each owner
their entries of its words. The owner adds up the arrived entries and its own debt, and sends the result to all: as a
sparse message, or as the codes of all its entries where that is shorter. It owes its rounding errors, which join the
next result.

Owners send values of 4 bits in the paper's code, and float16 and float32 values as they are. They send the entries of
which something arrived; a rounding error waits for the next arrival, or for codes of all entries. Where more entries
are selected than the largest capacity holds, the largest are sent and the others stay with the caller; those for which
their owner has no slot wait, round-robin.

**Source**: Renggli et al., "SparCML", SC 2019, arXiv 1802.08021, split and all-gather; Li and Hoefler, "Near-Optimal
Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022, arXiv 2201.07598; Tang et al., "DoubleSqueeze",
ICML 2019, arXiv 1905.05957, for error feedback in both phases. **Deviation**: a hash assigns words to owners. Ok-Topk
gives owners regions and rebalances them during training.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import LANES, WORD, count_bits, pack_mask, reduce_rows, unpack_mask
from gcjax._kernels.floats import magnitude_bits
from gcjax._sparse.capacities import in_groups, ladder
from gcjax._sparse.message import Exchanged, Form, Message
from gcjax._sparse.owners import TransportState, collect_words, deal_words, fitting, word_of
from gcjax._sparse.pipeline import (
    Arrived,
    Length,
    Selected,
    add,
    encode,
    from_owners,
    length_of,
    mean_of,
    move,
    sends_all,
    to_all,
    to_owners,
)
from gcjax._sparse.selection import keep_largest
from gcjax._sparse.value_codes import power_of_two_code
from gcjax._sparse.wire import Wire
from gcjax._types import Array


def exchange(message: Message, transport: TransportState, comm: Comm, go: Array) -> Exchanged:
    """Send this worker's message; return the mean over the workers of what all of them sent.

    The transport "auto" takes the one that moves fewer bytes at the largest capacity; where messages must have a fixed
    length, two phases only if theirs do. `go` is a bool scalar, equal on all workers; where it is False the
    mean is NaN.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def init(bucket):
    ...     return gx.SparseState.create(bucket, reset=gx.reset_to_zero, transport="auto")
    >>> def update(step, state):
    ...     values = state.take_in(gx.add_gradient, step.gradient, go=step.go)
    ...     mask = gx.pack_mask(values[0] > 0)
    ...     slots = gx.capacities_for(32, state.bucket.entries)
    ...     message = gx.Message(values[0], mask, gx.float_code(32), state.bucket, slots)
    ...     sent = gx.exchange(message, state.transport, step.comm, step.go)
    ...     return gx.StepResult(sent.mean, state.after(sent, values, step.go), sent.report)
    >>> tx = gx.compress(gx.Compressor(init, update))
    >>> print(tx.update(jnp.array([1.0, -3.0]), tx.init(jnp.zeros(2)))[0])
    [1. 0.]
    """
    whole = _whole_form(message)
    if transport.owned.owed is None:
        return _in_one_phase(message, whole, transport, comm, go)
    there = _form_to_owners(message, comm.size)
    back = _form_from_owners(message, there, comm.size)
    if transport.name == "auto" and max(there.lengths) + max(back.lengths) >= max(whole.lengths):
        return _in_one_phase(message, whole, transport, comm, go)
    return _in_two_phases(message, there, back, transport, transport.owned.owed, comm, go)


def _whole_form(message: Message) -> Form:
    """The form of a message with a worker's entries of the whole bucket."""
    wire = Wire(message.wire, message.code.bits, WORD * message.bucket.words, message.capacities)
    return Form(message.code, wire, message.bucket)


def _form_to_owners(message: Message, workers: int) -> Form:
    """That of its entries of one owner.

    Words are dealt at random: an owner's message has its share of the slots and three standard deviations more. It has
    room for one full word at least.
    """
    shares = [slots / workers for slots in message.capacities]
    slots = in_groups([max(math.ceil(share + 3 * math.sqrt(share)), WORD) for share in shares])
    wire = Wire(message.wire, message.code.bits, WORD * -(-message.bucket.words // workers), slots)
    return Form(message.code, wire, message.bucket)


def _form_from_owners(message: Message, there: Form, workers: int) -> Form:
    """That of an owner's sums. The codes of all its entries replace the capacities at which they are shorter."""
    as_they_are = message.code.bits >= 16 and message.code.scale_sets == 1
    code, places = message.code if as_they_are else power_of_two_code(has_zero=True), there.entries.places
    most = min(workers * there.entries.capacities[-1], places)
    slots = in_groups(ladder(min(there.entries.capacities[0], most), most))
    wire = Wire("compact", code.bits, places, slots)
    shorter = tuple(n for n in slots if wire.words(n) < code.bits * places // WORD)
    return Form(code, wire._replace(capacities=shorter or slots[:1]), message.bucket, has_all=len(shorter) < len(slots))


def _in_one_phase(message: Message, form: Form, transport: TransportState, comm: Comm, go: Array) -> Exchanged:
    route = to_all()
    sent = keep_largest(message.capacities[-1], message.values, message.mask)
    selected = Selected(message.values, sent[None], jnp.sum(count_bits(sent))[None], message.scales)
    arrived = move(encode(selected, form, route, comm, go), form, route, comm)
    mean = mean_of(arrived, form, route, comm.size)
    length = length_of(selected.counts, arrived.rung, form, form.entries.places)
    report = _report(message, selected, arrived, form, length)
    return Exchanged(message.bucket.split(mean), sent, transport, report)


def _in_two_phases(
    message: Message, there: Form, back: Form, transport: TransportState, owed: Array, comm: Comm, go: Array
) -> Exchanged:
    workers, slots = comm.size, there.entries.capacities[-1]

    route = to_owners(comm)
    largest = keep_largest(slots * workers, message.values, message.mask)
    words, start_word = fitting(deal_words(largest, workers), slots, transport.start_word)
    selected = Selected(message.values, words, jnp.sum(count_bits(words), axis=1), message.scales)
    arrived = move(encode(selected, there, route, comm, go), there, route, comm)
    total = add(arrived, there, route, owed.reshape(-1), workers).reshape(owed.shape)

    route, rank = from_owners(comm), comm.rank()
    sums, rounded = _of_owner(total, total != owed, back, rank, workers)
    returned = move(encode(sums, back, route, comm, go), back, route, comm)
    mean = mean_of(returned, back, route, 1)
    passed_on = jnp.where(sends_all(back, returned.rung) | unpack_mask(sums.words[0]), rounded, 0)

    new = TransportState(
        transport.owned.after(total - passed_on, rank, go),
        jnp.where(go, start_word, transport.start_word),
        transport.name,
    )
    first = length_of(selected.counts, arrived.rung, there, WORD * message.bucket.words)
    second = length_of(sums.counts, returned.rung, back, back.entries.places)
    length = Length(first.bits + second.bits, first.entropy + second.entropy)
    report = _report(message, selected, arrived, there, length)
    report = report._replace(wire_bytes=arrived.wire_bytes + returned.wire_bytes)
    return Exchanged(message.bucket.split(mean), collect_words(words, len(message.mask)), new, report)


def _of_owner(total: Array, changed: Array, form: Form, rank: Array, workers: int) -> tuple[Selected, Array]:
    """An owner's sums of which something has arrived, and all of its sums as the workers would see them.

    Args:
      total: float32[own blocks, 32, 128], the sums.
      changed: bool of that shape, of which entries something has arrived.
      form: of its message.
      rank: its number.
      workers: number of workers.
    """
    scales, scale_at = None, jnp.zeros((1, 1, 1), jnp.uint32)
    if form.scale_count:
        turns = jnp.arange(total.size // WORD)
        word = jnp.minimum(word_of(rank, turns, workers), form.bucket.size // WORD - 1)
        leaf = jnp.asarray(form.bucket.leaf_of_word())[word]
        (peak,) = reduce_rows((lax.max, magnitude_bits(total)))
        scales = form.code.to_scale(jax.ops.segment_max(peak, leaf, form.scale_count, indices_are_sorted=True))
        scale_at = scales[leaf].reshape(-1, 1, LANES)
    going = pack_mask((jnp.abs(total) >= form.code.smallest(scale_at)) & changed)
    selected = Selected(total, going[None], jnp.sum(count_bits(going))[None], scales)
    return selected, form.code.round(total, scale_at)


def _report(message: Message, selected: Selected, arrived: Arrived, form: Form, length: Length) -> SendReport:
    wanted, sent = jnp.sum(count_bits(message.mask)), jnp.sum(selected.counts)
    return SendReport(
        selected=wanted,
        sent=sent,
        underflow=jnp.int32(0),
        overflow=wanted - sent,
        capacity=jnp.asarray(form.entries.capacities, jnp.int32)[arrived.rung] * len(selected.counts),
        wire_bytes=arrived.wire_bytes,
        payload_bits=length.bits,
        entropy_bits=length.entropy,
    )
