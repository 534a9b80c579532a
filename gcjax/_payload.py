"""Payloads of sparse entries: a count, the scales of the sender's groups, coded entries, padding."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._bits import LANES, pack_uint, packed_size, unpack_uint
from gcjax._codec import Code
from gcjax._types import Array, Comm, Sent


class Returned(NamedTuple):
    """Sums that an owner did not pass on.

    entry: int32[m], their places, those of unused slots out of bounds.  values: float32[m].
    """

    entry: Array
    values: Array


class Exchanged(NamedTuple):
    """mean: float32[n], equal on all workers.  words: uint32[n / 32], the mask of this worker's entries that were sent.
    first: int32, where owners' queues begin next.  sent: the report, with all entries of the mask as the selected ones.
    returned: to be added to this worker's residual by `take_back`; None where nothing can come back."""

    mean: Array
    words: Array
    first: Array
    sent: Sent
    returned: Returned | None


class Header(NamedTuple):
    """How values are coded, and the scales of this worker's groups, which go before its entries."""

    code: Code
    scale: Array
    segment_of_word: Array | None

    def packed(self):
        return pack_uint(self.scale, self.code.scale_bits) if self.code.scale_bits else jnp.zeros(0, jnp.uint32)

    def words(self) -> int:
        return packed_size(len(self.scale), self.code.scale_bits)

    def bits(self) -> int:
        return 32 + self.code.scale_bits * len(self.scale)

    def unpack(self, words):
        """Another worker's scales."""
        return self._replace(scale=unpack_uint(words, self.code.scale_bits, len(self.scale))) if len(words) else self

    def of(self, index, which=0):
        """The lookup that codes use: entry numbers -> their groups' scales."""
        if not self.code.scale_bits:
            return jnp.zeros(index.shape, jnp.uint32)
        groups = len(self.scale) // 2 if which else 0
        return self.scale[self.segment_of_word[index // LANES] + groups]


def agree_on_rung(needed, capacities, comm: Comm, ok):
    """The number of the smallest capacity that holds what each worker needs, and what to fill the mean with."""
    # -1 stands for a step to skip. The fill value must depend on this collective: then the zeros that are made of it
    # come after the last use of the gradient, and XLA can put them into its buffer instead of a copy.
    largest = comm.max(jnp.where(ok, needed, -1))
    fill = jnp.where(largest < 0, jnp.nan, 0.0).astype(jnp.float32)
    return jnp.sum(largest > jnp.asarray(capacities[:-1], jnp.int32), dtype=jnp.int32), fill


def add_payloads(payloads, mean, header: Header, capacity: int, place: Callable = lambda index: index):
    """Add every worker's entries, divided by the number of workers, to `mean` at `place(index)`."""
    size = len(mean)
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def add_worker(worker, mean):
        payload = payloads[worker]
        body = 1 + header.words()
        index, y = header.code.decode(payload[body:], header.unpack(payload[1:body]).of)
        # Padding goes out of bounds, each slot to a place of its own: "unique" must be true of it as well.
        index = jnp.where(slot < payload[0].astype(jnp.int32), place(index), size + slot)
        return mean.at[index].add(y / len(payloads), mode="drop", unique_indices=True)

    return jax.lax.fori_loop(0, len(payloads), add_worker, mean) if len(payloads) > 1 else add_worker(0, mean)
