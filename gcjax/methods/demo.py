"""DeMo: a decaying sum of gradients, of which each worker sends the largest cosine coefficients.

**Source.** Bowen Peng, Jeffrey Quesnelle, Diederik Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv
2411.19870, and the authors' code, https://github.com/bloc97/DeMo.

**Wire format.** One uint32 vector per worker and bucket: the places of the coefficients within their chunks, 16 bits
each, two in a word, the first one in the lower half; then the coefficients as float32, scaled as `_cosines` says, in
the same order: through the chunks of equal size together, smaller sizes first, and within a size through the leaves.

**Deviations.** The learning rate stands after the compressor, not inside the sum: it changes nothing while the rate is
constant, since the optimiser takes the sign. Each coefficient is averaged over all workers; the authors' code averages
over those that sent it, by which the updates would no longer add up to the gradients. An axis is cut into the fewest
equal chunks of at most `chunk` entries, the last one filled up with zeros; the original takes the largest divisor,
which is small for some sizes, and of small chunks nearly everything is sent. For the same reason a vector longer than
chunk**2 is cut as a matrix with rows of `chunk` entries. A leaf of three and more axes, which the original does not
take, is cut as a matrix with its last axis as columns. The sum is kept as coefficients: the same arithmetic, one
transform less.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.bits import packed_size
from gcjax._types import Array
from gcjax._validation import check_integer, check_number
from gcjax.extend import (
    Bucket,
    Compressor,
    Segment,
    bits_float,
    compress,
    dense_report,
    float_bits,
    pack_uint,
    unpack_uint,
)

INDEX_BITS = 16
RUN = 16  # the largest of each so many neighbours are found first: a third of the time of one search in the chunk


class Chunks(NamedTuple):
    """How a segment is cut: as a matrix of `shape`, into a grid of chunks, (down, across), of `chunk` entries each."""

    segment: Segment
    shape: tuple[int, int]
    grid: tuple[int, int]
    chunk: tuple[int, int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DemoState:
    """State of one worker and bucket.

    coefficients: for each size of chunks, smallest first, float32[chunks * size], the cosine coefficients of delta, the
      decaying sum of what was taken in and not yet sent; scaled as `_cosines` says.
    chunk: as in `demo_compress`, static.  bucket: where the leaves lie, static.
    """

    coefficients: tuple[Array, ...]
    chunk: int = dataclasses.field(metadata={"static": True})
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32[n], delta."""
        return _entries(self.coefficients, self.bucket, self.chunk)


