"""SparseLoCo: the largest entries of every chunk of a decaying residual, in 2 bits each.

**Source.** Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky, "Communication Efficient LLM Pre-training with
SparseLoCo", 2025, arXiv 2508.15706, and the code of the system in which its authors use it,
https://github.com/tplr-ai/templar.

**Wire format.** One uint32 vector per worker and bucket: the places of the entries within their chunks, in so few bits
as the largest chunk needs (12 for 64 x 64); their codes of `bits` bits; a float32 table of 2**bits values for each
leaf, in the order of `Bucket.segments`. Places and codes are laid out by `pack_planes`, by chunk size, smallest first,
then by leaf. Chunks that are sent whole have no places. Without `bits`, the values follow as float32 instead of codes
and tables.

**Deviations.** The learning rate of the outer step comes after the compressor; in the code it is also in the residual,
which changes nothing at the rate 1 that its authors use. The code clips every worker's norm to the median of the
workers' norms, against workers that are not to be trusted; this does not. An axis is divided into the fewest equal
chunks of at most `chunk` entries; the code takes the largest divisor. It takes matrices and vectors alone; a leaf with
three or more axes is divided like a matrix with its last axis as columns. Padding is never sent in place of an entry.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.bits import to_unit
from gcjax._kernels.buckets import vector_bucket
from gcjax._kernels.chunks import Chunks, chunk_shapes, chunks_by_size, flat_positions, largest_of_rows
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_choice, check_integer, check_number
from gcjax.extend import (
    Bucket,
    Compressor,
    Mixing,
    Segment,
    bits_float,
    compress,
    dense_report,
    float_bits,
    pack_planes,
    unpack_planes,
)

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

    def mixed(self, mixing: Mixing) -> "SparseLocoState":
        return dataclasses.replace(self, left=mixing.means(self.left))


def sparse_loco_compress(
    top_k: int = 64,
    *,
    chunk: int = 64,
    decay: ArrayLike = 0.95,
    bits: int | None = 2,
    average: str = "senders",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
    overlap: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the `top_k` largest entries of every chunk of a decaying residual, in `bits` bits each.

        e <- decay * e + g
        q = Q(the top_k largest entries of each chunk of e)
        e <- e - q

    and the update is the mean of q over the workers that sent the entry. A matrix is divided into chunks of 64 x 64, a
    vector into chunks of 64. Q sorts the entries that a worker sends of a leaf into 2**bits bins, 6 / 2**bits of their
    standard deviations wide and around their mean, and sends the mean of every bin. With 2 bits the bins end 2.25 and
    0.75 deviations below the mean and 0.75 above it.

    It is made for the changes of models that train on their own between exchanges, where the residual stands in for
    the outer momentum: `optax.chain(optax.adamw(1e-3), gcjax.gossip.local_sgd(30, compressor=
    gcjax.sparse_loco_compress(axis_name="data"), axis_name="data"))`. With `top_k=chunk**2` and `outer=optax.sgd(0.7,
    momentum=0.8, nesterov=True)` nothing is left out, and it is the quantiser of MuLoCo (arXiv 2505.23725). On
    gradients it is top-k by chunks: `optax.chain(gcjax.sparse_loco_compress(), optax.sgd(0.1))`.

    State: a float32 per parameter. Wire: 14 bits per entry, with the defaults 1/64 of the parameters in matrices, and
    16 bytes per leaf. Vectors and small matrices are sent whole, at 2 bits per entry.
    `average="senders"` needs a float32 more per parameter while it adds up.

    Args:
      top_k: number of entries to send of each chunk; all of a smaller chunk, without their places.
      chunk: largest length of a chunk along an axis, up to 256.
      decay: beta, in [0, 1]. With 1 nothing is lost where the `average` is over the workers. May be traced
        (`optax.inject_hyperparams` with all other options among its static_args).
      bits: of a value, from 1 to 4; None for float32.
      average: "senders" adds up what was sent of an entry and divides by the number of those that sent it, as the
        authors' code does, so that an entry that one worker sends counts in full, and the updates do not add up to the
        gradients. "workers" divides by the number of all workers: the paper's formula, as others report it.
      axis_name, inner_axis_name, overlap: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a `top_k` or `chunk` below 1, a `chunk` above 256, a decay or `bits` out of range, an unknown
        `average`.
      TypeError: for a `top_k`, `chunk` or `bits` that is not an int.

    **Randomness**: none. **Bias**: entries are delayed and rounded, and what waits decays. **Non-finite input**: the
    update is NaN on all workers and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.sparse_loco_compress(top_k=2, decay=0.5, bits=None)
    >>> g = jnp.array([5.0, 1.0, -2.0, -3.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(4), state)
    >>> print(first, second)
    [ 5.  0.  0. -3.] [ 0.   0.5 -1.   0. ]
    """
    check_integer("top_k", top_k, 1)
    check_integer("chunk", chunk, 1, LARGEST_CHUNK)
    check_number("decay", decay, 0.0, 1.0, low_included=True)
    if bits is not None:
        check_integer("bits", bits, 1, 4)
    check_choice("average", average, AVERAGES)

    def init(bucket: Bucket) -> SparseLocoState:
        return SparseLocoState(tuple(jnp.zeros(s.shape, jnp.float32) for s in bucket.segments), bucket)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket = state.bucket
        message = _Message.of(bucket, top_k, chunk, bits)
        # Entry by entry, because XLA would copy the state for a conditional around the whole step.
        left = [jnp.where(all_finite, decay * old + new, old) for old, new in zip(state.left, gradient, strict=True)]
        entries, magnitudes = message.in_chunks(left), message.in_chunks([jnp.abs(x) for x in left], -1)
        payload = message.encode(entries, magnitudes)

        seen = message.add(message.zeros(payload), *message.decode(payload))
        left = [jnp.where(all_finite, x - y, x) for x, y in zip(left, message.in_leaves(seen), strict=True)]
        mean = message.mean(comm.gather(payload), average, all_finite)
        report = dense_report(message.sent_entries(), message.payload_bits())
        return message.in_leaves(mean), SparseLocoState(tuple(left), bucket), report

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name, overlap=overlap)


