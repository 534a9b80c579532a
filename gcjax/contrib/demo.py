"""DeMo: each worker sends the largest cosine coefficients of a decaying sum of its gradients.

**Source.** Bowen Peng, Jeffrey Quesnelle, Diederik Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv
2411.19870, and the authors' code, https://github.com/bloc97/DeMo.

**Wire format.** One uint32 vector per worker and bucket: the positions of the coefficients within their chunks, 16 bits
each, the first half of them in the words' lower halves, the second in the upper; then the coefficients as float32,
scaled as `_cosines` says, in the same order: by chunk size, smallest first, then by leaf, in the order of
`Bucket.segments`.

**Deviations.** The learning rate comes after the compressor, not inside the sum; because the optimiser takes the sign,
a constant rate changes nothing. Each coefficient is averaged over all workers; the authors' code averages over those
that sent it, and then the updates do not add up to the gradients. An axis is divided into the fewest equal chunks of at
most `chunk` entries, the last one padded with zeros. The original takes the largest divisor, which is small for some
sizes, and of small chunks nearly everything is sent. For the same reason a vector longer than chunk**2 is divided like
a matrix with rows of `chunk` entries. A leaf with three or more axes, which the original does not take, is divided like
a matrix with its last axis as columns. The sum is kept as coefficients: the same arithmetic with one transform less.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._kernels.bits import packed_size
from gcjax._kernels.buckets import split_vector
from gcjax._kernels.chunks import ChunkGroup, Chunks, chunk_groups, from_groups, into_groups, largest_of_rows, sum_sent
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_integer, check_number
from gcjax._xla import kept_unless
from gcjax.extend import (
    Bucket,
    Compressor,
    StepInput,
    StepResult,
    bits_float,
    compress,
    dense_report,
    float_bits,
    pack_uint,
    unpack_uint,
)

INDEX_BITS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DemoState:
    """State of one worker and bucket.

    Attributes:
      coefficients: for each chunk size, smallest first, float32[chunks * size]: the cosine coefficients of delta, the
        decaying sum of what was taken in and not yet sent, scaled as `_cosines` says.
      chunk: as in `demo_compress`. Static.
      bucket: where the leaves lie. Static.
    """

    coefficients: tuple[Array, ...]
    chunk: int = dataclasses.field(metadata={"static": True})
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, delta."""
        return self.bucket.join(from_groups(self.coefficients, self.bucket, self.chunk, _inverse))


