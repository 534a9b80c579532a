"""EF21: workers send the k largest entries of the change of their gradient since the others last knew it.

**Source.** Peter Richtarik, Igor Sokolov, Ilyas Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS 2021, arXiv 2106.05203, on several nodes, with top-k as the compressor. With
momentum before it: Ilyas Fatkhullin, Alexander Tyurin, Peter Richtarik, "Momentum Provably Improves Error Feedback!",
NeurIPS 2023, arXiv 2305.15155, EF21-SGDM.

**Wire format.** As `top_k_compress`: one uint32 vector per worker and bucket with the number of entries used (1 word);
k indices; k float32 values. k is rounded up to a multiple of 32 by padding.

**Deviations.** (1) h_i starts at 0, so that the first step sends C(g), one of the paper's two beginnings; the other
sends g whole. (2) k counts over the whole model (per part of 2**28 entries above that). Zeros are not sent, so fewer
than k may be. (3) h and the mean of the h_i are one number in the paper. Here each is summed up in float32, and they
drift apart by the rounding: about 1e-7 of the largest value that h has had, times the square root of the times sent.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._jax_compat import varying_axes
from gcjax._types import Array, PyTree
from gcjax._validation import check_number
from gcjax.extend import (
    Bucket,
    Compressor,
    CompressState,
    Message,
    TransportState,
    capacities_for,
    compress,
    count_for_density,
    exchange,
    float_code,
    top_k_mask,
    unpack_mask,
)


class EF21State(NamedTuple):
    """State of the transform.

    changes: `CompressState` of what sends the c_i, per worker.
    mean: h, a pytree like the parameters with flat float32 leaves (flat, so that XLA can work in their buffers), equal
      on all workers and replicated, unlike other methods' state.
    """

    changes: CompressState
    mean: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChangeState:
    """State of one worker and bucket of n entries.

    known: float32[n], h_i, this worker's gradient as all workers know it.  bucket: where the leaves lie, static.
    """

    known: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32[n], zero: nothing waits. What is not sent of a gradient counts no more once there is another."""
        return jnp.zeros(self.bucket.size)


def ef21_compress(density, *, axis_name=None, inner_axis_name=None) -> optax.GradientTransformationExtraArgs:
    r"""Sends the k entries in which the gradient differs most from what the workers know of it; the update is dense.

    .. math::
        c_i = \mathrm{top}_k(g_i - h_i), \qquad h_i \leftarrow h_i + c_i, \qquad
        h \leftarrow h + \frac{1}{p} \sum_i c_i

    with k = max(1, floor(density * parameters)); the update is h, the mean of the p workers' h_i. Where gradients
    settle, the h_i reach them and the error goes to zero: at a constant learning rate, gradient descent reaches the
    optimum of workers that disagree, where a residual of top-k leaves it in a neighbourhood. Changes that are not sent
    do not add up; the next gradient replaces this one.

    It is made for gradients without noise: the changes of noisy ones never get small, and h lags behind. Average
    stochastic gradients first (EF21-SGDM): `optax.chain(gcjax.per_worker(optax.ema(0.9), "data"),
    gcjax.ef21_compress(0.01, axis_name="data"), optax.sgd(0.1))`. Clipping of local gradients stands before it; weight
    decay and the learning rate come after it. The rate must be smaller the lower the density.

    Costs two float32 per parameter in state; 64 bits per sent entry on the wire.

    Args:
      density: share of the entries to send, in (0, 1].
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a density out of range.

    **Randomness**: none. **Bias**: h lags behind the gradients; :math:`\|g_i - h_i\|^2` falls to :math:`1 - k/d` of
    what it was or less in each step in which :math:`g_i` stays. **Non-finite input**: the update is NaN on all workers
    and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.ef21_compress(density=0.5)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)
    >>> third, state = tx.update(jnp.zeros(4), state)
    >>> print(first, second, third)
    [3. 0. 2. 0.] [ 3.  -1.   2.   0.5] [ 0.  -1.   0.   0.5]
    """
    check_number("density", density, 0.0, 1.0)
    code, no_scales = float_code(32), jnp.zeros(0, jnp.uint32)

    def init(bucket: Bucket) -> ChangeState:
        return ChangeState(jnp.zeros(bucket.size), bucket)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket, known = state.bucket, state.known
        k = count_for_density(density, bucket.entries)
        change = gradient - known
        message = Message(change, top_k_mask(change, k), code, no_scales, bucket, capacities_for(k))
        exchanged = exchange(message, TransportState.create(), comm, all_finite)
        sent = unpack_mask(jnp.where(all_finite, exchanged.sent, 0), bucket.size)
        return exchanged.mean, ChangeState(jnp.where(sent, known + change, known), bucket), exchanged.report

    return _summed_up(compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name))


def _summed_up(changes: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The sum over the steps of the updates of `changes`, but for skipped ones.

    It stands outside the compressor because the state there is typed as varying between workers, and what comes from it
    could not leave `jax.shard_map` as equal on all of them.
    """

    def init(params):
        if axes := varying_axes(params):
            raise ValueError(
                f"ef21_compress takes no parameters that are sharded over {sorted(axes)}, as it keeps the sum of its "
                "updates unsharded; top_k_compress does"
            )
        return EF21State(changes.init(params), jax.tree.map(lambda x: jnp.zeros(jnp.size(x)), params))

    def update(updates, state, params=None, **extra_args):
        # In float32 throughout: rounded to the gradient's dtype, h would drift away from the mean of the h_i.
        whole = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        change, new = changes.update(whole, state.changes, params, **extra_args)
        mean = jax.tree.map(lambda h, c: h + jnp.ravel(c), state.mean, change)
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isnan(new), old, new), mean, state.mean)
        return jax.tree.map(lambda h, x: h.reshape(x.shape).astype(x.dtype), mean, updates), EF21State(new, kept)

    return optax.GradientTransformationExtraArgs(init, update)
