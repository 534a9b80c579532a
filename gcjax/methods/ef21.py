"""EF21: workers send the k largest entries of the change of their gradient since what the others know of it.

**Source.** Peter Richtarik, Igor Sokolov, Ilyas Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS 2021, arXiv 2106.05203, on several nodes, with top-k as the compressor. With
momentum before it: Ilyas Fatkhullin, Alexander Tyurin, Peter Richtarik, "Momentum Provably Improves Error Feedback!",
NeurIPS 2023, arXiv 2305.15155, EF21-SGDM.

**Wire format.** As `top_k_compress`: one uint32 vector per worker and bucket with the number of entries used (1 word)
and the entries in compact form, always gathered.

**Deviations.** (1) h_i starts at 0, so the first step sends C(g), one of the paper's two options; the other sends all
of g. (2) k counts the entries of the whole model (of each bucket of a model above 2**28 entries). Zeros are not sent,
so fewer than k entries may be. (3) In the paper h is the mean of the h_i. Here each is a float32 sum of its own, and
rounding makes them drift apart: by about 1e-7 of the largest value that h has had, times the square root of how often
the entry was sent.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._jax_compat import varying_axes
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import static_share
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

    Attributes:
      changes: `CompressState` of the transform that sends the c_i, per worker.
      mean: h, a pytree like the parameters with flat float32 leaves (flat, so that XLA can reuse their buffers), equal
        on all workers and replicated, unlike the state of other methods.
    """

    changes: CompressState
    mean: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChangeState:
    """State of one worker and bucket.

    Attributes:
      known: float32 of the bucket's shape, h_i, what all workers know of this worker's gradient.
      bucket: where the leaves lie. Static.
    """

    known: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, zero: nothing waits. The next gradient replaces what was not sent of this."""
        return jnp.zeros(self.bucket.shape)


def ef21_compress(
    density: float,
    *,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
    overlap: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the k entries in which the gradient differs most from what the workers know of it; the update is dense.

        c_i = the k largest entries of g_i - h_i     for worker i
        h_i <- h_i + c_i
        h <- h + (sum over the workers of c_i) / p

    with k = max(1, floor(density * parameters)); the update is h, the mean of the p workers' h_i. When gradients
    converge, the h_i converge to them and the error goes to zero: at a constant learning rate, gradient descent reaches
    the optimum of workers that disagree. Top-k with a residual only reaches a neighbourhood of it. Changes that are not
    sent do not add up; the next gradient replaces this one.

    EF21 is meant for gradients without noise: the changes of noisy gradients never become small, and h lags behind.
    Average stochastic gradients first (EF21-SGDM): `optax.chain(gcjax.local_transform(optax.ema(0.9), "data"),
    gcjax.ef21_compress(0.01, axis_name="data"), optax.sgd(0.1))`. Clipping of local gradients comes before it; weight
    decay and the learning rate come after it. A lower density needs a lower learning rate.

    State: two float32 per parameter. Wire: 41 bits per sent entry at density 1/100.

    Args:
      density: share of the entries to send, in (0, 1].
      axis_name, inner_axis_name, overlap: as in `gcjax.compress`.

    Raises:
      ValueError: for a density out of range.

    **Randomness**: none. **Bias**: h lags behind the gradients; |g_i - h_i|^2 falls to 1 - k / d of
    what it was or less in each step in which g_i stays. **Non-finite input**: the update is NaN on all workers
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
    density = static_share("density", density)
    code = float_code(32)

    def init(bucket: Bucket) -> ChangeState:
        return ChangeState(jnp.zeros(bucket.shape), bucket)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket, known = state.bucket, state.known
        k = count_for_density(density, bucket.entries)
        change = bucket.join(gradient) - known
        message = Message(change, top_k_mask(change, k), code, bucket, capacities_for(k, bucket.entries))
        exchanged = exchange(message, TransportState.create(bucket), comm, all_finite)
        sent = unpack_mask(jnp.where(all_finite, exchanged.sent, 0))
        return exchanged.mean, ChangeState(jnp.where(sent, known + change, known), bucket), exchanged.report

    return _accumulated(
        compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name, overlap=overlap)
    )


def _accumulated(changes: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """A transform whose update is the sum of all updates of `changes`, without those of skipped steps.

    The sum is kept outside the compressor. State inside it is typed as varying between workers, so the sum could not
    leave `jax.shard_map` as equal on all of them.
    """

    def init(params):
        if axes := varying_axes(params):
            raise ValueError(
                f"ef21_compress takes no parameters that are sharded over {sorted(axes)}, because it keeps the sum of "
                "its updates unsharded; use top_k_compress"
            )
        return EF21State(changes.init(params), jax.tree.map(lambda x: jnp.zeros(jnp.size(x), jnp.float32), params))

    def update(updates, state, params=None, **extra_args):
        # All in float32: rounded to the gradient's dtype, h would drift away from the mean of the h_i.
        whole = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        change, new = changes.update(whole, state.changes, params, **extra_args)
        mean = jax.tree.map(lambda h, c: h + jnp.ravel(c), state.mean, change)
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isnan(new), old, new), mean, state.mean)
        return jax.tree.map(lambda h, x: h.reshape(x.shape).astype(x.dtype), mean, updates), EF21State(new, kept)

    return optax.GradientTransformationExtraArgs(init, update)
