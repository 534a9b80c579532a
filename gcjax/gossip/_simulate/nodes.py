"""What a simulated node does by itself: it draws batches from its own data and takes local steps."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
      local_steps: gradient steps between two exchanges.
      bits: per entry on the lattice; None in full precision.
      batch_size: samples of a batch, drawn with replacement; None for all samples of the node, in order.
      key: random key of the batches. The batch of a node's k-th step depends on the node and k alone.
    """

    loss_fn: Callable[[PyTree, PyTree], Array]
    tx: optax.GradientTransformation
    start: Array
    unravel: Callable[[Array], PyTree]
    local_steps: int
    bits: int | None
    batch_size: int | None
    key: Array

    def batch(self, data: PyTree, node: ArrayLike, step: ArrayLike) -> PyTree:
        """The batch of one step of a node; both are int32."""
        if self.batch_size is None:
            return jax.tree.map(lambda x: x[node], data)
        key = jax.random.fold_in(jax.random.fold_in(self.key, node), step)
        chosen = jax.random.randint(key, (self.batch_size,), 0, jax.tree.leaves(data)[0].shape[1])
        return jax.tree.map(lambda x: x[node, chosen], data)

    def train(
        self, data: PyTree, x: Array, opt_state: PyTree, node: ArrayLike, done: ArrayLike
    ) -> tuple[Array, PyTree]:
        """The local steps of a node that has the flat model x and has made `done` steps: its model and its state."""

        def step(k, carry):
            params, opt_state = carry
            grad = jax.grad(self.loss_fn)(params, self.batch(data, node, done + k))
            updates, opt_state = self.tx.update(grad, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.fori_loop(0, self.local_steps, step, (self.unravel(x), opt_state))
        return ravel_pytree(params)[0].astype(jnp.float32), opt_state


def make_trainer(
    loss_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    tx: optax.GradientTransformation,
    data: PyTree,
    nodes: int,
    local_steps: int,
    bits: int | None,
    batch_size: int | None,
    key: Array,
) -> Trainer:
    """A `Trainer` of checked arguments; they are those of `simulate`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"params leaf {path_name(path)} must be floating point, got {jnp.result_type(leaf)}")
    shapes = {leaf.shape[:2] for leaf in jax.tree.leaves(data)}
    if len(shapes) != 1 or len(shape := shapes.pop()) < 2 or shape[0] != nodes or not shape[1]:
        found = [leaf.shape for leaf in jax.tree.leaves(data)]
        raise ValueError(f"all leaves of data must begin with ({nodes} nodes, samples), got shapes {found}")
    check_integer("local_steps", local_steps, 1)
    if bits is not None:
        check_integer("bits", bits, 4, 16)
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    check_random_key("key", key)
    start, unravel = ravel_pytree(jax.tree.map(jnp.asarray, params))
    dtype = start.dtype

    def unravel_float32(x):
        return unravel(x.astype(dtype))

    return Trainer(loss_fn, tx, start.astype(jnp.float32), unravel_float32, local_steps, bits, batch_size, key)
