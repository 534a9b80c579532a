"""`value_and_moments`: arguments, choice of method, and what comes back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._moments import _naive, _sinks
from gcjax._moments._problem import make_options, make_problem


class Moments(NamedTuple):
    """First and second moment of the per-sample gradients of one batch, local to the worker.

    Attributes:
        grad: the batch gradient; pytree, shapes and dtypes of params.
        sum_grad_squared: elementwise `sum_z (grad f_z / |B|)^2`; pytree and shapes of params, float32 or wider.
    """

    grad: Any
    sum_grad_squared: Any


def value_and_moments(
    loss_fn,
    has_aux=False,
    *,
    in_axes=0,
    sample_axis=None,
    microbatches=None,
    reduction="mean",
    method="auto",
    max_bytes=256 << 20,
):
    """Like `jax.value_and_grad`, with the sum of squared per-sample gradients beside the gradient."""
    options = make_options(
        loss_fn,
        has_aux,
        in_axes=in_axes,
        sample_axis=sample_axis,
        microbatches=microbatches,
        reduction=reduction,
        method=method,
        max_bytes=max_bytes,
    )

    def value_and_moments_fn(params, batch):
        problem = make_problem(options, params, batch)
        (grad, squares), (values, aux) = _moments_of(problem)
        grad = jax.tree.map(lambda g, p: g.astype(p.dtype), grad, problem.params)
        moments = Moments(grad, squares)
        value = (jnp.mean if reduction == "mean" else jnp.sum)(values, axis=0)
        return ((value, _whole_batch_aux(aux, problem)) if has_aux else value), moments

    return value_and_moments_fn


def _moments_of(problem):
    if problem.options.method in ("auto", "sinks"):
        return _sinks.sink_moments(problem, _sinks.make_plan(problem), problem.mapped)
    if problem.options.method == "scan" and problem.sample_axis is not None:
        raise ValueError("method='scan' takes one sample at a time and cannot bind sample_axis; use 'sinks' or 'vmap'")
    chunk = 1 if problem.options.method == "scan" else _naive.chunk_size(problem)
    return _naive.chunked_moments(problem, chunk)


def _whole_batch_aux(stacked, problem):
    """Aux of all groups `[groups, ...]` brought to the shapes that loss_fn returns for the whole batch."""

    def merge(a, like):
        if a.shape[1:] == like.shape:
            if not jnp.issubdtype(a.dtype, jnp.floating):
                return a[0]
            # Equal values, such as running statistics under sample_axis, come back to the bit.
            return jnp.where(jnp.all(a == a[0], axis=0), a[0], jnp.mean(a, axis=0))
        return a.reshape(like.shape)

    return jax.tree.map(merge, stacked, problem.aux_like)
