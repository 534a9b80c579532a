"""PowerSGD: every matrix as a product of two thin factors, found by one step of power iteration, with error feedback.

**Source.** Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.

**Wire format.** Two all-reduces of float32 per bucket: the left factors P of all matrices, r * n values each, and after
them the leaves that are sent whole; then the right factors Q, r * m values each. Up to `start_step`, one all-reduce of
everything; with a `start_step` above 0, on every step also one of an int32.

**Deviations.** A leaf of shape (..., m) counts as an n x m matrix, n the product of the other axes: the paper's
[outputs, rest] transposed, since the kernels of JAX's libraries have their outputs last. The bytes are the same. The
columns of Q are scaled to length 1 before use, which changes nothing in exact arithmetic; without it M Q is of the
order of the gradient squared, and small gradients are lost. A column of Q that has come out as zero is drawn anew; in
the paper a single gradient of zero ends the search for good. Where the paper's code adds 1e-8 to lengths, Gram-Schmidt
runs twice, and a column that depends on the earlier ones up to rounding becomes zero.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._jax_compat import zeros
from gcjax._kernels.matrices import Batch, Matrices, matrices_of, multiply, orthonormal, unit
from gcjax._types import Array
from gcjax._validation import check_integer, check_number, check_random_key
from gcjax.extend import Bucket, Comm, Compressor, compress, dense_report


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PowerSGDState:
    """State of one worker and bucket.

    accumulated: for each batch of b matrices float32[b, rows, columns], M, off which the product of the factors is
      still to be taken: the same arithmetic as doing it at once, in one pass less.
    left, right: for each batch float32[b, rank, rows] and [b, rank, columns], the columns of P and Q of the last
      update, zero before the first. Equal on all workers.
    whole: bool, the last update sent all of M.  step: int32, updates done.  layout: static.
    """

    accumulated: tuple[Array, ...]
    left: tuple[Array, ...]
    right: tuple[Array, ...]
    whole: Array
    step: Array
    layout: Matrices = dataclasses.field(metadata={"static": True})

    @property
    def bucket(self) -> Bucket:
        return self.layout.bucket

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in less the updates; its mean over the workers is not yet sent."""
        return self.layout.join(self.errors(), jnp.zeros(self.bucket.entries))

    def errors(self) -> list[Array]:
        """The same as matrices, e for each batch."""
        errors = []
        for batch, m, p, q in zip(self.layout.batches, self.accumulated, self.left, self.right, strict=True):
            p, q = p.reshape(len(batch), -1, batch.rows), q.reshape(len(batch), -1, batch.columns)
            e = m.reshape(len(batch), batch.rows, batch.columns)
            for k in range(p.shape[1]):  # a matrix product would be a pass of its own; this XLA fuses with what follows
                e = e - p[:, k, :, None] * q[:, k, None, :]
            errors.append(jnp.where(self.whole, 0, e))
        return errors


