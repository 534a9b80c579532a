"""Threshold compression: send the sign of every entry whose residual exceeds a fixed threshold.

**Source.** Nikko Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, doi
10.21437/Interspeech.2015-354.

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then one word per slot,
sign (bit 31) and index (bits 0 to 30).

**Deviations.** The paper also compresses the words by Golomb-Rice codes of index gaps, which has no static size; the
plain words are sent. What exceeds the largest capacity stays in the residual.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from gcjax import _checks
from gcjax._bits import pack_mask, unpack_mask
from gcjax._codec import sign_code
from gcjax._layout import Bucket
from gcjax._owners import take_back
from gcjax._sparse import capacities_for, check_capacity, check_transport, default_capacities, exchange
from gcjax._transform import compress
from gcjax._types import Array, Compressor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StromState:
    """State of one worker and bucket of n entries.

    accumulated: float32[n], r, the gradient taken in and not yet sent, but for what `reset` still takes off.
    reset: uint32[words_for(n)], packed mask of the entries from which the threshold is taken before the next gradient
      is added, which saves a pass.
    threshold: float32, tau as it was for the last payload.  first: int32, where owners' queues begin next.
    bucket: where the leaves lie, static.
    """

    accumulated: Array
    reset: Array
    threshold: Array
    first: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in and not yet sent."""
        r = self.accumulated
        return jnp.where(unpack_mask(self.reset, self.bucket.size), r - jnp.copysign(self.threshold, r), r)


def strom_compress(
    threshold, *, capacity=None, transport="all_gather", axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the sign of every entry whose accumulated gradient exceeds a threshold, one word an entry.

    .. math::
        r \leftarrow r + g, \qquad |r| > \tau \;\Rightarrow\; \text{send } \mathrm{sign}(r),\;
        r \leftarrow r - \tau\,\mathrm{sign}(r)

    and the update is the mean over workers of :math:`\tau\,\mathrm{sign}(r)` where sent, zero elsewhere. An entry gives
    at most one threshold a step: where gradients are much larger, the residual grows without bound. Choose tau by the
    size of the gradient that the compressor sees; the optimiser comes after it, for example
    `optax.chain(gcjax.strom_compress(0.01), optax.sgd(0.1))`, and so do momentum, weight decay and the learning rate.

    Costs a float32 and a bit per parameter in state; 32 bits per sent entry on the wire.

    Args:
      threshold: tau, above 0. May be traced (`optax.inject_hyperparams`).
      capacity, transport, axis_name, inner_axis_name: as in `gcjax.variance_compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a threshold or capacity out of range.

    **Randomness**: none. **Bias**: entries are delayed; nothing is lost. **Non-finite input**: the update is NaN on all
    workers and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.strom_compress(threshold=0.5)
    >>> g = jnp.array([0.75, -0.25])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # by now 1.0 and -0.5 have come together, of which 0.5 is gone
    >>> print(first, second)
    [0.5 0. ] [0.5 0. ]
    """
    _checks.number("threshold", threshold, 0.0)
    check_capacity(capacity)
    check_transport(transport)
    code = sign_code(threshold)

    def init(bucket: Bucket) -> StromState:
        words = jnp.zeros(bucket.words, jnp.uint32)
        return StromState(jnp.zeros(bucket.size), words, jnp.float32(threshold), jnp.int32(0), bucket)

    def update(gradient, sum_grad_squared, state, comm, ok):
        del sum_grad_squared
        bucket = state.bucket
        # Chosen entry by entry: a conditional around the whole step would make XLA copy the state.
        r = jnp.where(ok, state.residual + gradient, state.accumulated)
        words = pack_mask(jnp.abs(r) > threshold)
        ladder = default_capacities(bucket.entries) if capacity is None else capacity
        no_scale, slots = jnp.zeros(0, jnp.uint32), capacities_for(ladder, bucket)
        out = exchange(r, words, state.first, no_scale, None, code, slots, comm, ok, transport=transport)
        tau = jnp.where(ok, jnp.float32(threshold), state.threshold)
        reset = jnp.where(ok, out.words, state.reset)
        reset, (r,) = take_back(out.returned, reset, (r,), lambda word, r: (r - jnp.copysign(tau, r),))
        new = StromState(
            accumulated=r,
            reset=reset,
            threshold=tau,
            first=jnp.where(ok, out.first, state.first),
            bucket=bucket,
        )
        return out.mean, new, out.sent

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)
