"""State for another number of workers."""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._core.mixing import Mixing, is_mixable
from gcjax._core.per_worker import PerWorker
from gcjax._types import Array, PyTree
from gcjax._validation import check_integer


def resize(state: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Training state for the workers of another mesh: fewer of them, more, or as many on other devices.

    Nothing that the workers have not sent yet is lost: the mean of their residuals stays the same, to rounding. 4
    workers that follow 8 have the means of pairs, 8 that follow 4 have copies, and 6 that follow 8 have weighted means.
    Accumulated squares follow the gradients that they belong to, so the variance criterion continues as if the new
    workers had seen the samples. What owners owe in two phases is distributed anew. A method without residual that no
    longer needs owners loses it, which is one rounding error of a mean. Values that are equal on all workers stay.
    State that is not of gcjax, such as that of `gcjax.local_transform`, and `model_state` are averaged where they are
    floats. `gcjax.info` starts anew, except `skipped`.

    If the batch per worker stays the same, the batch of a step changes, and with it the best learning rate.

        state = gcjax.resize(state, jax.make_mesh((6,), ("data",)))
        step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data")  # of the new mesh, with the same tx

    From a checkpoint, with `gcjax.restore_target`:

        target = gcjax.restore_target(step.init(params), workers=8)  # the checkpoint's number
        state = gcjax.resize(checkpointer.restore(path, target), mesh)

    Args:
      state: a `TrainState`, or an optimiser's state, of arrays on a mesh or of NumPy arrays. It stays valid. All
        of it passes through this process's memory; where it lies on devices of several processes, save and restore it.
      mesh: the new devices, with the axes that the state is per worker along.

    Returns:
      The same pytree as global arrays on `mesh`.

    Raises:
      ValueError: the mesh lacks an axis; an array lies on devices of other processes; parameters are sharded, so that
        there is state for each shard.
      TypeError: the state is one of `gcjax.gossip`.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx, params, one = gcjax.dense_compress(axis_name="data"), jnp.ones(4), jax.make_mesh((1,), ("data",))
    >>> of_eight = gcjax.restore_target(tx.init(params), workers=8)  # stands for a checkpoint
    >>> print(of_eight.report.workers, gcjax.resize(of_eight, one).report.workers)
    8 1
    """

    def moved(node):
        if isinstance(node, PerWorker):
            missing = set(node.axes) - set(mesh.shape)
            if missing:
                raise ValueError(f"the state is per worker along {node.axes}; the mesh has only {tuple(mesh.shape)}")
            mixing = Mixing(node.workers, math.prod(mesh.shape[axis] for axis in node.axes))
            with jax.default_device(_cpu()):
                node = jax.tree.map(np.asarray, jax.tree.map(_on_host, node).mixed(mixing))
            return _put(node, NamedSharding(mesh, PartitionSpec(node.axes or None)))
        if is_mixable(node):
            return node.mixed(None)
        _reject_sharded(node)
        return _put(node, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(moved, state, is_leaf=is_mixable)


def _cpu() -> jax.Device | None:
    """The host's device, or None where JAX was told not to start it (JAX_PLATFORMS)."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def restore_target(state: PyTree, workers: int) -> PyTree:
    """What a state of these options looks like with another number of workers, to restore a checkpoint into.

    Args:
      state: a state made with the same options and parameters, for any number of workers.
      workers: number of workers of the checkpoint.

    Returns:
      The same pytree with leaves that are NumPy arrays of the checkpoint's shapes and dtypes; they take no memory, and
      their values mean nothing.

    Raises:
      ValueError: `workers` is below 1.
      TypeError: `workers` is not an int.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.top_k_compress(0.5, axis_name="data")
    >>> gcjax.restore_target(tx.init(jnp.ones(4)), workers=8).buckets.workers
    8
    """
    check_integer("workers", workers, 1)

    def shaped(node):
        if isinstance(node, PerWorker):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), node)  # on no mesh
            node = jax.eval_shape(lambda node: node.mixed(Mixing(node.workers, workers)), shapes)
        return jax.tree.map(lambda x: x if _is_key(x) else np.broadcast_to(np.zeros((), x.dtype), x.shape), node)

    return jax.tree.map(shaped, state, is_leaf=lambda node: isinstance(node, PerWorker))


def _is_key(x: Array) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _on_host(x: Array) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "the state lies on devices of other processes, too. Save it, restore it with gcjax.restore_target on "
            "every process of the new run, and resize that"
        )
    return np.asarray(x)


def _reject_sharded(x: Array) -> None:
    if isinstance(x, jax.Array) and not x.sharding.is_fully_replicated:
        raise ValueError(
            f"an array of shape {x.shape} is sharded as {x.sharding}: resize takes state whose parameters every "
            "worker has whole. Gather the parameters, and begin with new state for the compressor"
        )


def _put(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(lambda x: jax.device_put(x if _is_key(x) else _on_host(x), sharding), tree)
