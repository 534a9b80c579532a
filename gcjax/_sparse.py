"""The sparse exchange: selected entries of a bucket to every worker, with static shapes that follow the data.

XLA has no gather of varying size. So the largest number selected by any worker picks one of a few capacities, and a
`lax.switch` runs compaction, packing, gather and decoding at that capacity; the slots that are left over are padding.
What does not fit the largest capacity is not sent and stays with the caller.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._bits import LANES, count_bits, pack_uint, packed_size, unpack_uint
from gcjax._codec import Code
from gcjax._compact import cut, indices, queue
from gcjax._layout import Bucket
from gcjax._types import Array, Comm, Sent

DEFAULT_RUNGS = 7
DEFAULT_TOP = 16  # the largest default capacity is a 16th of the entries


def default_capacities(entries: int) -> tuple[int, ...]:
    """1/1024 to 1/16 of the entries in factors of two, rounded up to multiples of 32."""
    return tuple(sorted({_round_up(-(-entries // (DEFAULT_TOP << k))) for k in range(DEFAULT_RUNGS)}))


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
    """The ladder of a bucket, ascending: `capacity` is None (the default), a number of slots, or a tuple of them."""
    if capacity is None:
        return default_capacities(bucket.entries)
    wanted = capacity if isinstance(capacity, tuple) else (capacity,)
    return tuple(sorted({_round_up(slots) for slots in wanted}))


class Exchanged(NamedTuple):
    """mean: float32[n], equal on all workers.  words: uint32[n / 32], the mask of this worker's entries that were sent.
    first: int32, where the next queue begins.  sent: the report, with all entries of the mask as the selected ones."""

    mean: Array
    words: Array
    first: Array
    sent: Sent


def exchange(x, words, first, scale, segment_of_word, code: Code, capacities, comm: Comm, ok, key=None) -> Exchanged:
    """Send the entries of `x` whose bits are set in `words`; return the mean over workers of what all of them sent.

    x: float32[n].  words: uint32[n / 32], the mask.  first: int32, the word whose entries get the first slots.
    scale: uint32[groups] or uint32[2 * groups], `code.to_scale` of the groups, or two scales for each of them.
    segment_of_word: int32[n / 32], each word's group; None where the code has no scale.
    capacities: slots, ascending.  ok: bool scalar, equal on all workers; if False the mean is NaN everywhere.
    Workers are added in the order of their numbers, so that the mean is bit-equal on all of them on any backend.
    """
    lined_up = queue(words, first)
    sent_words, resume = cut(lined_up, capacities[-1])
    sent = jnp.sum(count_bits(sent_words))
    # -1 stands for a step to skip. The fill value must depend on this collective: then the zeros below come after the
    # last use of the gradient, and XLA can put them into its buffer instead of a copy.
    largest = comm.max(jnp.where(ok, sent, -1))
    fill = jnp.where(largest < 0, jnp.nan, 0.0).astype(jnp.float32)
    rung = jnp.sum(largest > jnp.asarray(capacities[:-1], jnp.int32), dtype=jnp.int32)

    def at_capacity(capacity):
        def run(x, lined_up, sent, fill):
            metered = comm.metered()
            index = indices(lined_up, capacity)
            body = code.encode(x[index], index, _scale_of(scale, segment_of_word, code)(index), key)
            count = jnp.where(fill == 0, sent, 0).astype(jnp.uint32)
            header = pack_uint(scale, code.scale_bits) if code.scale_bits else jnp.zeros(0, jnp.uint32)
            payloads = metered.gather(jnp.concatenate([count[None], header, body]))
            mean = _decode(payloads, jnp.full(len(x), fill), len(scale), segment_of_word, code, capacity)
            return mean, jnp.int32(capacity), jnp.float32(metered.bytes_moved())

        return run

    branches = [at_capacity(capacity) for capacity in capacities]
    mean, capacity, wire_bytes = lax.switch(rung, branches, x, lined_up, sent, fill)
    bits = (32 + code.scale_bits * len(scale) + code.entry_bits * sent).astype(jnp.float32)
    overflow = lined_up.total - sent
    return Exchanged(
        mean, sent_words, resume, Sent(lined_up.total, sent, jnp.int32(0), overflow, capacity, wire_bytes, bits)
    )


def _scale_of(scale, segment_of_word, code: Code):
    """The lookup that codes use: entry numbers -> their groups' scales."""

    def look_up(index, which=0):
        if not code.scale_bits:
            return jnp.zeros(index.shape, jnp.uint32)
        groups = len(scale) // 2 if which else 0
        return scale[segment_of_word[index // LANES] + groups]

    return look_up


def _decode(payloads, mean, groups: int, segment_of_word, code: Code, capacity: int):
    """Add every worker's entries, divided by the number of workers, to `mean`, which the caller has filled."""
    size = len(mean)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    header = packed_size(groups, code.scale_bits)

    def add_worker(worker, mean):
        payload = payloads[worker]
        scale = unpack_uint(payload[1 : 1 + header], code.scale_bits, groups) if header else None
        index, y = code.decode(payload[1 + header :], _scale_of(scale, segment_of_word, code))
        # Padding goes out of bounds, each slot to a place of its own: "unique" must be true of it as well.
        index = jnp.where(slot < payload[0].astype(jnp.int32), index, size + slot)
        return mean.at[index].add(y / len(payloads), mode="drop", unique_indices=True)

    return jax.lax.fori_loop(0, len(payloads), add_worker, mean) if len(payloads) > 1 else add_worker(0, mean)
