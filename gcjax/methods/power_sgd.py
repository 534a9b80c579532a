"""PowerSGD: every matrix as a product of two thin factors from one step of power iteration, with error feedback.

**Source.** Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.

**Wire format.** Two float32 all-reduces per bucket: the left factors P of all matrices, r * n values each, followed by
the leaves that are sent whole; then the right factors Q, r * m values each.

**Deviations.** A leaf of shape (..., m) is an n x m matrix, with n the product of the other axes: the paper's
[outputs, rest] transposed, because the kernels of JAX's libraries have their outputs last. The bytes are the same. The
columns of Q are scaled to length 1 before use, which changes nothing in exact arithmetic; without it M Q is of the
order of the gradient squared, and small gradients underflow. A column of Q that became zero is drawn again; in the
paper a single gradient of zero ends the search for good. Where the paper's code adds 1e-8 to lengths, Gram-Schmidt
orthogonalises twice, and a column that depends on the earlier ones up to rounding becomes zero.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._kernels.buckets import split_vector
from gcjax._kernels.matrices import Batch, Matrices, matrices_of, multiply, orthonormal, unit
from gcjax._types import Array, AxisNames
from gcjax._validation import check_integer, check_random_key
from gcjax._xla import kept_unless
from gcjax.extend import Bucket, Comm, Compressor, Mixing, StepInput, StepResult, compress, dense_report

MIN_RATE = 2  # a matrix is compressed if this makes it smaller by at least this factor
EPSILON = 1e-6  # a column of P counts as zero if its projection off the earlier ones has no more than this share


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PowerSGDState:
    """State of one worker and bucket.

    Attributes:
      accumulated: for each batch of b matrices float32[b, rows, columns]: M, from which `errors` subtracts the product
        of the factors. Deferred to the next update, this takes one pass less.
      left: for each batch float32[b, rank, rows], the columns of P of the last update, zero before the first. Equal on
        all workers.
      right: for each batch float32[b, rank, columns], the columns of Q, likewise.
      step: int32, updates done.
      layout: which leaves are matrices. Static.
    """

    accumulated: tuple[Array, ...]
    left: tuple[Array, ...]
    right: tuple[Array, ...]
    step: Array
    layout: Matrices = dataclasses.field(metadata={"static": True})

    @property
    def bucket(self) -> Bucket:
        return self.layout.bucket

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, what this worker has taken in minus the updates.

        Its mean over the workers is not yet sent.
        """
        return self.bucket.join(self.layout.leaves(self.errors(), jnp.zeros(self.bucket.entries)))

    def errors(self) -> list[Array]:
        """The residual as matrices: for each batch float32[b, rows, columns], e."""
        errors = []
        for e, p, q in zip(self.accumulated, self.left, self.right, strict=True):
            for k in range(p.shape[1]):  # not a matrix product: XLA fuses this with what follows
                e = e - p[:, k, :, None] * q[:, k, None, :]
            errors.append(e)
        return errors

    def mixed(self, mixing: Mixing) -> "PowerSGDState":
        errors = jax.vmap(lambda state: tuple(state.errors()))(self)
        return dataclasses.replace(
            self,
            accumulated=mixing.means(errors),
            left=mixing.zeros(self.left),
            **mixing.equal({"right": self.right, "step": self.step}),
        )


