"""SparseLoCo: the largest entries of every chunk of a decaying residual, in 2 bits each.

**Source.** Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky, "Communication Efficient LLM Pre-training with
SparseLoCo", 2025, arXiv 2508.15706, and the code of the system in which its authors use it,
https://github.com/tplr-ai/templar.

**Wire format.** One uint32 vector per worker and bucket: the places of the entries within their chunks, in so few bits
as the largest chunk needs (12 for 64 x 64); their codes of `bits` bits; a float32 table of 2**bits values for each
leaf, in the order of `Bucket.segments`. Places and codes are laid out by `pack_planes`, by chunk size, smallest first,
then by leaf. Chunks that are sent whole have no places.

**Deviations.** The learning rate of the outer step comes after the compressor; in the code it is also in the residual,
which changes nothing at the rate 1 that its authors use. The code clips every worker's norm to the median of the
workers' norms, against workers that are not to be trusted; this does not. An axis is divided into the fewest equal
chunks of at most `chunk` entries; the code takes the largest divisor. It takes matrices and vectors alone; a leaf with
three or more axes is divided like a matrix with its last axis as columns. Padding is never sent in place of an entry.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._kernels.buckets import pack_vector, packed_vector_size, split_vector, unpack_vector
from gcjax._kernels.chunks import (
    ChunkGroup,
    Chunks,
    Sent,
    add_sent,
    chunk_groups,
    from_groups,
    into_groups,
    largest_of_rows,
    sum_sent,
)
from gcjax._kernels.floats import to_unit
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_choice, check_integer, check_number
from gcjax._xla import kept_unless
from gcjax.extend import Bucket, Compressor, StepInput, StepResult, bits_float, compress, dense_report, float_bits

SIGMAS = 6  # standard deviations over which the bins lie
LARGEST_CHUNK = 256
AVERAGES = ("workers", "senders")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseLocoState:
    """State of one worker and bucket.

    Attributes:
      left: for each segment a float32 array of its shape, the decaying sum of what was taken in and not yet sent.
      bucket: where the leaves lie. Static.
    """

    left: tuple[Array, ...]
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape."""
        return self.bucket.join(self.left)


