"""Scaling before a compressor: of the gradient and of its squares."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._core.checks import mask_like
from gcjax._kernels.floats import TINY
from gcjax._kernels.layout import path_name
from gcjax._types import Array, PyTree
from gcjax._validation import check_transform


class ScaleFirstState(NamedTuple):
    """State of `scale_first`.

    Attributes:
      scaling: state of the scaling.
      compressor: state of the compressor.
    """

    scaling: PyTree
    compressor: PyTree


def scale_first(
    scaling: optax.GradientTransformation, compressor: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Scale or clip the gradient, and its squares alike, and then compress.

    `optax.chain` gives all its transforms the same `sum_grad_squared`. A transform that scales the gradient by f before
    `gcjax.variance_compress` would leave the squares as they are: every entry would look noisier by 1 / f**2, and
    training would stall. Here the compressor gets the squares times f**2, entry by entry, with f the factor that the
    scaling gave the entry:

        tx = optax.chain(
            gcjax.scale_first(optax.clip_by_global_norm(1.0), gcjax.variance_compress(axis_name="data")),
            optax.adam(1e-3),
        )

    Each worker scales its own gradient, and clips it by its own norm, which is larger than that of the mean over the
    workers. To clip the mean, put the clipping after the compressor, where there are no squares.

    Args:
      scaling: a transform that multiplies every entry by a factor, such as `optax.clip_by_global_norm`, `optax.clip`,
        `optax.adaptive_grad_clip`, `optax.scale`, `optax.scale_by_schedule`, or a chain of them. The factor may depend
        on the gradient. Where an entry is zero, its leaf's factor is taken to be the largest magnitude after the
        scaling, divided by the largest one before it.
      compressor: a transform of gcjax, or a chain that begins with one.

    Returns:
      A transform with state `ScaleFirstState`, and with the extra arguments of both. Without `sum_grad_squared` it does
      the same as `optax.chain`.

    Raises:
      TypeError: an argument is not a transform.
      ValueError: (from `init`) `scaling` keeps arrays, as momentum and Adam do, or adds something to the gradient, as
        weight decay does.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = gcjax.scale_first(optax.clip_by_global_norm(1.0), gcjax.variance_compress(alpha=1.5))
    >>> params = jnp.zeros(2)
    >>> squares = jnp.array([4.0, 32.0])  # 9 > 1.5 * 4, but 16 < 1.5 * 32; both are scaled by 1 / 5
    >>> updates, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params, sum_grad_squared=squares)
    >>> print(updates)
    [0.5 0. ]
    """
    check_transform("scaling", scaling)
    check_transform("compressor", compressor)
    scaling, compressor = map(optax.with_extra_args_support, (scaling, compressor))

    def init(params: PyTree) -> ScaleFirstState:
        _check_scaling(scaling, params)
        return ScaleFirstState(scaling.init(params), compressor.init(params))

    def update(updates, state, params=None, *, sum_grad_squared=None, **extra_args):
        scaled, new_scaling = scaling.update(updates, state.scaling, params, **extra_args)
        if sum_grad_squared is not None:
            squares = jax.tree.map(_scaled_squares, mask_like(updates, sum_grad_squared), updates, scaled)
            extra_args["sum_grad_squared"] = squares
        result, new_compressor = compressor.update(scaled, state.compressor, params, **extra_args)
        return result, ScaleFirstState(new_scaling, new_compressor)

    return optax.GradientTransformationExtraArgs(init, update)


def _scaled_squares(squares: Array, before: Array, after: Array) -> Array:
    """The squares times the factor squared, from the gradient before and after the scaling."""
    squares = jnp.asarray(squares)
    before, after = (jnp.asarray(x).astype(squares.dtype) for x in (before, after))
    largest_before, largest_after = (jnp.max(jnp.abs(x), initial=0) for x in (before, after))
    factor = jnp.where(jnp.abs(before) < TINY, _ratio(largest_after, largest_before), _ratio(after, before))
    return squares * factor * factor  # in this order: the square of a factor may underflow


def _ratio(after: Array, before: Array) -> Array:
    """after / before; 1 where there is nothing to divide by."""
    return jnp.where(jnp.abs(before) < TINY, 1, after) / jnp.where(jnp.abs(before) < TINY, 1, before)


def _check_scaling(scaling: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    # On parameters of the same structure with one entry each: `params` may be large, or tracers.
    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(lambda x: jnp.ones((1,) * jnp.ndim(x), jnp.result_type(x)), params)
        state = scaling.init(ones)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if jnp.ndim(leaf):
                raise ValueError(
                    f"scale_first takes a transform that only scales, but this one keeps arrays in its state, at "
                    f"{path_name(path)}, as momentum does. Put it after the compressor"
                )
        zeros = jax.tree.map(jnp.zeros_like, ones)
        for path, leaf in jax.tree_util.tree_leaves_with_path(scaling.update(zeros, state, ones)[0]):
            if (leaf != 0).any():
                raise ValueError(
                    f"scale_first takes a transform that only scales, but this one turns a gradient of zero into "
                    f"{leaf.item():g}, at {path_name(path)}, as weight decay does. Put it after the compressor"
                )