def power_sgd_compress(
    rank: int = 2,
    *,
    key: Array,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends two thin factors of every matrix, as all-reduces, whose cost does not grow with the number of workers.

        M = g + e
        P = orthonormal basis of mean(M Q)
        Q <- mean(M^T P)
        e <- M - P Q^T

    The update is P Q^T, the mean of M over workers, projected on r directions: biased, which the residual corrects. Q
    starts from a normal draw and then from the last Q, so the directions follow the largest singular vectors. A leaf of
    shape (..., m) is an n x m matrix. Matrices that the factors do not halve, vectors, scalars and leaves above 2**28
    entries are sent whole: do not stack the layers of a large model into one leaf.

    State: a float32 per parameter of the compressed leaves, and r (n + m) per matrix. Wire: 32 r (n + m) bits per
    matrix, whose values `gcjax.info` counts as entries. The optimiser comes after it: `optax.chain(
    gcjax.power_sgd_compress(key=key), optax.sgd(0.1, momentum=0.9, nesterov=True))`.

    Args:
      rank: r, columns of the factors, at least 1; 1 to 4 in the paper.
      key: random key, the same on all workers.
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a rank below 1.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.power_sgd_compress(rank=1, key=jax.random.key(0))
    >>> g = jnp.outer(jnp.arange(8.0), jnp.array([1.0, -2.0, 0.0, 4.0]))  # of rank 1, so it is sent exactly
    >>> updates, state = tx.update(g, tx.init(g))
    >>> print(gcjax.info(state).sent, bool(jnp.abs(updates - g).max() < 1e-5))
    [12] True
    """
    check_integer("rank", rank, 1)
    check_random_key("key", key)

    def pays(rows: int, columns: int) -> bool:
        return MIN_RATE * rank * (rows + columns) <= rows * columns

    def init(bucket: Bucket) -> PowerSGDState:
        layout = matrices_of(bucket, pays)
        return PowerSGDState(
            accumulated=tuple(jnp.zeros((len(b), b.rows, b.columns)) for b in layout.batches),
            left=tuple(jnp.zeros((len(b), rank, b.rows)) for b in layout.batches),
            right=tuple(jnp.zeros((len(b), rank, b.columns)) for b in layout.batches),
            step=jnp.int32(0),
            layout=layout,
        )

    def update(step: StepInput, state: PowerSGDState) -> StepResult[PowerSGDState]:
        layout = state.layout
        taken, others = layout.take(step.gradient)
        new_matrices = tuple(e + g for e, g in zip(state.errors(), taken, strict=True))
        matrices = kept_unless(step.go, new_matrices, state.accumulated)
        fill = jnp.where(step.go, 0, jnp.nan)
        mean, left, right = _low_rank(key, step.comm, state, matrices, others, fill)
        new = PowerSGDState(
            accumulated=matrices,
            left=kept_unless(step.go, tuple(left), state.left),
            right=kept_unless(step.go, tuple(right), state.right),
            step=state.step + step.go,
            layout=layout,
        )
        values = others.size + sum(factor.size for factor in (*left, *right))
        return StepResult(mean, new, dense_report(values, 32 * values))

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _low_rank(
    key: Array,
    comm: Comm,
    state: PowerSGDState,
    matrices: Sequence[Array],
    others: Array,
    fill: Array,
) -> tuple[tuple[Array, ...], list[Array], list[Array]]:
    """The update and the factors P and Q. `fill` (0 or NaN) is added to the update."""
    draws = [_draw(key, state.step, batch, q) for batch, q in zip(state.layout.batches, state.right, strict=True)]
    start = [_unit_or(q, draw) for q, draw in zip(state.right, draws, strict=True)]
    left = [multiply("brm,bnm->brn", q, m) for q, m in zip(start, matrices, strict=True)]
    *left, mean_others = _means([*left, others], comm)
    left = [orthonormal(p, EPSILON) for p in left]
    right = [multiply("brn,bnm->brm", p, m) for p, m in zip(left, matrices, strict=True)]
    right = _means(right, comm) if right else []
    out = [multiply("brn,brm->bnm", p + fill, q) for p, q in zip(left, right, strict=True)]
    return state.layout.leaves(out, mean_others + fill), left, right


def _draw(key: Array, step: Array, batch: Batch, like: Array) -> Array:
    """A normal draw of the shape of `like`, [b, rank, columns]; that of a leaf does not depend on the other leaves."""
    key = jax.random.fold_in(key, step)
    leaves = np.asarray([s.leaf for s in batch.segments])
    return jax.vmap(lambda leaf: jax.random.normal(jax.random.fold_in(key, leaf), like.shape[1:]))(leaves)


def _means(arrays: Sequence[Array], comm: Comm) -> list[Array]:
    """The mean over workers of each array, in one all-reduce."""
    return split_vector(comm.mean(jnp.concatenate([x.ravel() for x in arrays])), [x.shape for x in arrays])


def _unit_or(q: Array, draw: Array) -> Array:
    """The rows of q scaled to length 1, with rows of zeros replaced by those of `draw`."""
    q = unit(q)
    return jnp.where(jnp.any(q != 0, axis=-1, keepdims=True), q, draw)
