"""The check, at the first step, that the loss is a mean over independent samples."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._jax_compat import key_of_equal_draws, without_mesh_types
from gcjax._moments.check import CURE
from gcjax._training.gradients import Inputs, Loss, options_of
from gcjax._types import Array, PyTree

TOLERANCE = 0.01  # relative: reduced precision and the order of summation change less, the mistakes looked for more
OFF = "make_train_step(checks=False) turns this check off."


def losses_to_compare(loss: Loss, moments: Callable[..., Any] | None, trained: PyTree, inputs: Inputs) -> Array:
    """Losses of small batches of one worker, for `check_losses`.

    Random numbers drawn from keys are the same for all samples here. Parameters that are all zero are given values: a
    last layer of zeros would hide whatever is before it.

    Args:
      loss: of `uniform_loss`.
      moments: as in `make_train_step`.
      trained: the parameters.
      inputs: the worker's batch, of which the first two samples are used, and the rest.

    Returns:
      float32[3]: the loss of two samples as one batch, and of each alone. Without moments, where a loss may couple its
      samples, both are the same sample. NaN where there is nothing to compare.
    """
    inputs = jax.tree.map(_with_equal_draws, inputs)
    trained = jax.tree.map(_without_zeros, trained)

    def value(trained, inputs, batch):
        return loss(trained, inputs._replace(batch=batch))[0].astype(jnp.float32)

    if moments is None:
        one = jax.tree.map(lambda x: x[:1], inputs.batch)
        alone = value(trained, inputs, one)
        return jnp.stack([value(trained, inputs, jax.tree.map(lambda x: jnp.concatenate([x, x]), one)), alone, alone])
    options = options_of(moments)
    if options.get("microbatches") or any(x.shape[0] < 2 for x in jax.tree.leaves(inputs.batch)):
        return jnp.full(3, jnp.nan)
    axis = options.get("sample_axis")

    def pair_and_singles(trained, inputs):
        # As under `value_and_moments`: the axis has one entry for each group of samples.
        grouped = [jax.tree.map(lambda x: x[None, :2], inputs.batch), jax.tree.map(lambda x: x[:2, None], inputs.batch)]
        values = functools.partial(value, trained, inputs)
        return jnp.concatenate([jax.vmap(values, axis_name=axis)(groups) for groups in grouped])

    return pair_and_singles(trained, inputs) if axis is None else without_mesh_types(pair_and_singles, trained, inputs)


def check_losses(losses: np.ndarray, moments: Callable[..., Any] | None, trained: PyTree) -> None:
    """Raise ValueError if the losses, float32[workers, 3], are not those of a mean (or sum) over the samples."""
    precision = max((float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(trained)), default=0.0)
    tolerance = max(TOLERANCE, precision**0.5)
    pair, alone = losses[:, 0], losses[:, 1:]
    limit = tolerance * np.abs(losses).max(axis=1)
    is_sum = np.abs(pair - alone.sum(axis=1)) <= limit
    is_mean = np.abs(pair - alone.mean(axis=1)) <= limit
    wants_sum = options_of(moments).get("reduction") == "sum"
    wrong = np.isfinite(losses).all(axis=1) & ~(is_sum if wants_sum else is_mean)
    if moments is None:
        wrong &= is_sum
    if not wrong.any():
        return
    worker = int(np.argmax(wrong))
    a, b = alone[worker]
    found = f"the loss of two samples is {pair[worker]:.6g} as one batch, and {a:.6g} and {b:.6g} alone"
    if is_sum[worker]:
        cure = (
            "loss_fn sums over its samples, or divides by a constant, but must be their mean: use jnp.mean. For a sum, "
            "moments=functools.partial(gcjax.value_and_moments, reduction='sum') passes on its gradient."
        )
        raise ValueError(f"{found}: {cure} {OFF}")
    raise ValueError(f"{found}: loss_fn is not a mean over independent samples. {CURE} {OFF}")


def _with_equal_draws(x: Array) -> Array:
    return key_of_equal_draws(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _without_zeros(x: Array) -> Array:
    values = 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return jnp.where(jnp.any(x != 0), x, values.astype(x.dtype))