class _Message(NamedTuple):
    """The form of the messages of one bucket.

    Attributes:
      bucket: where the leaves lie.
      by_size: entries of a chunk -> the leaves with such chunks.
      shapes: (chunks, entries of one) for each size.
      counts: entries to send of a chunk, for each size.
      bits: of a value; None for float32.
    """

    bucket: Bucket
    by_size: dict[int, list[Chunks]]
    shapes: list[tuple[int, int]]
    counts: list[int]
    bits: int | None

    @classmethod
    def of(cls, bucket: Bucket, top_k: int, chunk: int, bits: int | None) -> "_Message":
        shapes = chunk_shapes(bucket, chunk)
        return cls(bucket, chunks_by_size(bucket, chunk), shapes, [min(top_k, size) for _, size in shapes], bits)

    @property
    def whole(self) -> list[bool]:
        """Whether the chunks of each size are sent whole."""
        return [count == size for (_, size), count in zip(self.shapes, self.counts, strict=True)]

    @property
    def value_count(self) -> int:
        return sum(chunks * count for (chunks, _), count in zip(self.shapes, self.counts, strict=True))

    @property
    def place_count(self) -> int:
        """Entries that are sent with their places."""
        each = zip(self.shapes, self.counts, self.whole, strict=True)
        return sum(chunks * count for (chunks, _), count, whole in each if not whole)

    @property
    def place_bits(self) -> int:
        sizes = [size for (_, size), whole in zip(self.shapes, self.whole, strict=True) if not whole]
        return (max(sizes) - 1).bit_length() if sizes else 0

    def payload_bits(self) -> int:
        values = 32 * self.value_count
        if self.bits is not None:
            values = self.bits * self.value_count + 32 * len(self.bucket.segments) * 2**self.bits
        return self.place_bits * self.place_count + values

    def sent_entries(self) -> int:
        """Entries that are sent, padding not counted."""
        return sum(
            int(np.minimum(_real_entries(leaf), count).sum())
            for leaves, count in zip(self.by_size.values(), self.counts, strict=True)
            for leaf in leaves
        )

    def in_chunks(self, leaves: Sequence[Array], fill: float = 0) -> list[Array]:
        """The bucket's leaves -> float32[chunks, entries of one] for each size, padded with `fill`."""
        of = dict(zip(self.bucket.segments, leaves, strict=True))
        return [
            jnp.concatenate([c.divide(of[c.segment], fill).swapaxes(1, 2).reshape(-1, size) for c in group])
            for size, group in self.by_size.items()
        ]

    def in_leaves(self, chunks: Sequence[Array]) -> tuple[Array, ...]:
        """The inverse of `in_chunks`."""
        of: dict[Segment, Array] = {}
        for x, leaves in zip(chunks, self.by_size.values(), strict=True):
            for leaf, part in zip(leaves, _by_leaf(x, leaves), strict=True):
                (down, across), (height, width) = leaf.grid, leaf.chunk
                of[leaf.segment] = leaf.unite(part.reshape(down, across, height, width).swapaxes(1, 2))
        return tuple(of[s] for s in self.bucket.segments)

    def encode(self, entries: list[Array], magnitudes: list[Array]) -> Array:
        """The largest entries of each chunk; padding, of negative magnitude, comes last."""
        places, values, real = [], [], []
        for x, size, count, whole in zip(entries, magnitudes, self.counts, self.whole, strict=True):
            if not whole:
                places.append(largest_of_rows(size, count))
                x, size = (jnp.take_along_axis(of, places[-1], axis=1) for of in (x, size))
            values.append(x)
            real.append(size >= 0)
        words = [_packed(jnp.concatenate([jnp.ravel(x) for x in places]), self.place_bits)] if places else []
        if self.bits is None:
            return jnp.concatenate([*words, *(float_bits(jnp.ravel(x)) for x in values)])
        codes, tables = [], {}
        for x, own, leaves in zip(values, real, self.by_size.values(), strict=True):
            for leaf, part, kept in zip(leaves, _by_leaf(x, leaves), _by_leaf(own, leaves), strict=True):
                code, tables[leaf.segment] = _quantised(part, kept, self.bits)
                codes.append(jnp.ravel(code))
        table = jnp.concatenate([tables[s] for s in self.bucket.segments])
        return jnp.concatenate([*words, _packed(jnp.concatenate(codes), self.bits), float_bits(table)])

    def decode(self, payload: Array) -> tuple[list[Array | None], list[Array]]:
        """For each size the places, int32[chunks, k], None for chunks that are sent whole; and the values, float32."""
        shapes = [(chunks, count) for (chunks, _), count in zip(self.shapes, self.counts, strict=True)]
        placed = [None if whole else shape for shape, whole in zip(shapes, self.whole, strict=True)]
        place_words = self.place_bits * vector_bucket(self.place_count).words if self.place_count else 0
        places: list = placed
        if self.place_count:
            places = _cut(_unpacked(payload[:place_words], self.place_bits, self.place_count), placed)
        rest = payload[place_words:]
        if self.bits is None:
            return places, _cut(bits_float(rest), shapes)
        code_words = self.bits * vector_bucket(self.value_count).words
        codes = _cut(_unpacked(rest[:code_words], self.bits, self.value_count), shapes)
        tables = bits_float(rest[code_words:]).reshape(-1, 2**self.bits)
        of = dict(zip(self.bucket.segments, tables, strict=True))
        return places, [
            jnp.concatenate([of[leaf.segment][part] for leaf, part in zip(leaves, _by_leaf(x, leaves), strict=True)])
            for x, leaves in zip(codes, self.by_size.values(), strict=True)
        ]

    def zeros(self, like: Array) -> list[Array]:
        """float32[chunks, entries of one] for each size, varying over the axes that `like` varies over."""
        return [zeros(shape, jnp.float32, like) for shape in self.shapes]

    def add(self, to: list[Array], places: list[Array | None], values: list[Array]) -> list[Array]:
        """Adds the values that one worker sent."""
        result = []
        for x, found, value, shape in zip(to, places, values, self.shapes, strict=True):
            if found is None:
                result.append(x + value)
            else:
                (at,) = flat_positions([found], [shape])
                result.append(x.reshape(-1).at[at].add(jnp.ravel(value), unique_indices=True).reshape(shape))
        return result

    def mean(self, payloads: Array, average: str, all_finite: Array) -> list[Array]:
        """The mean over all workers or over those that sent, added in the order of their numbers; else NaN."""
        workers = len(payloads)

        def add(worker, sums):
            (places, values), (total, senders) = self.decode(payloads[worker]), sums
            total = self.add(total, places, [x / workers for x in values])
            return total, senders and self.add(senders, places, [jnp.ones_like(x) for x in values])

        start = [x + jnp.where(all_finite, 0.0, jnp.nan) for x in self.zeros(payloads)]
        counted = self.zeros(payloads) if average == "senders" else []
        total, senders = lax.fori_loop(0, workers, add, (start, counted))
        if not senders:
            return total
        return [x * (workers / jnp.maximum(n, 1)) for x, n in zip(total, senders, strict=True)]


