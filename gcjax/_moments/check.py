"""`check_moments`: is the loss really a mean (or sum) of independent samples?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._moments.api import value_and_moments
from gcjax._types import PyTree

CURE = (
    "The loss of the batch is not the mean (reduction='mean') or the sum (reduction='sum') of its samples' losses. "
    "BatchNorm: set sample_axis='batch' and pass the same axis name to the layer (gcjax.flax.sync_batchnorm does). "
    "Weighted or masked mean: divide the weights by their sum outside loss_fn and use reduction='sum'. "
    "Dropout: turn it off for this check, because its mask depends on the shape of the batch."
)

DEFECT = "This is a defect of gcjax: use method='vmap', and report the loss."


def check_moments(
    loss_fn: Callable[[PyTree, PyTree], Any], has_aux: bool = False, **keywords: Any
) -> Callable[..., None]:
    """Build a function that compares `value_and_moments` with plain `jax.value_and_grad` of the whole batch.

    A loss that couples its samples (BatchNorm without an axis name, a mean over unmasked entries) gives a wrong
    gradient without any other sign. The squares are compared with those of per-sample gradients from `jax.vmap`, one
    sample at a time, or all at once with a `sample_axis`. Call this once, outside jit, before training, with a small
    batch.

    Args:
      loss_fn: as in `value_and_moments`.
      has_aux: as in `value_and_moments`.
      **keywords: the other options of `value_and_moments`.

    Returns:
      `check(params, batch, rtol=None) -> None`. `rtol` is relative to the largest gradient entry over all leaves. The
      default is the square root of the coarsest machine epsilon among the parameters.

    Raises (from `check`):
      ValueError: the loss or a leaf of the gradient or of the squares differs, or has another dtype. The message names
        the leaf, the error and the cure.
      TypeError: called under jit, where values are not known.

    Example:
      >>> params, batch = jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]])
      >>> check_moments(lambda w, x: jnp.mean((x @ w) ** 2))(params, batch)  # a mean over samples: nothing to say
      >>> check_moments(lambda w, x: jnp.mean(x @ w) ** 2)(params, batch)
      Traceback (most recent call last):
      ...
      ValueError: the gradient of params differs from jax.grad of the batch loss by ...
    """
    moments_fn = jax.jit(value_and_moments(loss_fn, has_aux, **keywords))
    # One group of the whole batch is the batch loss itself, with the sample axis bound to size 1.
    method = "scan" if keywords.get("sample_axis") is None else "vmap"
    whole_fn = jax.jit(value_and_moments(loss_fn, has_aux, **{**keywords, "microbatches": 1, "method": method}))
    stacked_fn = jax.jit(value_and_moments(loss_fn, has_aux, **{**keywords, "method": method}))

    def check(params, batch, rtol=None):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, batch))):
            raise TypeError("check_moments compares values: call it outside jit, grad, vmap and shard_map")
        if rtol is None:
            rtol = max((float(jnp.finfo(jnp.result_type(p)).eps) for p in jax.tree.leaves(params)), default=0.0) ** 0.5
        with jax.default_matmul_precision("highest"):  # TPUs round factors to bfloat16, and squares of them otherwise
            value, moments = moments_fn(params, batch)
            expected, reference = whole_fn(params, batch)
            squares = stacked_fn(params, batch)[1].sum_grad_squared
        if has_aux:
            value, expected = value[0], expected[0]
        plain = "jax.grad of the batch loss"
        _compare("the gradient of params", moments.grad, reference.grad, rtol, plain, CURE)
        _compare("the loss", value, expected, rtol, plain, CURE)
        _compare("sum_grad_squared of params", moments.sum_grad_squared, squares, rtol, "that by jax.vmap", DEFECT)

    return check


def _compare(name: str, got: PyTree, want: PyTree, rtol: float, reference: str, cure: str) -> None:
    """Raise ValueError unless all leaves agree, relative to the largest entry of any."""
    wanted = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(want)]
    largest = max((float(np.max(np.abs(leaf), initial=0.0)) for leaf in wanted), default=0.0)
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), wanted, strict=True)
    for (path, ours), like, theirs in leaves:
        message = f"{name}{jax.tree_util.keystr(path)} differs from {reference} by"
        if ours.dtype != like.dtype:
            raise ValueError(f"{message} its dtype, {ours.dtype} instead of {like.dtype}. {cure}")
        error = np.max(np.abs(np.asarray(ours, np.float64) - theirs), initial=0.0)
        # Written so that a NaN difference counts as disagreement.
        if not error <= rtol * max(largest, np.finfo(np.float64).tiny):
            raise ValueError(
                f"{message} {error:.3g}, where the largest entry is {largest:.3g} (rtol {rtol:.3g}). {cure}"
            )
