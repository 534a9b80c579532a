"""1-bit SGD: one bit per entry and two values per column, with error feedback; owners add them and compress again.

**Source.** Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-Bit Stochastic Gradient Descent and its Application
to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, doi 10.21437/Interspeech.2014-274.

**Wire format.** A column of r entries takes ceil(r / 32) + 2 uint32 words: its mask words, 1 for negative, entry i in
bit i % 32 of word i // 32; then two float32, the mean of its entries of at least 0 and the mean of its negative ones.
Per bucket, first an all-to-all: every worker gets the columns that it owns, matrix by matrix in the order of
`Bucket.segments`, the first word of all columns, then the second, and so on. Then an all-gather of the means over the
workers in the same form. Of c columns, worker w of p owns ceil(c / p), beginning at column w ceil(c / p); empty columns
pad the last workers' vectors.

**Deviations.** A leaf of shape (..., c) is a matrix of c columns: the last axis is the output in JAX's layers. A leaf
with a single row or column is divided into columns of 512 consecutive entries, so that several workers can own parts of
it. The owner adds its own gradient to the mean unquantised, because quantising what is not sent would only add error.
Its columns therefore have no first error, and the second one takes its place, times the number of workers: one vector
of state instead of two. The paper's dense start, dense small leaves and AdaGrad before the second quantisation are left
to the user.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.bits import WORD, count_bits
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._xla import kept_unless
from gcjax.extend import (
    Bucket,
    Comm,
    Compressor,
    Segment,
    StepInput,
    StepResult,
    bits_float,
    compress,
    dense_report,
    float_bits,
)

COLUMN = 512  # entries in a column of a leaf that is not a matrix: 1 + 64 / 512 bits per entry
_UNROLLED = 16  # workers whose columns are added in one pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneBitState:
    """State of one worker and bucket.

    Attributes:
      errors: for each of `_blocks` a float32 array of its shape: this worker's quantisation error; in the columns that
        it owns, the error of the mean over the workers, times their number.
      bucket: where the leaves lie. Static.
    """

    errors: tuple[Array, ...]
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, what this worker has taken in and not yet sent."""
        return self.bucket.join(_leaves(self.errors, self.bucket))


def onebit_compress(
    *, axis_name: AxisNames = None, inner_axis_name: AxisNames = None
) -> optax.GradientTransformationExtraArgs:
    """Sends the sign of every entry of gradient plus residual, and for each column the mean of each sign.

        a = g + e
        y = m+  where a >= 0,  m-  where a < 0
        e <- a - y

    with m+ the mean of a column's entries of at least 0, and m- that of the negative ones; the module's docstring
    defines columns. The owner of a column takes the mean of y over the workers, with its own a unquantised, and adds
    the error of its last mean. It codes the result in the same way for all, and its decoded code is the update. The
    code is biased, which the residual corrects; nothing is lost.

    State: a float32 per parameter. Wire: 1 bit per parameter and 64 per column each way, for any number of workers.
    Columns of few rows save little, and those of a leaf are padded to a multiple of the workers: send small leaves
    dense (`optax.partition`), as the paper does. The optimiser comes after it: `optax.chain(gcjax.onebit_compress(),
    optax.sgd(0.1))`.

    Args:
      axis_name, inner_axis_name: see docs/common.md.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.onebit_compress()
    >>> g = jnp.array([[3.0, -1.0], [1.0, 2.0]])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # the first column of a is 4, 0
    >>> print(first.tolist(), second.tolist())
    [[2.0, -1.0], [2.0, 2.0]] [[2.0, -1.0], [2.0, 2.0]]
    """

    def init(bucket: Bucket) -> OneBitState:
        return OneBitState(tuple(_blocks([jnp.zeros(s.shape) for s in bucket.segments], bucket)), bucket)

    def update(step: StepInput, state: OneBitState) -> StepResult[OneBitState]:
        bucket = state.bucket
        matrices = _matrices(bucket, step.comm)
        summed = tuple(e + g for e, g in zip(state.errors, _blocks(step.gradient, bucket), strict=True))
        kept = kept_unless(step.go, summed, state.errors)
        a = [m.pad(x) for m, x in zip(matrices, kept, strict=True)]

        # To the owners. A worker sends means of zero, which change nothing, in a skipped step and of its own columns.
        codes = [m.encode(x, m.heights) for m, x in zip(matrices, a, strict=True)]
        first = [jnp.where(step.go & ~m.is_owned(), means, 0) for m, (_, means) in zip(matrices, codes, strict=True)]
        shares = [m.shares(words, means) for m, (words, _), means in zip(matrices, codes, first, strict=True)]
        received = _in_one(step.comm.all_to_all, shares)
        a = [m.add_to_owned(x, shares) for m, x, shares in zip(matrices, a, received, strict=True)]

        # From the owners.
        codes = [m.encode(m.owned(x, m.axis), m.owned(m.heights, 0)) for m, x in zip(matrices, a, strict=True)]
        second = [jnp.where(step.go, means / step.comm.size, 0) for _, means in codes]
        shares = [_code(words, means)[None] for (words, _), means in zip(codes, second, strict=True)]
        gathered = _in_one(lambda shares: step.comm.gather(shares[0]), shares)
        updates = [m.decode(m.unshare(shares)) for m, shares in zip(matrices, gathered, strict=True)]

        taken = [m.replace_owned(x, step.comm.size * y, 1) for m, x, y in zip(matrices, first, second, strict=True)]
        left = [
            m.without_padding(x - m.choose(x < 0, y), m.heights) for m, x, y in zip(matrices, a, taken, strict=True)
        ]
        updates = [m.unpad(jnp.where(step.go, x, jnp.nan)) for m, x in zip(matrices, updates, strict=True)]
        new = OneBitState(tuple(m.unpad(x) for m, x in zip(matrices, left, strict=True)), bucket)
        report = dense_report(bucket.entries, bucket.entries + 64 * sum(m.columns for m in matrices))
        return StepResult(_leaves(updates, bucket), new, report)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _is_matrix(s: Segment) -> bool:
    return len(s.shape) > 1 and 1 < s.shape[-1] < s.size