def _by_leaf(x: Array, leaves: list[Chunks]) -> list[Array]:
    """The chunks of each leaf."""
    return jnp.split(x, np.cumsum([leaf.number for leaf in leaves])[:-1])


def _real_entries(leaf: Chunks) -> np.ndarray:
    """Entries of each chunk that are not padding."""
    (_, columns), (down, across), (height, width) = leaf.shape, leaf.grid, leaf.chunk
    rows, rest = divmod(leaf.segment.size, columns)  # of the last row of a vector, only the rest is there
    of_rows = np.clip(rows - height * np.arange(down), 0, height)
    of_full, of_last = (np.clip(x - width * np.arange(across), 0, width) for x in (columns, rest))
    return of_rows[:, None] * of_full + (np.arange(down) == rows // height)[:, None] * of_last


def _cut(flat: Array, shapes: Sequence[tuple[int, int] | None]) -> list:
    """Consecutive parts of a vector in these shapes; None for None."""
    parts, begin = [], 0
    for shape in shapes:
        end = begin + (shape[0] * shape[1] if shape else 0)
        parts.append(flat[begin:end].reshape(shape) if shape else None)
        begin = end
    return parts


def _packed(values: Array, bits: int) -> Array:
    """Integers below 2**bits, [n] -> uint32 words."""
    vector = vector_bucket(len(values))
    return pack_planes(vector.join([values.astype(jnp.uint32)]), bits, vector.words)


def _unpacked(words: Array, bits: int, count: int) -> Array:
    """The inverse of `_packed`, int32[count]."""
    return vector_bucket(count).split(unpack_planes(words, bits))[0].astype(jnp.int32)


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
