"""Loss, gradient and squares of one worker's batch, as a whole or part by part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._jax_compat import zeros
from gcjax._kernels.layout import path_name
from gcjax._training.sharding import as_local
from gcjax._types import Array, PyTree


class BatchGradient(NamedTuple):
    """What one worker computes from its batch.

    Attributes:
      loss: float32, mean over the samples.
      gradient: a pytree like the parameters.
      squares: `sum_grad_squared`, a pytree like the parameters; None without moments.
      aux: what the loss returned beside its value, such as a model state; None if it returned nothing.
    """

    loss: Array
    gradient: PyTree
    squares: PyTree
    aux: PyTree


GradientFn = Callable[[PyTree, PyTree, PyTree, Array | None], BatchGradient]  # of params, batch, model_state, key


def batch_gradient(
    loss_fn: Callable[..., Any], moments: Callable[..., Any] | None, *, has_aux: bool = False
) -> GradientFn:
    """The function from parameters and batch to a `BatchGradient`. `loss_fn`, `moments`: see `make_train_step`.

    `has_aux`: whether the loss returns something beside its value even if it gets no model state.
    """

    def gradient(params: PyTree, batch: PyTree, model_state: PyTree, key: Array | None) -> BatchGradient:
        has_state = model_state is not None
        returns_aux = has_state or has_aux

        def loss(params, inputs):
            batch, key, model_state = inputs
            options = {} if key is None else {"key": key if moments is None else key[0]}
            if has_state:
                options["model_state"] = model_state
            return loss_fn(params, batch, **options)

        squares = None
        if moments is None:
            out, grad = jax.value_and_grad(loss, has_aux=returns_aux)(params, (batch, key, model_state))
        else:
            keys = None if key is None else jax.random.split(key, jax.tree.leaves(batch)[0].shape[0])
            value_and_moments = moments(loss, has_aux=returns_aux, in_axes=(0, 0, None))
            out, (grad, squares) = value_and_moments(params, (batch, keys, model_state))
        value, aux = out if returns_aux else (out, None)
        return BatchGradient(value.astype(jnp.float32), grad, squares, aux)

    return gradient


def check_batch(batch: PyTree, workers: int, accumulate: int = 1) -> None:
    """Raise ValueError unless every leaf of a global batch can be split into equal parts."""
    parts = workers * accumulate
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not leaf.ndim or leaf.shape[0] == 0 or leaf.shape[0] % parts:
            raise ValueError(
                f"batch leaf {path_name(path)} has shape {leaf.shape}; its leading axis must be a positive multiple of "
                f"{parts} = {workers} workers * accumulate={accumulate}"
            )


def accumulated(whole: GradientFn, parts: int, axes: tuple[str, ...]) -> GradientFn:
    """`whole` on `parts` equal parts of the batch, one after the other, averaged. `axes`: of the workers."""
    if parts == 1:
        return whole

    def gradient(params: PyTree, batch: PyTree, model_state: PyTree, key: Array | None) -> BatchGradient:
        batch = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
        keys = None if key is None else jax.random.split(key, parts)
        shapes = jax.eval_shape(whole, params, jax.tree.map(lambda x: x[0], batch), model_state, key)

        def zeros_like(tree):
            return jax.tree.map(lambda s, p: zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32), p), tree, params)

        def add(carry, part):
            sums, model_state = carry
            *new, model_state = whole(params, part[0], model_state, part[1])
            return (jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, tuple(new)), model_state), None

        squares = None if shapes.squares is None else zeros_like(shapes.squares)
        start = as_local(jnp.float32(0), axes), zeros_like(shapes.gradient), squares
        ((loss, grad, squares), model_state), _ = jax.lax.scan(add, (start, model_state), (batch, keys))
        grad = jax.tree.map(lambda g, s: (g / parts).astype(s.dtype), grad, shapes.gradient)
        # Each sample counts 1 / (parts * part size), so its square falls by parts**2.
        squares = jax.tree.map(lambda s: s / parts**2, squares)
        return BatchGradient(loss / parts, grad, squares, model_state)

    return gradient
