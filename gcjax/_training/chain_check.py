"""Checks of a chain of transforms before its first step: on small arrays, without any exchange."""

import contextlib
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._core.chain import without_exchange
from gcjax._types import PyTree

STEPS = 4  # to look at: a learning rate that is warmed up is zero at first, and optax.MultiSteps returns zeros


def reject_two_compressors(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, trained: Callable[[PyTree], PyTree] = lambda tree: tree
) -> None:
    """Raise ValueError if some leaf passes through two compressors that average over the same axis.

    Args:
      tx: the chain.
      params: the parameters. Only their tree, their numbers of dimensions and their dtypes count.
      trained: trained(params) -> the tree that `tx.update` takes.
    """
    ones = _ones_like(params)
    with without_exchange() as seen, contextlib.suppress(Exception):  # of a chain that does not take such arrays
        jax.eval_shape(lambda: _step(tx, trained(ones), tx.init(ones), trained(ones)))
    for (axes, leaves), (others, more) in itertools.combinations(seen.compressors, 2):
        if axes & others and (twice := sorted(leaves & more)):
            raise ValueError(
                f"tx has two compressors in one chain, and the gradient at {twice[0]} passes through both: the first "
                "averages it, so compressing it again would save nothing. Keep one of the two. To compress some "
                "parameters by one method and some by another, use optax.partition"
            )


def reject_optimiser(tx: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Raise ValueError if a chain that should return a gradient points against it, as an optimiser does.

    Args:
      tx: the chain.
      params: as in `reject_two_compressors`.
    """
    for path, x in _responses(tx, _ones_like(params)):
        if (x <= 0).all() and (x < 0).any():
            raise ValueError(
                f"tx turns the gradient around at {path}, as an optimiser does, and your own would then go uphill. "
                "compressed_value_and_grad returns gradients: give it the compressor without the optimiser, and its "
                "gradients to the optimiser, optimizer.update(grads, opt_state, params). To maximise, change the sign "
                "of the loss"
            )


def _responses(tx: optax.GradientTransformationExtraArgs, ones: PyTree) -> list[tuple[str, np.ndarray]]:
    """How the first updates of each leaf answer to a gradient of ones; nothing of a chain that does not take it.

    That is the difference to the answer to the opposite gradient, in which noise and weight decay cancel.
    """

    def answers(gradient):
        state, updates = tx.init(ones), []
        for _ in range(STEPS):
            update, state = _step(tx, gradient, state, ones)
            updates.append(update)
        return jax.tree.map(lambda *steps: np.asarray(steps, np.float32), *updates)

    with without_exchange(), jax.ensure_compile_time_eval():
        try:
            both = answers(ones), answers(jax.tree.map(np.negative, ones))
        except Exception:
            return []
    differences = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.subtract, *both))
    return [(jax.tree_util.keystr(path), x) for path, x in differences]


def _ones_like(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.ones((2,) * jnp.ndim(x), jnp.result_type(x)), params)


def _step(
    tx: optax.GradientTransformationExtraArgs, gradient: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    return tx.update(gradient, state, params, sum_grad_squared=params, value=jnp.float32(1))
