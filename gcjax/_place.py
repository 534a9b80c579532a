"""Local gradients, and per-worker state on a mesh: what a hand-written training loop needs."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._compat import tracks_variation, vary
from gcjax._exchange import AxisNames, axis_tuple
from gcjax._types import PerWorker, PyTree


def local_gradients(grad_fn, axis_name: AxisNames):
    """Make `grad_fn(params, ...)` give each worker's own gradient inside `shard_map`.

    There `jax.grad` with respect to replicated parameters sums over the workers: the parameters count as one value that
    all workers use. This types them as varying over the axis first, after which nothing is summed. It does nothing in
    `pmap` and with `check_vma=False`, where JAX does not sum. `gcjax.value_and_moments` needs no such help.

    Args:
      grad_fn: a function whose first argument is the parameters, for example `jax.value_and_grad(loss)`.
      axis_name: mesh axis or axes of the workers.

    Returns:
      A function with the signature of `grad_fn`.
    """
    axes = axis_tuple(axis_name)

    @functools.wraps(grad_fn)
    def local(params, *args, **kwargs):
        return grad_fn(as_local(params, axes), *args, **kwargs)

    return local


def as_local(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Type `tree` as each worker's own, so that autodiff does not sum its gradient over the axes."""
    return vary(tree, axes) if tracks_variation(axes) else tree


def per_worker(tx: optax.GradientTransformation, axis_name: AxisNames) -> optax.GradientTransformationExtraArgs:
    """`tx` with its state declared per worker: for a transform with state that stands before the compressor.

    What such a transform sees, and so its state, differs between workers, for example the momentum in
    `optax.chain(gcjax.per_worker(optax.trace(0.9), "data"), gcjax.variance_compress(axis_name="data"), ...)`.
    """
    axes = axis_tuple(axis_name)
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        updates, new = tx.update(updates, one_worker(state), params, **extra_args)
        return updates, with_worker_axis(new, axes)

    return optax.GradientTransformationExtraArgs(lambda params: with_worker_axis(tx.init(params), axes), update)


def with_worker_axis(tree: PyTree, axes: tuple[str, ...]) -> PerWorker:
    """One worker's state as a `PerWorker`, each leaf with an axis of workers in front."""
    return PerWorker(jax.tree.map(lambda x: jnp.asarray(x)[None], tree), axes)


def one_worker(state: PerWorker) -> PyTree:
    """The inverse of `with_worker_axis`."""
    return jax.tree.map(lambda x: x[0], state.value)


def _is_per_worker(node) -> bool:
    return isinstance(node, PerWorker)


def state_specs(state: PyTree) -> PyTree:
    """`PartitionSpec`s for `shard_map`: per-worker state sharded over its axes, all else replicated.

    Returns a prefix pytree of `state`, which may be an optimiser's state, a `TrainState` or any pytree.
    """

    def spec(node):
        return PartitionSpec(node.axes or None) if _is_per_worker(node) else PartitionSpec()

    return jax.tree.map(spec, state, is_leaf=_is_per_worker)


def place(state: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Put freshly initialised state on a mesh: per-worker leaves once for each worker, all else replicated.

    Args:
      state: a pytree with `PerWorker` nodes that hold one worker each, as `tx.init(params)` makes them off the mesh.
      mesh: it must have the axes that the nodes name.

    Returns:
      The same pytree as global arrays, per-worker leaves `workers` times as long. New buffers: `state` stays valid.

    Raises:
      ValueError: when the mesh lacks an axis.
    """

    def spread(node):
        if not _is_per_worker(node):
            return jnp.copy(node)
        workers = math.prod(mesh.shape[axis] for axis in node.axes)

        def repeated(x):  # not a concatenation: every device would make all parts and then exchange them
            return jnp.broadcast_to(x, (workers, *x.shape)).reshape(workers * x.shape[0], *x.shape[1:])

        return PerWorker(jax.tree.map(repeated, node.value), node.axes)

    def sharding(node):
        if _is_per_worker(node) and not set(node.axes) <= set(mesh.shape):
            raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, the state is per worker along {node.axes}")
        shardings = NamedSharding(mesh, state_specs(node))
        return PerWorker(shardings, node.axes) if _is_per_worker(node) else shardings

    shardings = jax.tree.map(sharding, state, is_leaf=_is_per_worker)
    return jax.jit(lambda tree: jax.tree.map(spread, tree, is_leaf=_is_per_worker), out_shardings=shardings)(state)
