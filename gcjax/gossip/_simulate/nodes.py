"""What a simulated node does by itself: it draws batches from its own data and takes local steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gcjax._kernels.layout import path_name
from gcjax._types import Array, ArrayLike, PyTree
from gcjax._validation import check_integer, check_random_key


class Trainer(NamedTuple):
    """The program that all nodes share.

    Attributes:
      loss_fn: loss_fn(params, batch) -> loss.
      tx: an optax optimiser; each node has its own state.
      start: float32[P], the flat model at which all nodes start.
      unravel: unravel(float32[P]) -> params.
      batch_size: samples of a batch, drawn with replacement; None for all samples of the node, in order.
      key: random key of the batches. The batch of a node's k-th step depends on the node and k alone, whatever the
        algorithm.
    """

    loss_fn: Callable[[PyTree, PyTree], Array]
    tx: optax.GradientTransformation
    start: Array
    unravel: Callable[[Array], PyTree]
    batch_size: int | None
    key: Array

    def batch(self, data: PyTree, node: ArrayLike, step: ArrayLike) -> PyTree:
        """The batch of one step of a node; both are int32."""
        if self.batch_size is None:
            return jax.tree.map(lambda x: x[node], data)
        key = jax.random.fold_in(jax.random.fold_in(self.key, node), step)
        samples = jax.tree.leaves(data)[0].shape[1]
        chosen = jax.random.randint(key, (self.batch_size,), 0, samples)
        return jax.tree.map(lambda x: x[node, chosen], data)

    def local_steps(
        self, data: PyTree, x: Array, opt_state: PyTree, node: ArrayLike, done: ArrayLike, count: ArrayLike
    ) -> tuple[Array, PyTree]:
        """`count` steps from the flat model x of a node that has made `done` steps. Returns model and optimiser state.

        The other arguments are as in `batch`.
        """

        def step(k, carry):
            params, opt_state = carry
            grad = jax.grad(self.loss_fn)(params, self.batch(data, node, done + k))
            updates, opt_state = self.tx.update(grad, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.fori_loop(0, count, step, (self.unravel(x), opt_state))
        return ravel_pytree(params)[0].astype(jnp.float32), opt_state

    def local_steps_of_all(
        self, data: PyTree, x: Array, opt_state: PyTree, done: ArrayLike, count: ArrayLike
    ) -> tuple[Array, PyTree]:
        """`local_steps` of all nodes. x has shape (n, P), or (P,) if all nodes have the same model."""
        nodes = jnp.arange(jax.tree.leaves(data)[0].shape[0], dtype=jnp.int32)
        run = jax.vmap(self.local_steps, in_axes=(None, None if x.ndim == 1 else 0, 0, 0, None, None))
        return run(data, x, opt_state, nodes, done, count)

    def opt_state(self) -> PyTree:
        """The optimiser's first state, in new buffers."""
        return jax.tree.map(jnp.copy, self.tx.init(self.unravel(self.start)))

    def opt_states(self, nodes: int) -> PyTree:
        """The first state of every node's optimiser: a leading axis is added to each leaf."""
        state = self.tx.init(self.unravel(self.start))
        return jax.tree.map(lambda x: jnp.copy(jnp.broadcast_to(x, (nodes, *jnp.shape(x)))), state)

    def event_key(self, number: ArrayLike) -> Array:
        """Random key of an event or round, apart from those of the batches."""
        return jax.random.fold_in(jax.random.fold_in(self.key, 1 << 30), number)


def make_trainer(
    loss_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    tx: optax.GradientTransformation,
    data: PyTree,
    nodes: int,
    batch_size: int | None,
    key: Array,
) -> Trainer:
    """A `Trainer` of checked arguments; they are those of `simulate`.

    Raises:
      ValueError, TypeError: parameters, data, a batch size or a key that do not fit.
    """
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


class Simulation(NamedTuple):
    """A simulation that is ready to run. A unit is an event or a round.

    Attributes:
      state: before the first unit.
      plan: what `unit` needs to know of all units, a pytree of arrays.
      unit: unit(state, data, plan, number) -> the state after that unit. It can be jitted.
      summarise: summarise(state) -> (flat mean model, consensus distance, messages sent again in full). Likewise.
      gradients: float64[units + 1], gradient steps before each unit and after the last, mean over the nodes.
      seconds: float64[units + 1], simulated time likewise.
      bits: float64[units + 1], bits sent likewise, mean over the nodes, without messages sent again.
      node_steps: node_steps(state) -> int[nodes], gradient steps of each node.
    """

    state: Any
    plan: PyTree
    unit: Callable[[Any, PyTree, Any, Array], Any]
    summarise: Callable[[Any], tuple[Array, Array, Array]]
    gradients: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    node_steps: Callable[[Any], ArrayLike]

    def advance(self, state: Any, data: PyTree, plan: PyTree, begin: ArrayLike, end: ArrayLike) -> Any:
        """The state after the units begin to end - 1."""
        return lax.fori_loop(begin, end, lambda number, state: self.unit(state, data, plan, number), state)


def running_sums(amounts: np.ndarray) -> np.ndarray:
    """The sum before each amount, and the sum of all."""
    return np.concatenate([[0.0], np.cumsum(amounts)])


def distance_from_mean(models: Array, mean: Array) -> Array:
    """sqrt(mean_i |x_i - mean|**2) of models of shape (n, P)."""
    return jnp.sqrt(jnp.mean(jnp.sum((models - mean) ** 2, axis=1)))
