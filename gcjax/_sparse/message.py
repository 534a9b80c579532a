"""A sparse message: a count, the scales of the sender's leaves, coded entries, padding."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import WORD, pack_uint, packed_size, position_of, unpack_uint
from gcjax._kernels.buckets import Bucket
from gcjax._sparse.transport import TransportState
from gcjax._sparse.value_codes import ValueCode
from gcjax._sparse.wire import Wire
from gcjax._types import Array


class Message(NamedTuple):
    """What one worker wants to send of a bucket.

    An entry's place on the wire counts word by word: 32 * word + bit.

    Attributes:
      values: float32[blocks, 32, 128].
      mask: uint32[words], packed mask of the entries to send, none of them padding.
      code: how values travel.
      bucket: where the leaves lie.
      capacities: numbers of slots, ascending. The smallest that holds every worker's entries is used.
      scales: uint32[leaves], the leaves' scales as `code.to_scale` makes them, or uint32[2 * leaves] for a code with
        two scales per leaf. Codes without scales ignore it, others raise ValueError without it.
      wire: layout of the entries, "compact" or "word"; see `gcjax._sparse.wire`.
      owner_density: share of its entries that an owner passes on in a step, the largest; None for all of which
        something arrived. See `gcjax._sparse.two_phase`.
    """

    values: Array
    mask: Array
    code: ValueCode
    bucket: Bucket
    capacities: tuple[int, ...]
    scales: Array | None = None
    wire: str = "compact"
    owner_density: float | None = None

    def header(self) -> "Header":
        if self.code.scale_bits and self.scales is None:
            raise ValueError(
                "the message has no scales, which its code needs; give "
                "scales=code.to_scale(the bits of each leaf's largest magnitude)"
            )
        if self.scales is None or not self.code.scale_bits:
            return Header(self.code, jnp.zeros(0, jnp.uint32), None)
        return Header(self.code, self.scales, jnp.asarray(self.bucket.leaf_of_word()))


class Header(NamedTuple):
    """The scales of one worker's leaves, which stand in front of its entries.

    Attributes:
      code: how values travel.
      scales: uint32[m], see `Message`; empty for a code without scales.
      leaf_of_word: int32[words], the leaf that each mask word belongs to; None for a code without scales.
    """

    code: ValueCode
    scales: Array
    leaf_of_word: Array | None

    def packed(self, count: Array) -> Array:
        """uint32[self.words]: how many entries follow, and the scales."""
        return jnp.concatenate([count.astype(jnp.uint32)[None], pack_uint(self.scales, self.code.scale_bits or 32)])

    @property
    def words(self) -> int:
        return 1 + packed_size(len(self.scales), self.code.scale_bits)

    @property
    def bits(self) -> int:
        """Length of count and scales without padding."""
        return 32 + self.code.scale_bits * len(self.scales)

    def unpack(self, words: Array) -> "Header":
        """Another worker's header, from its words."""
        if len(self.scales) == 0:
            return self
        return self._replace(scales=unpack_uint(words[1:], self.code.scale_bits, len(self.scales)))

    def scales_at(self, place: Array) -> tuple[Array, ...]:
        """The scales of each entry's leaf, uint32 of the shape of `place`."""
        if self.leaf_of_word is None:
            return (jnp.zeros(place.shape, jnp.uint32),) * self.code.scale_sets
        leaf = self.leaf_of_word[place // WORD]
        return tuple(scales[leaf] for scales in jnp.split(self.scales, self.code.scale_sets))

    def encode(self, x: Array, place: Array) -> Array:
        """The codes of values at these places of the bucket."""
        return self.code.encode(x, self.scales_at(place)[0])


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
      mean: mean over the workers of what they sent, for each leaf of the bucket; bit-equal on all workers, NaN after a
        skipped step.
      sent: uint32[words], packed mask of the entries that this worker sent.
      transport: the exchange's state after this step.
      report: counts all entries of the message's mask as selected.
    """

    mean: tuple[Array, ...]
    sent: Array
    transport: TransportState
    report: SendReport


def choose_capacity(needed: Array, capacities: tuple[int, ...], comm: Comm, all_finite: Array) -> tuple[Array, Array]:
    """The number of the smallest capacity that holds what each worker needs, and the value to fill the mean with."""
    if len(capacities) == 1:  # nothing to agree on
        return jnp.int32(0), jnp.where(all_finite, 0.0, jnp.nan).astype(jnp.float32)
    largest = comm.max(jnp.where(all_finite, needed, -1))  # -1 stands for a step to skip
    fill = jnp.where(largest < 0, jnp.nan, 0.0).astype(jnp.float32)
    return jnp.sum(largest > jnp.asarray(capacities[:-1], jnp.int32), dtype=jnp.int32), fill


def move(
    messages: Array, lengths: list[int], rung: Array, comm: Comm, collective: Callable[[Comm, Array], Array]
) -> tuple[Array, Array]:
    """The messages that arrive, cut to the length of this step on the wire: only this is compiled for every length.

    Args:
      messages: uint32[..., m].
      lengths: words on the wire, for each capacity.
      rung: number of the capacity.
      comm: the collectives.
      collective: collective(comm, x) -> what arrives for x, with the last axis of x.

    Returns:
      uint32[workers, m], zeros behind the length; and the bytes moved, float32.
    """
    branch = comm.metered()

    def at_length(length):
        def run(messages):
            metered = branch()
            arrived = collective(metered, messages[..., :length])
            padding = [(0, 0)] * (arrived.ndim - 1) + [(0, messages.shape[-1] - length)]
            return jnp.pad(arrived, padding), jnp.float32(metered.bytes_moved())

        return run

    return jax.lax.switch(rung, [at_length(length) for length in lengths], messages)


def start_of_mean(fill: Array, arrived: Array, capacity: Array, span: int) -> Array:
    """What the entries that arrive are added to, float32[span]: `fill`, or NaN if a message claims too many entries.

    It depends on what has arrived on purpose: so it comes after the last use of the gradient, and XLA can put it into
    the gradient's buffer.
    """
    too_many = jnp.max(arrived[:, 0]) > capacity.astype(jnp.uint32)
    return jnp.full(span, jnp.where(too_many, jnp.nan, fill))


def add_messages(
    arrived: Array,
    mean: Array,
    header: Header,
    wire: Wire,
    rung: Array,
    divisor: int,
    placed: Callable[[Array, Array], tuple[Array, Array]] = lambda sender, place: (place, place),
) -> Array:
    """Add every sender's entries, divided by `divisor`, to `mean`, flattened blocks.

    Senders are added in the order of their numbers, so that the result is bit-equal on all workers on any backend.

    Args:
      arrived: uint32[senders, m]: header and entries of each.
      mean: float32[n], what to add to.
      header: one of the same code and shapes.
      wire: layout of the entries.
      rung: number of the capacity.
      divisor: of every value.
      placed: placed(sender, places) -> the places of its entries in the bucket, whose leaves the scales belong to; and
        those to add them at, in the order of `mean`.
    """

    def add_sender(sender, mean):
        message = arrived[sender]
        theirs = header.unpack(message[: header.words])

        def add(mean, slot, place, code, valid):
            in_bucket, into = placed(sender, place)
            y = header.code.decode(code, *theirs.scales_at(in_bucket))
            # Padding goes out of bounds, each slot to a place of its own, so that "unique" holds for it too.
            at = jnp.where(valid, position_of(into), len(mean) + slot)
            return mean.at[at].add(y / divisor, mode="drop", unique_indices=True)

        return wire.read(message[header.words :], message[0], add, mean, rung)

    return jax.lax.fori_loop(0, len(arrived), add_sender, mean) if len(arrived) > 1 else add_sender(0, mean)
