"""One phase of a sparse exchange, as five verbs: select, encode, move, decode, add.

`Route` says between whom the messages go. All workers to all workers is one phase. In two phases all workers send to
owners, and owners to all workers: the same verbs run twice.

XLA has no collective of varying size. So the largest number of entries on any worker picks one of many capacities, and
a `lax.switch` runs the collective at that capacity, and nothing else. Slots left over are padding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._kernels.bits import LANES, WORD, pack_planes, position_of, unpack_planes
from gcjax._sparse.message import Form
from gcjax._sparse.owners import owner_of, place_of
from gcjax._sparse.wire import entropy_bits
from gcjax._types import Array

At = Callable[
    [Array | int, Array], Array
]  # (number of a receiver or sender, places in its message) -> places elsewhere


class Route(NamedTuple):
    """Between whom the messages of a phase go.

    Places of a message are the bucket's, or those among the words of one owner.

    Attributes:
      collective: collective(comm, x) -> what arrives of x, uint32[receivers, n]: uint32[senders, n].
      taken_from: places of a receiver's entries -> places among the sender's values.
      of_receiver: places of a receiver's entries -> places in the bucket, whose leaves their scales belong to.
      of_sender: the same, for a message that has arrived.
      added_at: places of a sender's entries -> places in what they are added to.
    """

    collective: Callable[[Comm, Array], Array]
    taken_from: At
    of_receiver: At
    of_sender: At
    added_at: At


def _as_it_is(number: Array | int, place: Array) -> Array:
    del number
    return place


def _gather(comm: Comm, messages: Array) -> Array:
    return comm.gather(messages[0])


def to_all() -> Route:
    """Every worker's entries to every worker."""
    return Route(_gather, _as_it_is, _as_it_is, _as_it_is, _as_it_is)


def to_owners(comm: Comm) -> Route:
    """Every worker's entries to their owners."""
    rank = comm.rank()

    def of_owner(owner: Array | int, own: Array) -> Array:
        return place_of(owner, own, comm.size)

    def own_place(sender: Array | int, own: Array) -> Array:
        del sender
        return place_of(rank, own, comm.size)

    return Route(lambda comm, x: comm.all_to_all(x), of_owner, of_owner, own_place, _as_it_is)


def from_owners(comm: Comm) -> Route:
    """Every owner's entries to every worker."""
    rank = comm.rank()

    def own_place(receiver: Array | int, own: Array) -> Array:
        del receiver
        return place_of(rank, own, comm.size)

    def of_owner(owner: Array | int, own: Array) -> Array:
        return place_of(owner, own, comm.size)

    return Route(_gather, _as_it_is, own_place, of_owner, of_owner)


class Selected(NamedTuple):
    """The entries that a worker sends in one phase.

    Attributes:
      values: float32[blocks, 32, 128]: all that it could send.
      words: uint32[receivers, m], for each receiver the packed mask of its entries.
      counts: int32[receivers], how many there are.
      scales: of the leaves, as `Form.code` makes them; None for a code without scales.
    """

    values: Array
    words: Array
    counts: Array
    scales: Array | None


class Encoded(NamedTuple):
    """The messages of one worker, before they move.

    Attributes:
      messages: uint32[receivers, room].
      rung: int32, number of the capacity, equal on all workers.
      fill: float32, what their sums start with: 0, or NaN in a step to skip.
    """

    messages: Array
    rung: Array
    fill: Array


class Arrived(NamedTuple):
    """The messages for one worker.

    Attributes:
      messages: uint32[senders, room], zeros behind the length that was moved.
      rung: int32, number of the capacity.
      fill: float32, see `Encoded`.
      wire_bytes: float32, bytes moved.
    """

    messages: Array
    rung: Array
    fill: Array
    wire_bytes: Array


def encode(selected: Selected, form: Form, route: Route, comm: Comm, go: Array) -> Encoded:
    """Entries to words, at the smallest capacity that holds those of every worker."""
    rung, fill = _agreed_capacity(jnp.max(selected.counts), form.capacities, comm, go)
    going = jnp.where(fill == 0, selected.counts, 0)

    def message_for(receiver: Array | int) -> Array:
        def code_at(place: Array) -> Array:
            x = selected.values.reshape(-1)[position_of(route.taken_from(receiver, place))]
            return form.code.encode(x, form.scales_at(selected.scales, route.of_receiver(receiver, place))[0])

        def entries() -> Array:
            return form.entries.write(selected.words[receiver], going[receiver], code_at, rung)

        body = _all_or_entries(form, rung, lambda: _codes_of_all(selected, form, route), entries)
        return jnp.concatenate([form.header(going[receiver], selected.scales), body])

    receivers = len(selected.words)
    messages = lax.map(message_for, jnp.arange(receivers)) if receivers > 1 else message_for(0)[None]
    return Encoded(messages, rung, fill)


def _agreed_capacity(needed: Array, capacities: tuple[int, ...], comm: Comm, go: Array) -> tuple[Array, Array]:
    """The number of the smallest capacity that holds what each worker needs, and what sums start with."""
    if len(capacities) == 1:  # nothing to agree on
        return jnp.int32(0), jnp.where(go, 0.0, jnp.nan).astype(jnp.float32)
    largest = comm.max(jnp.where(go, needed, -1))  # -1 stands for a step to skip
    fill = jnp.where(largest < 0, jnp.nan, 0.0).astype(jnp.float32)
    return jnp.sum(largest > jnp.asarray(capacities[:-1], jnp.int32), dtype=jnp.int32), fill


def sends_all(form: Form, rung: Array) -> Array | bool:
    """Whether the codes of all entries are sent at this capacity."""
    return rung == len(form.entries.capacities) if form.has_all else False