def power_sgd_compress(
    rank=2, *, key, min_rate=2.0, start_step=0, epsilon=1e-6, axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends two thin factors of every matrix; they add up over the workers, so that their number costs nothing.

    .. math::
        M = g + e, \qquad P = \mathrm{orth}(\mathrm{mean}(M Q)), \qquad Q \leftarrow \mathrm{mean}(M^\top P), \qquad
        e \leftarrow M - P Q^\top

    and the update is :math:`P Q^\top = P P^\top \mathrm{mean}(M)`: the mean over workers, projected on r directions.
    Every step begins with the last one's Q, so that these follow the largest singular vectors. The e of a worker is its
    own M less the common update; over the workers it adds up to what is not yet sent.

    A leaf of shape (..., m) is an n x m matrix, n the product of the other axes, and takes r (n + m) values on the wire
    in place of n m. Vectors, scalars and matrices for which that does not pay are sent whole.

    Costs a float32 per parameter of the compressed leaves and r (n + m) per matrix in state; 8 r operations per
    parameter. Momentum, weight decay and learning rate come after it:
    `optax.chain(gcjax.power_sgd_compress(key=key), optax.sgd(0.1, momentum=0.9, nesterov=True))`.

    Args:
      rank: r, columns of the factors, 1 or more; 1 to 4 in the paper.
      key: `jax.random.key(seed)`, the same on all workers.
      min_rate: a matrix is compressed if that makes it at least so many times smaller, 1 or more.
      start_step: updates during which everything is sent whole, while the gradient changes fast; 0 or more.
      epsilon: a column of P of which no more than this share is left, after the earlier ones were taken out, counts as
        zero; in [0, 1).
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. What `gcjax.info` counts as sent entries are the values on the wire.

    Raises:
      TypeError: when rank or start_step is not an int, or key not a key.
      ValueError: for a rank, min_rate, start_step or epsilon out of range.

    **Randomness**: shared; only for the first Q, drawn from a normal distribution, and for columns of Q that are zero.
    **Bias**: biased, made up for by the residual. **Non-finite input**: the update is NaN on all workers and every
    worker's state stays as it was. Singular values, summed over the workers, must stay below 3e38.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.power_sgd_compress(rank=1, key=jax.random.key(0))
    >>> g = jnp.outer(jnp.arange(8.0), jnp.array([1.0, -2.0, 0.0, 4.0]))  # of rank 1: arrives whole
    >>> updates, state = tx.update(g, tx.init(g))
    >>> print(gcjax.info(state).sent, bool(jnp.abs(updates - g).max() < 1e-5))
    [12] True
    """
    check_integer("rank", rank, 1)
    check_integer("start_step", start_step, 0)
    check_number("min_rate", min_rate, 1.0, low_included=True)
    check_number("epsilon", epsilon, 0.0, 1.0, low_included=True, high_included=False)
    check_random_key("key", key)

    def pays(rows: int, columns: int) -> bool:
        return min_rate * rank * (rows + columns) <= rows * columns

    def init(bucket: Bucket) -> PowerSGDState:
        layout = matrices_of(bucket, pays)
        return PowerSGDState(
            accumulated=tuple(jnp.zeros((len(b), b.rows, b.columns)) for b in layout.batches),
            left=tuple(jnp.zeros((len(b), rank, b.rows)) for b in layout.batches),
            right=tuple(jnp.zeros((len(b), rank, b.columns)) for b in layout.batches),
            whole=jnp.bool_(False),
            step=jnp.int32(0),
            layout=layout,
        )

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        layout = state.layout
        taken, others = layout.take(gradient)
        # Chosen entry by entry: a conditional around the whole step would make XLA copy the state.
        matrices = tuple(
            jnp.where(all_finite, e + g, m) for e, g, m in zip(state.errors(), taken, state.accumulated, strict=True)
        )
        fill = jnp.where(all_finite, 0, jnp.nan)

        def low_rank(comm: Comm):
            draws = [_draw(key, state.step, batch, rank) for batch in layout.batches]
            start = [_fresh(q, draw) for q, draw in zip(state.right, draws, strict=True)]
            left = [multiply("brm,bnm->brn", q, m) for q, m in zip(start, matrices, strict=True)]
            *left, mean_others = _means([*left, others], comm)
            left = [orthonormal(p, epsilon) for p in left]
            right = [multiply("brn,bnm->brm", p, m) for p, m in zip(left, matrices, strict=True)]
            right = _means(right, comm) if right else []
            out = [multiply("brn,brm->bnm", p + fill, q) for p, q in zip(left, right, strict=True)]
            return layout.join(out, mean_others + fill), left, right

        def dense(comm: Comm):
            *out, mean_others = _means([*matrices, others], comm)
            mean = layout.join([y + fill for y in out], mean_others + fill)
            none = [
                [zeros(factor.shape, factor.dtype, mean) for factor in factors] for factors in (state.left, state.right)
            ]
            return mean, *none

        values = others.size + sum(factor.size for factor in (*state.left, *state.right))
        if start_step == 0:
            started = jnp.bool_(True)
            mean, left, right = low_rank(comm)
            sent = dense_report(values, 32 * values)
        else:
            started = comm.max(state.step) >= start_step  # they agree, but a step is typed as each worker's own
            mean, left, right, wire_bytes = lax.cond(started, _metered(low_rank, comm), _metered(dense, comm))
            count = jnp.where(started, values, layout.bucket.entries)
            sent = dense_report(count, 32 * count)._replace(wire_bytes=wire_bytes)
        new = PowerSGDState(
            accumulated=matrices,
            left=tuple(jnp.where(all_finite, p, old) for p, old in zip(left, state.left, strict=True)),
            right=tuple(jnp.where(all_finite, q, old) for q, old in zip(right, state.right, strict=True)),
            whole=jnp.where(all_finite, ~started, state.whole),
            step=state.step + all_finite,
            layout=layout,
        )
        return mean, new, sent

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _draw(key, step, batch: Batch, rank: int) -> Array:
    """float32[b, rank, columns] from a normal distribution; a leaf's do not depend on what it is batched with."""
    key = jax.random.fold_in(key, step)
    leaves = np.asarray([s.leaf for s in batch.segments])
    return jax.vmap(lambda leaf: jax.random.normal(jax.random.fold_in(key, leaf), (rank, batch.columns)))(leaves)


def _means(arrays, comm: Comm) -> list[Array]:
    """The mean over workers of each, in one exchange."""
    mean = comm.mean(jnp.concatenate([x.ravel() for x in arrays]))
    ends = np.cumsum([x.size for x in arrays])
    return [part.reshape(x.shape) for part, x in zip(jnp.split(mean, ends[:-1]), arrays, strict=True)]


def _metered(exchange, comm: Comm):
    """`exchange` as a branch that also returns the bytes it moves."""

    def run():
        metered = comm.metered()
        results = exchange(metered)
        return *results, jnp.float32(metered.bytes_moved())

    return run


def _fresh(q, draw) -> Array:
    """The rows of q at unit length, and in place of those that are zero what was drawn for them."""
    q = unit(q)
    return jnp.where(jnp.any(q != 0, axis=-1, keepdims=True), q, draw)