def demo_compress(
    top_k: int = 32,
    *,
    chunk: int = 64,
    decay: ArrayLike = 0.999,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the `top_k` largest cosine coefficients of every chunk of a decaying sum of gradients.

        D <- decay * D + g
        q = the top_k largest coefficients of each chunk of DCT(D)
        D <- D - inverse DCT(q)

    The update is the inverse DCT of the mean of q over the workers. DCT is the orthonormal discrete cosine transform,
    type II, of chunks of 64 x 64 of a matrix, along both axes, and of chunks of 64 of a vector. Coefficients are
    delayed and decay while they wait: biased.

    State: a float32 per parameter. Wire: 48 bits per coefficient. Their number is fixed: with the defaults 1/128 of the
    parameters in matrices, but half of those in vectors and in matrices with a short axis. A step takes as long as
    about 15 additions of two vectors of gradient length on a CPU, for any number of workers. DeMo takes the sign of the
    update, and no momentum besides D: `optax.chain(gcjax.contrib.demo_compress(), optax.scale_by_sign(),
    optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))`.

    Args:
      top_k: number of coefficients to send of each chunk; all of a smaller chunk.
      chunk: largest length of a chunk along an axis, up to 256.
      decay: beta, in [0, 1]. With 1 nothing is lost. May be traced (`optax.inject_hyperparams`, the others static).
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for an argument out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.demo_compress(top_k=1, decay=1.0)
    >>> g = jnp.array([3.0, 1.0])  # coefficients: sum and difference, 4 and 2, over sqrt(2)
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(2), state)
    >>> print(jnp.round(first, 3), jnp.round(second, 3))
    [2. 2.] [ 1. -1.]
    """
    check_integer("top_k", top_k, 1)
    check_integer("chunk", chunk, 1, 1 << INDEX_BITS // 2)
    check_number("decay", decay, 0.0, 1.0, low_included=True)

    def init(bucket: Bucket) -> DemoState:
        return DemoState(tuple(jnp.zeros(g.shape).reshape(-1) for g in chunk_groups(bucket, chunk)), chunk, bucket)

    def update(step: StepInput, state: DemoState) -> StepResult[DemoState]:
        bucket = state.bucket
        groups = chunk_groups(bucket, chunk)
        taken = into_groups(step.gradient, bucket, chunk, _transform)
        decayed = [decay * old + new for old, new in zip(state.coefficients, taken, strict=True)]
        delta = kept_unless(step.go, decayed, list(state.coefficients))
        indices = [largest_of_rows(jnp.abs(x).reshape(g.shape), top_k) for x, g in zip(delta, groups, strict=True)]
        at = [g.flat(found) for g, found in zip(groups, indices, strict=True)]
        values = [x[positions] for x, positions in zip(delta, at, strict=True)]
        index = jnp.concatenate([jnp.ravel(found) for found in indices])
        payload = jnp.concatenate([pack_uint(index, INDEX_BITS), float_bits(jnp.concatenate(values))])
        payloads = step.comm.gather(payload)
        shapes = [found.shape for found in indices]

        def decode(payload: Array) -> list[tuple[Array, Array]]:
            return _decode(payload, len(payloads), groups, shapes)

        mean = sum_sent(payloads, decode, [math.prod(g.shape) for g in groups], step.go)
        kept = tuple(
            x.at[positions].set(jnp.where(step.go, 0, value), unique_indices=True)
            for x, positions, value in zip(delta, at, values, strict=True)
        )
        report = dense_report(len(index), (INDEX_BITS + 32) * len(index))
        return StepResult(from_groups(mean, bucket, chunk, _inverse), DemoState(kept, chunk, bucket), report)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _decode(
    payload: Array, workers: int, groups: list[ChunkGroup], shapes: list[tuple[int, ...]]
) -> list[tuple[Array, Array]]:
    """Positions and values of one worker's coefficients, the values divided by the number of workers."""
    counts = [math.prod(shape) for shape in shapes]
    words = packed_size(sum(counts), INDEX_BITS)
    indices = split_vector(unpack_uint(payload[:words], INDEX_BITS, sum(counts)).astype(jnp.int32), shapes)
    values = split_vector(bits_float(payload[words:]) / workers, [(count,) for count in counts])
    places = [group.flat(found) for group, found in zip(groups, indices, strict=True)]
    return list(zip(places, values, strict=True))


def _cosines(n: int) -> tuple[np.ndarray, float]:
    """The orthonormal DCT-II, [frequency, entry], and the power of two by which its coefficients are divided.

    After that, none is larger than the largest entry, and no sum leaves float32's range.
    """
    frequency, entry = np.arange(n)[:, None], np.arange(n)
    matrix = np.sqrt(2 / n) * np.cos(np.pi * (2 * entry + 1) * frequency / (2 * n))
    matrix[0] = np.sqrt(1 / n)
    return matrix, 2.0 ** math.ceil(math.log2(n) / 2)


def _transform(leaf: Chunks, x: Array) -> Array:
    """The coefficients of a leaf, float32[chunks * size]."""
    height, width = leaf.chunk
    (first, unit), (second, other) = _cosines(width), _cosines(height)
    x = _times(leaf.divide(x), first.T / unit)
    return _times(x.transpose(0, 2, 3, 1), second.T / other).reshape(-1)


def _inverse(leaf: Chunks, coefficients: Array) -> Array:
    """The inverse of `_transform`."""
    (down, across), (height, width) = leaf.grid, leaf.chunk
    (first, unit), (second, other) = _cosines(width), _cosines(height)
    x = _times(coefficients.reshape(down, across, width, height), second * other)
    return leaf.unite(_times(x.transpose(0, 3, 1, 2), first * unit))


def _times(x: Array, matrix: np.ndarray) -> Array:
    """x times the matrix along its last axis."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.matmul(rows, matrix.astype(np.float32), precision=lax.Precision.HIGHEST).reshape(x.shape)
