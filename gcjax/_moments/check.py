"""`check_moments`: is the loss really a mean (or sum) of independent samples?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._moments.api import value_and_moments
from gcjax._types import ArrayLike, PyTree

CURE = (
    "The loss of the batch is not the mean (reduction='mean') or the sum (reduction='sum') of its samples' losses. "
    "BatchNorm: set sample_axis='batch' and pass the same axis name to the layer (gcjax.flax.sync_batchnorm does). "
    "Weighted or masked mean: divide the weights by their sum outside loss_fn and use reduction='sum'. "
    "Dropout: turn it off for this check, because its mask depends on the shape of the batch."
)


def check_moments(
    loss_fn: Callable[[PyTree, PyTree], Any], has_aux: bool = False, **keywords: Any
) -> Callable[..., None]:
    """Build a function that compares `value_and_moments` with plain `jax.value_and_grad` of the whole batch.

    A loss that couples its samples (BatchNorm without an axis name, a mean over unmasked entries) gives a wrong
    gradient without any other sign. Call this once, outside jit, before training.

    Args:
      loss_fn: as in `value_and_moments`.
      has_aux: as in `value_and_moments`.
      **keywords: the other options of `value_and_moments`.

    Returns:
      `check(params, batch, rtol=None) -> None`. `rtol` is relative to the largest gradient entry over all leaves. The
      default is the square root of the coarsest machine epsilon among the parameters.

    Raises (from `check`):
      ValueError: the loss or a leaf of the gradient differs. The message names the leaf, the error and the cure.
      TypeError: called under jit, where values are not known.
    """
    moments_fn = jax.jit(value_and_moments(loss_fn, has_aux, **keywords))
    # One group of the whole batch is the batch loss itself, with the sample axis bound to size 1.
    whole_fn = jax.jit(value_and_moments(loss_fn, has_aux, **{**keywords, "microbatches": 1, "method": "vmap"}))

    def check(params, batch, rtol=None):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, batch))):
            raise TypeError("check_moments compares values: call it outside jit, grad, vmap and shard_map")
        if rtol is None:
            rtol = max((float(jnp.finfo(jnp.result_type(p)).eps) for p in jax.tree.leaves(params)), default=0.0) ** 0.5
        value, moments = moments_fn(params, batch)
        expected, reference = whole_fn(params, batch)
        if has_aux:
            value, expected = value[0], expected[0]
        largest = max((_largest(leaf) for leaf in jax.tree.leaves(reference.grad)), default=0.0)
        for (path, got), want in zip(
            jax.tree_util.tree_leaves_with_path(moments.grad), jax.tree.leaves(reference.grad), strict=True
        ):
            _compare(f"the gradient of params{jax.tree_util.keystr(path)}", got, want, rtol, largest)
        _compare("the loss", value, expected, rtol, abs(float(expected)))

    return check


def _largest(leaf: ArrayLike) -> float:
    return float(jnp.max(jnp.abs(leaf), initial=0.0))


def _compare(name: str, got: ArrayLike, want: ArrayLike, rtol: float, scale: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.max(np.abs(got - want), initial=0.0)
    # Written so that a NaN difference counts as disagreement.
    if not error <= rtol * max(scale, np.finfo(np.float64).tiny):
        raise ValueError(
            f"{name} differs from jax.grad of the batch loss by {error:.3g}, where the largest entry is {scale:.3g} "
            f"(rtol {rtol:.3g}). {CURE}"
        )