def demo_compress(
    top_k=32, *, chunk=64, decay=0.999, axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the `top_k` largest cosine coefficients of every chunk of a decaying sum of gradients.

    .. math::
        \Delta \leftarrow \beta \Delta + g, \qquad
        q = \text{the } k \text{ largest coefficients of each chunk of } \mathrm{DCT}(\Delta), \qquad
        \Delta \leftarrow \Delta - \mathrm{DCT}^{-1}(q)

    and the update is :math:`\mathrm{DCT}^{-1}` of the mean of q over the workers. DCT is the orthonormal discrete
    cosine transform, type II. A matrix is cut into chunks of 64 x 64 and transformed along both axes, a vector into
    chunks of 64. DeMo takes the sign of the update, and no momentum beside :math:`\Delta`. Weight decay and learning
    rate come after that: `optax.chain(gcjax.demo_compress(), optax.scale_by_sign(), optax.add_decayed_weights(0.1),
    optax.scale_by_learning_rate(1e-3))`. Clipping may stand before it.

    Costs a float32 per parameter in state; 48 bits per coefficient on the wire, always equally many: a 128th of the
    parameters for matrices with the defaults, but half of those in vectors and in matrices with one short axis. Two
    transforms a step, at 2 chunk multiplications an entry each, and the search for the largest coefficients take as
    long as some 15 additions of two vectors of gradient length on a CPU, whatever the number of workers.

    Args:
      top_k: coefficients to send of each chunk; all of a smaller one.
      chunk: the largest length of a chunk along an axis, up to 256.
      decay: beta, in [0, 1]. With 1 nothing is lost. May be traced (`optax.inject_hyperparams` with `top_k` and `chunk`
        among its static_args).
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a `top_k` or `chunk` below 1, a `chunk` above 256, or a decay out of range.
      TypeError: for a `top_k` or `chunk` that is not an int.

    **Randomness**: none. **Bias**: coefficients are delayed, and what waits fades by the decay. **Non-finite input**:
    the update is NaN on all workers and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.demo_compress(top_k=1, decay=1.0)
    >>> g = jnp.array([3.0, 1.0])  # coefficients 4 and 2, over sqrt(2): of the sum and of the difference
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(2), state)
    >>> print(jnp.round(first, 3), jnp.round(second, 3))
    [2. 2.] [ 1. -1.]
    """
    check_integer("top_k", top_k, 1)
    check_integer("chunk", chunk, 1, 1 << INDEX_BITS // 2)
    check_number("decay", decay, 0.0, 1.0, low_included=True)

    def init(bucket: Bucket) -> DemoState:
        return DemoState(tuple(jnp.zeros(shape).reshape(-1) for shape in _shapes(bucket, chunk)), chunk, bucket)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket = state.bucket
        shapes = _shapes(bucket, chunk)
        taken = _coefficients(gradient, bucket, chunk)
        # Chosen entry by entry: a conditional around the whole step would make XLA copy the state.
        delta = [
            jnp.where(all_finite, decay * old + new, old) for old, new in zip(state.coefficients, taken, strict=True)
        ]
        places = [_largest(x.reshape(shape), top_k) for x, shape in zip(delta, shapes, strict=True)]
        at = _positions(places, shapes)
        values = [x[positions] for x, positions in zip(delta, at, strict=True)]
        index = jnp.concatenate([jnp.ravel(place) for place in places])
        payload = jnp.concatenate([pack_uint(index, INDEX_BITS), float_bits(jnp.concatenate(values))])
        mean = _mean(comm.gather(payload), [place.shape for place in places], shapes, all_finite)
        kept = tuple(
            x.at[positions].set(jnp.where(all_finite, 0, value), unique_indices=True)
            for x, positions, value in zip(delta, at, values, strict=True)
        )
        sent = dense_report(len(index), (INDEX_BITS + 32) * len(index))
        return _entries(mean, bucket, chunk), DemoState(kept, chunk, bucket), sent

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _largest(coefficients, k: int):
    """Places of the k largest magnitudes of each row, int32[rows, k]; all of a shorter row.

    They lie in those k runs of neighbours that have the largest peaks.
    """
    rows, size = coefficients.shape
    run = max(d for d in range(1, RUN + 1) if size % d == 0)
    if size // run <= k:
        return lax.top_k(jnp.abs(coefficients), min(k, size))[1]
    split = coefficients.reshape(rows, -1, run)
    # Not jnp.max, which XLA's CPU backend hands to a library and writes its operand out first.
    peaks = lax.reduce(jnp.abs(split), jnp.float32(0), lambda a, b: jnp.where(a > b, a, b), (2,))
    runs = lax.top_k(peaks, k)[1]
    inside = jnp.take_along_axis(split, runs[:, :, None], axis=1).reshape(rows, -1)
    found = lax.top_k(jnp.abs(inside), k)[1]
    return jnp.take_along_axis(runs, found // run, axis=1) * run + found % run


def _positions(places, shapes) -> list[Array]:
    """Places within chunks -> positions in the flat coefficients."""
    return [
        jnp.ravel(place + jnp.arange(chunks, dtype=jnp.int32)[:, None] * size)
        for place, (chunks, size) in zip(places, shapes, strict=True)
    ]


def _mean(payloads, sent_shapes, shapes, all_finite) -> Sequence[Array]:
    """The mean of the workers' coefficients, added in the order of their numbers; NaN unless `all_finite`."""
    counts = [math.prod(shape) for shape in sent_shapes]
    bounds = np.cumsum(counts)[:-1]
    words = packed_size(sum(counts), INDEX_BITS)

    def add(worker, mean):
        payload = payloads[worker]
        index = unpack_uint(payload[:words], INDEX_BITS, sum(counts)).astype(jnp.int32)
        places = [part.reshape(shape) for part, shape in zip(jnp.split(index, bounds), sent_shapes, strict=True)]
        values = jnp.split(bits_float(payload[words:]) / len(payloads), bounds)
        return [
            x.at[positions].add(value, unique_indices=True)
            for x, positions, value in zip(mean, _positions(places, shapes), values, strict=True)
        ]

    start = [zeros(math.prod(shape), jnp.float32, payloads) + jnp.where(all_finite, 0.0, jnp.nan) for shape in shapes]
    return lax.fori_loop(0, len(payloads), add, start)