def _all_or_entries(form: Form, rung: Array, of_all: Callable[[], Array], of_entries: Callable[[], Array]) -> Array:
    """The words of either, padded to one length."""
    if not form.has_all:
        return of_entries()
    room = max(form.entries.room, form.all_words)

    def padded(words: Array) -> Array:
        return jnp.pad(words, (0, room - len(words)))

    return lax.cond(sends_all(form, rung), lambda: padded(of_all()), lambda: padded(of_entries()))


def _codes_of_all(selected: Selected, form: Form, route: Route) -> Array:
    """The codes of all values, uint32[all_words]."""
    first = route.of_receiver(jnp.int32(0), WORD * jnp.arange(selected.words.shape[1]))
    first = jnp.minimum(first, form.bucket.size - 1)  # the last rounds of dealing go beyond the bucket
    scale_at = form.scales_at(selected.scales, first)[0].reshape(-1, 1, LANES)
    return pack_planes(form.code.encode(selected.values, scale_at), form.code.bits, form.entries.places // WORD)


def move(encoded: Encoded, form: Form, route: Route, comm: Comm) -> Arrived:
    """One collective, at the length of this step's capacity: only this is compiled for every length."""
    branch = comm.metered()

    def at_length(length: int) -> Callable[[Array], tuple[Array, Array]]:
        def run(messages: Array) -> tuple[Array, Array]:
            metered = branch()
            arrived = route.collective(metered, messages[:, :length])
            padded = jnp.pad(arrived, ((0, 0), (0, messages.shape[1] - length)))
            return padded, jnp.float32(metered.bytes_moved())

        return run

    messages, wire_bytes = lax.switch(encoded.rung, [at_length(length) for length in form.lengths], encoded.messages)
    return Arrived(messages, encoded.rung, encoded.fill, wire_bytes)


def zeros_for(arrived: Arrived, form: Form) -> Array:
    """What entries are added to, float32[span]: `fill`, or NaN if a message claims too many entries.

    It depends on what has arrived on purpose: so it comes after the last use of the gradient, and XLA can put it into
    the gradient's buffer.
    """
    capacity = jnp.asarray(form.capacities, jnp.int32)[arrived.rung]
    too_many = jnp.max(arrived.messages[:, 0]) > capacity.astype(jnp.uint32)
    return jnp.full(form.bucket.span, jnp.where(too_many, jnp.nan, arrived.fill))


def add(arrived: Arrived, form: Form, route: Route, total: Array, divisor: int) -> Array:
    """Decode every sender's entries, and add them, divided by `divisor`, to `total`, flattened blocks.

    Senders are added in the order of their numbers, so that the result is bit-equal on all workers on any backend.
    """
    messages = arrived.messages

    def add_sender(sender: Array | int, total: Array) -> Array:
        message = messages[sender]
        scales = form.scales_of(message)

        def add_chunk(total: Array, slot: Array, place: Array, code: Array, valid: Array) -> Array:
            y = form.code.decode(code, *form.scales_at(scales, route.of_sender(sender, place)))
            # Padding goes out of bounds, each slot to a place of its own, so that "unique" holds for it too.
            at = jnp.where(valid, position_of(route.added_at(sender, place)), len(total) + slot)
            return total.at[at].add(y / divisor, mode="drop", unique_indices=True)

        return form.entries.read(message[form.header_words :], message[0], add_chunk, total, arrived.rung)

    return lax.fori_loop(0, len(messages), add_sender, total) if len(messages) > 1 else add_sender(0, total)


def mean_of(arrived: Arrived, form: Form, route: Route, divisor: int) -> Array:
    """The entries of all senders, added up and divided by `divisor`: float32[span] of flattened blocks."""

    def of_entries() -> Array:
        return add(arrived, form, route, zeros_for(arrived, form), divisor)

    def of_all() -> Array:
        return _decoded_all(arrived.messages, form)[: form.bucket.span] + arrived.fill

    return lax.cond(sends_all(form, arrived.rung), of_all, of_entries) if form.has_all else of_entries()


def _decoded_all(messages: Array, form: Form) -> Array:
    """Every owner's codes of all its entries as flattened blocks of the bucket."""
    bits, workers, size = form.code.bits, len(messages), form.bucket.size // WORD
    codes = messages[:, form.header_words : form.header_words + form.all_words].reshape(workers, bits, -1)
    owner, turn = owner_of(jnp.arange(size), workers)
    code = unpack_planes(codes[owner, :, turn].T.reshape(-1), bits)
    scale_at = jnp.zeros((1, 1, 1), jnp.uint32)
    if form.scale_count:
        scale_at = jax.vmap(form.scales_of)(messages)[owner, jnp.asarray(form.bucket.leaf_of_word())].reshape(
            -1, 1, LANES
        )
    return form.code.decode(code, scale_at).reshape(-1)


class Length(NamedTuple):
    """How long messages are: float32.

    Attributes:
      bits: of all of a worker's messages in one phase, without padding.
      entropy: the least that any code takes for the same.
    """

    bits: Array
    entropy: Array


def length_of(counts: Array, rung: Array, form: Form, places: int) -> Length:
    """The length of messages of so many entries, int32[receivers], that have `places` in all."""
    headers = jnp.float32(len(counts) * form.header_bits)
    bits, least = jnp.sum(jax.vmap(form.entries.bits)(counts)), entropy_bits(places, jnp.sum(counts), form.code.bits)
    of_all, is_all = jnp.float32(form.code.bits * form.entries.places), sends_all(form, rung)
    return Length(*(headers + jnp.where(is_all, of_all, of_entries) for of_entries in (bits, least)))
