"""A sparse message: what a worker wants to send, and the form that it takes on the wire."""

from typing import NamedTuple

import jax.numpy as jnp

from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import WORD, pack_uint, packed_size, unpack_uint
from gcjax._kernels.buckets import Bucket
from gcjax._sparse.owners import TransportState
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
    """

    values: Array
    mask: Array
    code: ValueCode
    bucket: Bucket
    capacities: tuple[int, ...]
    scales: Array | None = None
    wire: str = "compact"


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


class Form(NamedTuple):
    """The form of the messages of one phase, known when the step is traced.

    A message is a header (how many entries follow, and the scales of the sender's leaves), its entries, and padding up
    to the capacity. Where it is shorter, the codes of all the sender's entries stand in place of some.

    Attributes:
      code: how values travel.
      entries: the layout of the entries.
      bucket: where the leaves lie.
      has_all: whether the codes of all entries may be sent: one capacity more, which holds any number.
    """

    code: ValueCode
    entries: Wire
    bucket: Bucket
    has_all: bool = False

    @property
    def scale_count(self) -> int:
        return self.code.scale_sets * len(self.bucket.segments) if self.code.scale_bits else 0

    @property
    def header_words(self) -> int:
        return 1 + packed_size(self.scale_count, self.code.scale_bits)

    @property
    def header_bits(self) -> int:
        """Length of count and scales without padding."""
        return 32 + self.code.scale_bits * self.scale_count

    @property
    def capacities(self) -> tuple[int, ...]:
        return (*self.entries.capacities, self.entries.places) if self.has_all else self.entries.capacities

    @property
    def lengths(self) -> list[int]:
        """Words of a message, for each capacity."""
        bodies = [self.entries.words(slots) for slots in self.entries.capacities]
        if self.has_all:
            bodies.append(self.all_words)
        return [self.header_words + words for words in bodies]

    @property
    def all_words(self) -> int:
        """Words of the codes of all entries."""
        return self.code.bits * self.entries.places // WORD

    def header(self, count: Array, scales: Array | None) -> Array:
        """uint32[header_words]. Raises ValueError without the scales that the code needs."""
        head = count.astype(jnp.uint32)[None]
        if not self.scale_count:
            return head
        if scales is None:
            raise ValueError(
                "the message has no scales, which its code needs; give "
                "scales=code.to_scale(the bits of each leaf's largest magnitude)"
            )
        return jnp.concatenate([head, pack_uint(scales, self.code.scale_bits)])

    def scales_of(self, message: Array) -> Array:
        """The scales in another worker's message, uint32[scale_count]."""
        if not self.scale_count:
            return jnp.zeros(0, jnp.uint32)
        return unpack_uint(message[1 : self.header_words], self.code.scale_bits, self.scale_count)

    def scales_at(self, scales: Array | None, place: Array) -> tuple[Array, ...]:
        """The scales of the leaves of entries at these places of the bucket, uint32 of the shape of `place`."""
        if not self.scale_count or scales is None:
            return (jnp.zeros(place.shape, jnp.uint32),) * self.code.scale_sets
        leaf = jnp.asarray(self.bucket.leaf_of_word())[place // WORD]
        return tuple(own[leaf] for own in jnp.split(scales, self.code.scale_sets))
