"""A sparse message: a count, the scales of the sender's leaves, coded entries, padding."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._core.compressor import SendReport
from gcjax._kernels.bits import WORD, pack_uint, packed_size, position_of, unpack_uint
from gcjax._kernels.buckets import Bucket
from gcjax._sparse.value_codes import ValueCode
from gcjax._types import Array


class Message(NamedTuple):
    """What one worker wants to send of a bucket.

    An entry's index on the wire counts word by word: 32 * word + bit.

    Attributes:
      values: float32[blocks, 32, 128].
      mask: uint32[words], packed mask of the entries to send.
      code: how values travel.
      bucket: where the leaves lie.
      capacities: numbers of slots, ascending. The smallest that holds every worker's entries is used.
      scales: uint32[leaves], the leaves' scales as `code.to_scale` makes them, or uint32[2 * leaves] for a code with
        two scales per leaf. Codes without scales ignore it.
      key: this worker's random key for this step, for codes that draw random numbers.
    """

    values: Array
    mask: Array
    code: ValueCode
    bucket: Bucket
    capacities: tuple[int, ...]
    scales: Array | None = None
    key: Array | None = None

    def header(self) -> "Header":
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

    def packed(self) -> Array:
        """uint32[self.words]."""
        return pack_uint(self.scales, self.code.scale_bits) if self.words else jnp.zeros(0, jnp.uint32)

    @property
    def words(self) -> int:
        return packed_size(len(self.scales), self.code.scale_bits)

    @property
    def bits(self) -> int:
        """Length of count and scales without padding."""
        return 32 + self.code.scale_bits * len(self.scales)

    def unpack(self, words: Array) -> "Header":
        """Another worker's header, from its words."""
        if not self.words:
            return self
        return self._replace(scales=unpack_uint(words, self.code.scale_bits, len(self.scales)))

    def scale_at(self, index: Array, which: int = 0) -> Array:
        """uint32[k], the scale of each entry's leaf; `which=1` is the second one, for codes with two per leaf."""
        if self.leaf_of_word is None:
            return jnp.zeros(index.shape, jnp.uint32)
        second = len(self.scales) // 2 if which else 0
        return self.scales[self.leaf_of_word[index // WORD] + second]


class Returned(NamedTuple):
    """Sums that an owner did not pass on, to be added to its residual.

    Attributes:
      indices: int32[m]; that of unused slots is out of bounds.
      values: float32[m].
    """

    indices: Array
    values: Array


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
      mean: mean over the workers of what they sent, for each leaf of the bucket; bit-equal on all workers, NaN after a
        skipped step.
      sent: uint32[words], packed mask of the entries that this worker sent.
      start_word: int32, see `TransportState`.
      report: counts all entries of the message's mask as selected.
      returned: None where nothing can come back.
    """

    mean: tuple[Array, ...]
    sent: Array
    start_word: Array
    report: SendReport
    returned: Returned | None


def choose_capacity(needed: Array, capacities: tuple[int, ...], comm: Comm, all_finite: Array) -> tuple[Array, Array]:
    """The number of the smallest capacity that holds what each worker needs, and the value to fill the mean with."""
    # -1 stands for a step to skip. The fill value depends on this collective on purpose: the array made of it then
    # comes after the last use of the gradient, and XLA can put it into the gradient's buffer.
    largest = comm.max(jnp.where(all_finite, needed, -1))
    fill = jnp.where(largest < 0, jnp.nan, 0.0).astype(jnp.float32)
    return jnp.sum(largest > jnp.asarray(capacities[:-1], jnp.int32), dtype=jnp.int32), fill


def add_messages(
    payloads: Array, mean: Array, header: Header, capacity: int, place: Callable[[Array], Array] = position_of
) -> Array:
    """Add every worker's entries, divided by the number of workers, to `mean` at `place(index)`.

    Workers are added in the order of their numbers, so that the mean is bit-equal on all of them on any backend.

    Args:
      payloads: uint32[workers, m]: count, header and body of each worker.
      mean: float32[n], what to add to.
      header: this worker's, for the code and the shapes.
      capacity: slots of each payload.
      place: from indices to positions in `mean`.
    """
    size = len(mean)
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def add_worker(worker, mean):
        payload = payloads[worker]
        body = 1 + header.words
        index, y = header.code.decode(payload[body:], header.unpack(payload[1:body]).scale_at)
        # Padding goes out of bounds, each slot to a place of its own, so that "unique" holds for it too.
        index = jnp.where(slot < payload[0].astype(jnp.int32), place(index), size + slot)
        return mean.at[index].add(y / len(payloads), mode="drop", unique_indices=True)

    return jax.lax.fori_loop(0, len(payloads), add_worker, mean) if len(payloads) > 1 else add_worker(0, mean)
