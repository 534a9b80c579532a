"""What a simulated node does by itself: it draws batches from its own data and takes local steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gcjax._kernels.buckets import path_name
from gcjax._types import Array, PyTree
from gcjax._validation import check_integer, check_random_key


class Trainer(NamedTuple):
    """The nodes' common program.

    loss_fn(params, batch) -> loss.  tx: each node has a state of its own.
    start: float32[P], the flat model that all begin with.  unravel(float32[P]) -> params.
    batch_size: samples of a batch, drawn with replacement; None for all that the node has, in order.
    key: of the batches. That of a node's k-th step depends on the node and k alone, whatever the algorithm.
    """

    loss_fn: Callable[[PyTree, PyTree], Array]
    tx: optax.GradientTransformation
    start: Array
    unravel: Callable[[Array], PyTree]
    batch_size: int | None
    key: Array

    def batch(self, data: PyTree, node, step) -> PyTree:
        """The batch of one step of a node; both int32."""
        if self.batch_size is None:
            return jax.tree.map(lambda x: x[node], data)
        key = jax.random.fold_in(jax.random.fold_in(self.key, node), step)
        samples = jax.tree.leaves(data)[0].shape[1]
        chosen = jax.random.randint(key, (self.batch_size,), 0, samples)
        return jax.tree.map(lambda x: x[node, chosen], data)

    def local_steps(self, data: PyTree, x, opt_state, node, done, count) -> tuple[Array, PyTree]:
        """`count` steps from the flat model x of a node that has made `done`: the model and the optimiser's state."""

        def step(k, carry):
            params, opt_state = carry
            grad = jax.grad(self.loss_fn)(params, self.batch(data, node, done + k))
            updates, opt_state = self.tx.update(grad, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.fori_loop(0, count, step, (self.unravel(x), opt_state))
        return ravel_pytree(params)[0], opt_state

    def on_all(self, data: PyTree, x, opt_state, done, count) -> tuple[Array, PyTree]:
        """`local_steps` of all nodes: x of shape (n, P), or (P,) where all have the same model."""
        nodes = jnp.arange(jax.tree.leaves(data)[0].shape[0], dtype=jnp.int32)
        run = jax.vmap(self.local_steps, in_axes=(None, None if x.ndim == 1 else 0, 0, 0, None, None))
        return run(data, x, opt_state, nodes, done, count)

    def opt_states(self, nodes: int) -> PyTree:
        """The optimisers' states of all nodes, a leading axis added to each leaf."""
        return stacked(self.tx.init(self.unravel(self.start)), nodes)


def make_trainer(loss_fn, params: PyTree, tx, data: PyTree, nodes: int, batch_size: int | None, key) -> Trainer:
    """Raises ValueError or TypeError for parameters, data or a batch size that do not fit."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"params leaf {path_name(path)} must be floating point, got {jnp.result_type(leaf)}")
    sizes = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if leaf.ndim < 2 or leaf.shape[0] != nodes or leaf.shape[1] == 0:
            raise ValueError(
                f"data leaf {path_name(path)} has shape {leaf.shape}; it must begin with ({nodes} nodes, samples)"
            )
        sizes.add(leaf.shape[1])
    if len(sizes) != 1:
        raise ValueError(f"all leaves of data must have the same number of samples per node, got {sorted(sizes)}")
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    check_random_key("key", key)
    start, unravel = ravel_pytree(jax.tree.map(jnp.asarray, params))
    dtype = start.dtype
    start = start.astype(jnp.float32)
    return Trainer(loss_fn, tx, start, lambda x: unravel(x.astype(dtype)), batch_size, key)


def stacked(tree: PyTree, nodes: int) -> PyTree:
    """The tree once for each node, along a new leading axis."""
    return jax.tree.map(lambda x: jnp.copy(jnp.broadcast_to(x, (nodes, *jnp.shape(x)))), tree)


class Run(NamedTuple):
    """A simulation ready to go.

    advance(state, data, plan, begin, end) -> state.  look(state) -> (mean model, spread, resent), the first flat.
    gradients, seconds, bits: float64[units + 1], so far, before each unit (event or round) and after the last.
    steps(state) -> int[nodes].
    """

    state: Any
    plan: Any
    advance: Callable
    look: Callable
    gradients: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    steps: Callable


def so_far(amounts: np.ndarray) -> np.ndarray:
    """Their sums before each and after the last."""
    return np.concatenate([[0.0], np.cumsum(amounts)])


def distance_from_mean(models: Array, mean: Array) -> Array:
    """sqrt(mean_i |x_i - mean|**2); models of shape (n, P)."""
    return jnp.sqrt(jnp.mean(jnp.sum((models - mean) ** 2, axis=1)))