def _cut(bucket: Bucket, chunk: int) -> dict[int, list[Chunks]]:
    """Size of chunks -> the leaves cut into such, smallest size first."""
    by_size: dict[int, list[Chunks]] = {}
    for s in bucket.segments:
        if len(s.shape) > 1:
            shape = math.prod(s.shape[:-1]), s.shape[-1]
        else:
            shape = (1, s.size) if s.size <= chunk**2 else (math.ceil(s.size / chunk), chunk)
        grid = math.ceil(shape[0] / chunk), math.ceil(shape[1] / chunk)
        each = math.ceil(shape[0] / grid[0]), math.ceil(shape[1] / grid[1])
        by_size.setdefault(math.prod(each), []).append(Chunks(s, shape, grid, each))
    return dict(sorted(by_size.items()))


def _shapes(bucket: Bucket, chunk: int) -> list[tuple[int, int]]:
    """For each size of chunks, (chunks, size)."""
    return [(sum(math.prod(cut.grid) for cut in cuts), size) for size, cuts in _cut(bucket, chunk).items()]


def _cosines(n: int) -> tuple[np.ndarray, float]:
    """The orthonormal DCT-II, (frequency, entry), and the power of two by which its coefficients are divided.

    Then none is larger than the largest entry, and no sum leaves float32's range.
    """
    frequency, entry = np.arange(n)[:, None], np.arange(n)
    matrix = np.sqrt(2 / n) * np.cos(np.pi * (2 * entry + 1) * frequency / (2 * n))
    matrix[0] = np.sqrt(1 / n)
    return matrix, 2.0 ** math.ceil(math.log2(n) / 2)


def _coefficients(flat, bucket: Bucket, chunk: int) -> list[Array]:
    """float32[n] -> for each size of chunks the coefficients, float32[chunks * size]."""
    return [
        jnp.concatenate([_transform(flat, cut) for cut in cuts]) if len(cuts) > 1 else _transform(flat, cuts[0])
        for cuts in _cut(bucket, chunk).values()
    ]


def _entries(coefficients, bucket: Bucket, chunk: int) -> Array:
    """The inverse: float32[n], the padding between leaves zero."""
    parts = []
    for values, (size, cuts) in zip(coefficients, _cut(bucket, chunk).items(), strict=True):
        bounds = np.cumsum([math.prod(cut.grid) * size for cut in cuts])[:-1]
        parts += [(cut, _inverse(part, cut)) for cut, part in zip(cuts, jnp.split(values, bounds), strict=True)]
    if len(parts) == 1:
        return parts[0][1]
    flat = jnp.zeros(bucket.size)
    for cut, part in sorted(parts, key=lambda found: -found[0].segment.size):  # as in `_layout.flatten`
        flat = flat.at[cut.segment.offset : cut.segment.offset + cut.segment.size].set(part)
    return flat


def _transform(flat, cut: Chunks) -> Array:
    (rows, columns), (down, across), (height, width) = cut.shape, cut.grid, cut.chunk
    x = flat[cut.segment.offset : cut.segment.offset + cut.segment.size]
    x = jnp.pad(x, (0, rows * columns - len(x))).reshape(rows, columns)
    x = jnp.pad(x, ((0, down * height - rows), (0, across * width - columns)))
    (first, unit), (second, other) = _cosines(width), _cosines(height)
    x = _times(x.reshape(down, height, across, width), first.T / unit)
    return _times(x.transpose(0, 2, 3, 1), second.T / other).reshape(-1)


def _inverse(coefficients, cut: Chunks) -> Array:
    (rows, columns), (down, across), (height, width) = cut.shape, cut.grid, cut.chunk
    (first, unit), (second, other) = _cosines(width), _cosines(height)
    x = _times(coefficients.reshape(down, across, width, height), second * other)
    x = _times(x.transpose(0, 3, 1, 2), first * unit).reshape(down * height, across * width)
    return x[:rows, :columns].reshape(-1)[: cut.segment.size]


def _times(x, matrix):
    """x times the matrix along its last axis."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.matmul(rows, matrix.astype(np.float32), precision=lax.Precision.HIGHEST).reshape(x.shape)