def _columns(s: Segment) -> int:
    return -(-s.size // COLUMN)  # of a leaf that is not a matrix


def _blocks(leaves: Sequence[Array], bucket: Bucket) -> list[Array]:
    """The matrices [rows, columns]; then all other leaves as one block [columns, rows], padded with zeros."""
    pairs = list(zip(bucket.segments, leaves, strict=True))
    blocks = [x.reshape(-1, s.shape[-1]) for s, x in pairs if _is_matrix(s)]
    others = [x.reshape(-1) for s, x in pairs if not _is_matrix(s)]
    if not others:
        return blocks
    rows = min(COLUMN, -(-max(map(len, others)) // WORD) * WORD)
    return [*blocks, jnp.concatenate([jnp.pad(x, (0, -len(x) % rows)).reshape(-1, rows) for x in others])]


def _leaves(blocks: Sequence[Array], bucket: Bucket) -> tuple[Array, ...]:
    """The inverse of `_blocks`."""
    leaves = []
    matrices, begin = iter(blocks), 0
    for s in bucket.segments:
        if _is_matrix(s):
            x = next(matrices)
        else:
            x = blocks[-1][begin : begin + _columns(s)]
            begin += _columns(s)
        leaves.append(x.reshape(-1)[: s.size].reshape(s.shape))
    return tuple(leaves)


def _matrices(bucket: Bucket, comm: Comm) -> list["_Matrix"]:
    """One for each of `_blocks`."""
    heights = [np.full(s.shape[-1], s.size // s.shape[-1]) for s in bucket.segments if _is_matrix(s)]
    others = [np.minimum(COLUMN, s.size - np.arange(0, s.size, COLUMN)) for s in bucket.segments if not _is_matrix(s)]
    matrices = [_Matrix(h, False, comm) for h in heights]
    return [*matrices, _Matrix(np.concatenate(others), True, comm)] if others else matrices


class _Matrix:
    """The columns of one of `_blocks`. Each worker owns `width` of them; empty columns pad those of the last workers.

    `means` are float32[2, columns]: of the entries of each column that are at least 0, and of the negative ones.

    Attributes:
      columns: number of columns, without the empty ones.
      transposed: the block is [columns, rows] instead of [rows, columns], and rows are a multiple of 32.
      comm: the collectives.
      axis: the block's axis of columns.
      rows: length of the block's other axis.
      width: number of columns that each worker owns.
      heights: float32[workers * width], entries in each column; below them the block has zeros.
    """

    def __init__(self, heights: np.ndarray, transposed: bool, comm: Comm) -> None:
        self.columns, self.transposed, self.comm = len(heights), transposed, comm
        self.axis = 0 if transposed else 1
        rows = int(heights.max())
        self.rows = -(-rows // WORD) * WORD if transposed else rows
        self.width = -(-self.columns // comm.size)
        self.heights = np.pad(heights.astype(np.float32), (0, self.width * comm.size - self.columns))

    def pad(self, block: Array) -> Array:
        """The block with the empty columns."""
        empty = (0, len(self.heights) - self.columns)
        return jnp.pad(block, (empty, (0, 0)) if self.transposed else ((0, 0), empty))

    def unpad(self, block: Array) -> Array:
        return lax.slice_in_dim(block, 0, self.columns, axis=self.axis)

    def is_owned(self) -> Array:
        """bool[workers * width], whether this worker owns the column."""
        return self.comm.rank() == np.arange(len(self.heights)) // self.width

    def owned(self, x: ArrayLike, axis: int) -> Array:
        """The owned columns of x, which has all columns along `axis`."""
        return lax.dynamic_slice_in_dim(jnp.asarray(x), self.comm.rank() * self.width, self.width, axis)

    def replace_owned(self, x: Array, columns: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(x, columns, self.comm.rank() * self.width, axis)

    def add_to_owned(self, block: Array, shares: Array) -> Array:
        """The block with the workers' shares added to the owned columns. This worker's own share is zero."""
        if (workers := self.comm.size) == 1:
            return block

        def add(worker: Array, total: Array) -> Array:
            return total + self.decode(shares[worker])

        total = lax.fori_loop(0, workers, add, self.owned(block, self.axis), unroll=min(workers, _UNROLLED))
        return self.replace_owned(block, self.without_padding(total, self.owned(self.heights, 0)), self.axis)

    def without_padding(self, block: Array, heights: Array | np.ndarray) -> Array:
        """The block with zeros below the heights."""
        return jnp.where(np.arange(self.rows) < heights[:, None], block, 0) if self.transposed else block

    def encode(self, block: Array, heights: Array | np.ndarray) -> tuple[Array, Array]:
        """Mask words of the negative entries, uint32[words, columns], and means."""
        words, plus, minus = self._fold(block)
        count = count_bits(words).astype(jnp.float32)
        count, plus, minus = lax.reduce((count, plus, minus), (jnp.float32(0),) * 3, _add, (0,))
        return words, jnp.stack([plus / jnp.maximum(heights - count, 1), minus / jnp.maximum(count, 1)])

    def _fold(self, block: Array) -> list[Array]:
        if self.transposed:
            return [x.reshape(len(block), -1).T for x in _fold(block.reshape(-1, WORD, 1))]
        body = self.rows // WORD * WORD
        folded = _fold(block[:body].reshape(-1, WORD, block.shape[1]))
        if body < self.rows:  # separately, because padding the whole block would copy it
            end = jnp.pad(block[body:], ((0, WORD - self.rows + body), (0, 0)))
            folded = [jnp.concatenate(parts) for parts in zip(folded, _fold(end[None]), strict=True)]
        return folded

    def decode(self, code: Array) -> Array:
        """uint32[words + 2, columns] -> the block."""
        words = code[:-2].T.reshape(-1, 1) if self.transposed else code[:-2]
        bits = (words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[:, None]) & 1
        bits = bits.reshape(-1, self.rows) if self.transposed else bits.reshape(-1, words.shape[1])[: self.rows]
        return self.choose(bits != 0, bits_float(code[-2:]))

    def choose(self, negative: Array, means: Array) -> Array:
        """The block with each entry's mean."""
        plus, minus = jnp.expand_dims(means, 2 - self.axis)
        return jnp.where(negative, minus, plus)

    def shares(self, words: Array, means: Array) -> Array:
        """The codes of the columns, by owner: uint32[workers, words + 2, width]."""
        code = _code(words, means)
        return code.reshape(len(code), self.comm.size, self.width).transpose(1, 0, 2)

    def unshare(self, shares: Array) -> Array:
        """The inverse of `shares`. A loop, because XLA would repeat a transposition for every entry."""

        def put(worker: Array, code: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(code, shares[worker], worker * self.width, 1)

        workers, words, _ = shares.shape
        start = zeros((words, len(self.heights)), jnp.uint32, shares)
        code: Array = lax.fori_loop(0, workers, put, start, unroll=min(workers, _UNROLLED))
        return code


def _code(words: Array, means: Array) -> Array:
    return jnp.concatenate([words, float_bits(means)])


def _fold(x: Array) -> list[Array]:
    """float32[n, 32, columns] -> for each 32: mask word of the negative, sum of the others, sum of the negative."""

    def merge(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return a[0] | b[0], *_add(a[1:], b[1:])

    masks = jnp.where(x < 0, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)[:, None], jnp.uint32(0))
    start = (jnp.uint32(0), jnp.float32(0), jnp.float32(0))
    folded: list[Array] = lax.reduce((masks, jnp.maximum(x, 0), jnp.minimum(x, 0)), start, merge, (1,))
    return folded


def _add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _in_one(collective: Callable[[Array], Array], shares: list[Array]) -> list[Array]:
    """One collective for the shares of all matrices, each [workers or 1, words, width]."""
    moved = collective(jnp.concatenate([share.reshape(len(share), -1) for share in shares], axis=1))
    ends = np.cumsum([share[0].size for share in shares])
    parts = jnp.split(moved, ends[:-1], axis=1)
    return [part.reshape(-1, *share.shape[1:]) for part, share in zip(parts, shares, strict=True)]