def sparse_loco_compress(
    top_k: int = 64,
    *,
    chunk: int = 64,
    decay: ArrayLike = 0.95,
    bits: int = 2,
    average: str = "senders",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the `top_k` largest entries of every chunk of a decaying residual, in `bits` bits each.

        e <- decay * e + g
        q = Q(the top_k largest entries of each chunk of e)
        e <- e - q

    The update is the mean of q over the workers that sent the entry. A matrix is divided into chunks of 64 x 64, a
    vector into chunks of 64. Q sorts a leaf's sent entries into 2**bits bins around their mean, 6 / 2**bits of their
    standard deviations wide, and sends the mean of every bin. Entries are delayed and rounded, and waiting entries
    decay: biased. It is made for models that train alone between exchanges: `gcjax.gossip.local_sgd(30,
    compressor=gcjax.sparse_loco_compress(axis_name="data"), axis_name="data")` after the optimiser. On gradients:
    `optax.chain(gcjax.sparse_loco_compress(), optax.sgd(0.1))`.

    State: a float32 per parameter. Wire: 14 bits per entry, 1/64 of a matrix's entries, and 16 bytes per leaf.

    Args:
      top_k: entries to send of each chunk; all of a smaller chunk, without their places.
      chunk: largest length of a chunk along an axis, up to 256.
      decay: beta, in [0, 1]. May be traced (`optax.inject_hyperparams` with the other options among its static_args).
      bits: of a value, from 2 to 4.
      average: "senders" divides by the number of senders of an entry; "workers" by that of all workers (the formula).
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for an argument out of range or an unknown `average`.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.sparse_loco_compress(top_k=2, decay=0.5, bits=4)
    >>> g = jnp.array([5.0, 1.0, -2.0, -3.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(4), state)
    >>> print(first, second)
    [ 5.  0.  0. -3.] [ 0.   0.5 -1.   0. ]
    """
    check_integer("top_k", top_k, 1)
    check_integer("chunk", chunk, 1, LARGEST_CHUNK)
    check_number("decay", decay, 0.0, 1.0, low_included=True)
    check_integer("bits", bits, 2, 4)
    check_choice("average", average, AVERAGES)

    def init(bucket: Bucket) -> SparseLocoState:
        return SparseLocoState(tuple(jnp.zeros(s.shape, jnp.float32) for s in bucket.segments), bucket)

    def update(step: StepInput, state: SparseLocoState) -> StepResult[SparseLocoState]:
        bucket = state.bucket
        message = _Message(bucket, chunk_groups(bucket, chunk), top_k, bits)
        decayed = tuple(decay * old + new for old, new in zip(state.left, step.gradient, strict=True))
        kept = kept_unless(step.go, decayed, state.left)
        entries = into_groups(kept, bucket, chunk, Chunks.to_rows)
        magnitudes = into_groups(kept, bucket, chunk, lambda leaf, x: leaf.to_rows(jnp.abs(x), -1))
        payload = message.encode(entries, magnitudes)

        sent = add_sent([jnp.zeros(math.prod(g.shape)) for g in message.groups], message.decode(payload))
        own = from_groups(sent, bucket, chunk, Chunks.from_rows)
        left = kept_unless(step.go, tuple(x - y for x, y in zip(kept, own, strict=True)), kept)
        mean = from_groups(_mean(step.comm.gather(payload), message, average, step.go), bucket, chunk, Chunks.from_rows)
        report = dense_report(message.sent_entries(), message.payload_bits())
        return StepResult(mean, SparseLocoState(left, bucket), report)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


class _Message(NamedTuple):
    """The form of the messages of one bucket.

    Attributes:
      bucket: where the leaves lie.
      groups: the leaves by size of their chunks.
      top_k: most entries to send of a chunk.
      bits: of a value.
    """

    bucket: Bucket
    groups: list[ChunkGroup]
    top_k: int
    bits: int

    @property
    def counts(self) -> list[int]:
        """Entries that are sent, for each group."""
        return [g.number * min(self.top_k, g.size) for g in self.groups]

    @property
    def in_part(self) -> list[ChunkGroup]:
        """The groups whose chunks are not sent whole, so that entries have places."""
        return [g for g in self.groups if g.size > self.top_k]

    @property
    def place_count(self) -> int:
        return sum(g.number * self.top_k for g in self.in_part)

    @property
    def place_bits(self) -> int:
        return (max((g.size for g in self.in_part), default=1) - 1).bit_length()

    def payload_bits(self) -> int:
        tables = 32 * len(self.bucket.segments) << self.bits
        return self.place_bits * self.place_count + self.bits * sum(self.counts) + tables

    def sent_entries(self) -> int:
        """Entries that are sent, padding not counted."""
        return sum(int(np.minimum(leaf.real_entries(), self.top_k).sum()) for g in self.groups for leaf in g.leaves)

    def encode(self, entries: list[Array], magnitudes: list[Array]) -> Array:
        """The largest entries of each chunk; padding, of negative magnitude, comes last."""
        places, values, real = [], [], []
        for x, size, group in zip(entries, magnitudes, self.groups, strict=True):
            if group.size > self.top_k:
                places.append(largest_of_rows(size, self.top_k))
                x, size = (jnp.take_along_axis(of, places[-1], axis=1) for of in (x, size))
            values.append(x)
            real.append(size >= 0)
        words = [pack_vector(jnp.concatenate([jnp.ravel(x) for x in places]), self.place_bits)] if places else []
        codes, tables = [], {}
        for x, own, group in zip(values, real, self.groups, strict=True):
            for leaf, part, kept in zip(group.leaves, group.by_leaf(x), group.by_leaf(own), strict=True):
                code, tables[leaf.segment] = _quantised(part, kept, self.bits)
                codes.append(jnp.ravel(code))
        table = jnp.concatenate([tables[s] for s in self.bucket.segments])
        return jnp.concatenate([*words, pack_vector(jnp.concatenate(codes), self.bits), float_bits(table)])

    def decode(self, payload: Array) -> Sent:
        """For each group the places among its entries, None if chunks are sent whole, and the values, float32."""
        places, place_words = self._places(payload)
        rest, counts = payload[place_words:], [(count,) for count in self.counts]
        total = sum(self.counts)
        code_words = packed_vector_size(total, self.bits)
        codes = split_vector(unpack_vector(rest[:code_words], self.bits, total), counts)
        tables = bits_float(rest[code_words:]).reshape(-1, 2**self.bits)
        of = dict(zip(self.bucket.segments, tables, strict=True))
        values = [
            jnp.concatenate([of[leaf.segment][part] for leaf, part in zip(g.leaves, g.by_leaf(x), strict=True)])
            for g, x in zip(self.groups, codes, strict=True)
        ]
        return list(zip(places, values, strict=True))

    def _places(self, payload: Array) -> tuple[list[Array | None], int]:
        """The places, and the number of words that they take."""
        words = packed_vector_size(self.place_count, self.place_bits)
        if not words:
            return [None] * len(self.groups), 0
        flat = unpack_vector(payload[:words], self.place_bits, self.place_count).astype(jnp.int32)
        indices = iter(split_vector(flat, [(g.number, self.top_k) for g in self.in_part]))
        return [g.flat(next(indices)) if g in self.in_part else None for g in self.groups], words


def _mean(payloads: Array, message: _Message, average: str, go: Array) -> list[Array]:
    """For each group the mean over all workers, or over those that sent an entry, float32[chunks * size]."""
    workers, sizes = len(payloads), [math.prod(g.shape) for g in message.groups]

    def decode(payload: Array) -> Sent:
        return [(places, x / workers) for places, x in message.decode(payload)]

    def decode_and_count(payload: Array) -> Sent:
        sent = decode(payload)
        return [*sent, *((places, jnp.ones_like(x)) for places, x in sent)]

    if average == "workers":
        return sum_sent(payloads, decode, sizes, go)
    sums = sum_sent(payloads, decode_and_count, 2 * sizes, go)
    half = len(sizes)
    return [x * (workers / jnp.maximum(n, 1)) for x, n in zip(sums[:half], sums[half:], strict=True)]


def _quantised(x: Array, real: Array, bits: int) -> tuple[Array, Array]:
    """A code for every value, int32 of its shape, and the values of the codes, float32[2**bits].

    `x` counts only where `real` is true.
    """
    bins, count = 2**bits, jnp.maximum(jnp.sum(real), 1)
    # Scaled, so that no square leaves float32's range.
    unit = to_unit(jnp.max(jnp.where(real, jnp.abs(x), 0)))
    scaled = jnp.where(real, unit * x, 0)
    mean = jnp.sum(scaled) / count
    apart = jnp.where(real, scaled - mean, 0)
    width = SIGMAS / bins * jnp.sqrt(jnp.sum(apart**2) / jnp.maximum(count - 1, 1))
    at = jnp.round(apart / jnp.where(width > 0, width, 1)) + bins // 2
    code = jnp.clip(at, 0, bins - 1).astype(jnp.int32)
    inside = [real & (code == i) for i in range(bins)]
    sums = jnp.stack([jnp.sum(jnp.where(own, scaled, 0)) for own in inside])
    counts = jnp.stack([jnp.sum(own) for own in inside])
    return code, sums / jnp.maximum(counts, 1) / unit
