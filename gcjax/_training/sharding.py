"""State on a mesh: what is per worker, how it is sharded, and how it gets there."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._comm.collectives import sharded_dimensions
from gcjax._core.owned import shared_among
from gcjax._core.per_worker import PerWorker, is_per_worker
from gcjax._jax_compat import constrain, varying_axes
from gcjax._types import Array, PyTree


def state_specs(state: PyTree, params: PyTree = (), param_specs: PyTree = ()) -> PyTree:
    """`PartitionSpec`s for `shard_map`: per-worker state sharded over its axes, the rest replicated.

    Args:
      state: an optimiser's state, a `TrainState` or any pytree.
      params: the parameters, if they are sharded. A leaf of the state is sharded like a parameter if it has its shape
        and a path that ends with its path, as Adam's moments do.
      param_specs: how they are sharded, as in `gcjax.init_sharded`.

    Returns:
      A prefix pytree of `state`.

    Raises:
      TypeError: the state was split into dicts, which do not say what is per worker.

    Example:
      >>> import gcjax
      >>> tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.trace(0.9))
      >>> compressor, momentum = gcjax.state_specs(tx.init(jnp.ones(3)))
      >>> print(compressor.report, momentum.trace)
      P('data',) P()
    """
    _reject_split(state)
    specs = jax.tree.leaves(jax.tree.broadcast(param_specs, params, is_leaf=is_spec), is_leaf=is_spec)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    places = {path: (jnp.shape(leaf), spec) for (path, leaf), spec in zip(leaves, specs, strict=True)}

    def spec(path, node):
        if is_per_worker(node):
            return PartitionSpec(node.axes or None)
        endings = [places[path[i:]] for i in range(len(path) + 1) if path[i:] in places]
        return next((spec for shape, spec in endings if shape == jnp.shape(node)), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, state, is_leaf=is_per_worker)


def init_sharded(
    tx: optax.GradientTransformation, params: PyTree, mesh: jax.sharding.Mesh, param_specs: PyTree
) -> PyTree:
    """The optimiser's state for parameters that are sharded over the mesh. Each shard's state is made where it lives.

        opt_state = gcjax.init_sharded(tx, params, mesh, param_specs)
        specs = gcjax.state_specs(opt_state, params, param_specs)  # for in_specs and out_specs of jax.shard_map

    Every shard is compressed by itself, over the axes that the compressor names. So is each copy of a leaf that is not
    sharded; the leaf's update is then the mean over the copies (a dense all-reduce over the other axes). Without JAX's
    tracking of varying axes (check_vma=False) such leaves are not recognised, and their copies would drift apart.

    Args:
      tx: any optax chain. Its compressor names axes over which no parameter is sharded.
      params: global arrays, already on the mesh or not.
      mesh: the devices.
      param_specs: `PartitionSpec`s of the parameters, a pytree like `params` or a prefix of it.

    Returns:
      `tx`'s state as global arrays.

    Example:
      >>> import gcjax
      >>> mesh, params = jax.make_mesh((1, 1), ("host", "chip")), {"w": jnp.ones((4, 2))}
      >>> tx = gcjax.dense_compress(axis_name="host")
      >>> state = gcjax.init_sharded(tx, params, mesh, {"w": PartitionSpec("chip")})
      >>> print(state.report.axes)
      ('host', 'chip')
    """
    leaf_specs = jax.tree.broadcast(param_specs, params, is_leaf=is_spec)
    found = []

    def record_specs(params):  # a traced init tells the structure of the state, and with it the specs
        state = tx.init(params)
        found.append(state_specs(state, params, param_specs))
        nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_per_worker)
        for (path, node), spec in zip(nodes, jax.tree.leaves(found[0]), strict=True):
            if not is_per_worker(node) and (axes := sorted(varying_axes(node))) and not any(spec):
                raise differs_between_shards(path, axes)
        return jnp.int32(0)

    def on_shards(function, out_specs):
        run = jax.shard_map(function, mesh=mesh, in_specs=(param_specs,), out_specs=out_specs)
        return jax.jit(
            lambda tree: run(jax.tree.map(lambda x, s: constrain(x, NamedSharding(mesh, s)), tree, leaf_specs))
        )

    jax.eval_shape(on_shards(record_specs, PartitionSpec()), params)
    return on_shards(tx.init, found[0])(placeable(params, mesh))


def differs_between_shards(path: tuple, axes: list[str]) -> ValueError:
    return ValueError(
        f"opt_state{jax.tree_util.keystr(path)} would differ between the shards along {axes}: a transform looks at all "
        "parameters, such as optax.apply_if_finite, or keeps arrays of another shape than theirs, such as "
        "optax.adafactor. It does not work on shards, of which each device sees its own: leave it out"
    )


def placeable(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """A tree that `jax.jit` takes onto the mesh: arrays that are committed to other devices are moved there."""
    devices, everywhere = set(mesh.devices.flat), NamedSharding(mesh, PartitionSpec())

    def placed(x):
        is_elsewhere = (
            isinstance(x, jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and x.committed
            and x.sharding.device_set != devices
        )
        # For a mesh of several processes JAX would compare the values by a collective.
        return jax.device_put(x, everywhere) if is_elsewhere and everywhere.is_fully_addressable else x

    return jax.tree.map(placed, tree)


def distribute(state: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Put freshly initialised state on a mesh: per-worker leaves once for each worker, the rest replicated.

    Args:
      state: a pytree whose `PerWorker` nodes hold one worker each, as `tx.init(params)` makes them off the mesh.
      mesh: a mesh with the axes that the nodes name.

    Returns:
      The same pytree as global arrays, per-worker leaves `workers` times as long. New buffers: `state` stays valid.

    Raises:
      ValueError: the mesh lacks an axis that a node names, or a node has several workers already.
      TypeError: the state was split into dicts, which do not say what is per worker; or it is an `nnx.Optimizer`.

    Example:
      >>> import gcjax
      >>> tx = optax.chain(gcjax.top_k_compress(0.5, axis_name="data"), optax.trace(0.9))
      >>> state = gcjax.distribute(tx.init(jnp.ones(3)), jax.make_mesh((1,), ("data",)))
      >>> print(state[0].report.workers, state[1].trace.sharding.spec)  # the rest is replicated
      1 P()
    """
    _reject_split(state)
    if any(_is_of_nnx(node) for node in jax.tree.leaves(state, is_leaf=_is_of_nnx)):
        raise TypeError(
            "gcjax.distribute makes new arrays, which NNX would not update, because they are no nnx.Variables: for an "
            "nnx.Optimizer and its state use gcjax.flax.distribute(optimizer, mesh)"
        )
    return distribute_any(state, mesh)


def distribute_any(state: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """`distribute` without a look at what the state is."""

    def workers_of(node):
        return math.prod(mesh.shape[axis] for axis in node.axes)

    def shared(node):
        if not is_per_worker(node):
            return node
        _check_placeable(node, mesh)
        return PerWorker.pack(shared_among(node.unpack(), workers_of(node)), node.axes)

    def spread(node):
        if not is_per_worker(node):
            return jnp.copy(node)
        workers = workers_of(node)

        def repeated(x: Array) -> Array:  # a concatenation would exchange parts between the devices
            return jnp.broadcast_to(x, (workers, *x.shape)).reshape(workers * x.shape[0], *x.shape[1:])

        return dataclasses.replace(node, value=jax.tree.map(repeated, node.value))

    def sharding(node):
        shardings = NamedSharding(mesh, state_specs(node))
        return dataclasses.replace(node, value=shardings) if is_per_worker(node) else shardings

    state = placeable(jax.tree.map(shared, state, is_leaf=is_per_worker), mesh)
    shardings = jax.tree.map(sharding, state, is_leaf=is_per_worker)
    return jax.jit(lambda tree: jax.tree.map(spread, tree, is_leaf=is_per_worker), out_shardings=shardings)(state)


def _is_of_nnx(node: object) -> bool:
    """Whether it is an optimiser of Flax's NNX, or a Variable that holds a leaf of an optimiser's state."""
    return type(node).__module__ == "flax.nnx.training.optimizer"


def _reject_split(state: PyTree) -> None:
    """Raise TypeError for a state in dicts: `nnx.split` and `flax.serialization` make dicts of gcjax's nodes."""

    def is_split(node):
        return isinstance(node, Mapping) and {"buckets", "report"} <= set(node)

    if any(is_split(node) for node in jax.tree.leaves(state, is_leaf=is_split)):
        raise TypeError(
            "the state of a compressor has been split into dicts, which do not say what is per worker. For an "
            "nnx.Optimizer use gcjax.flax.distribute(optimizer, mesh) and gcjax.flax.state_sharding(optimizer) before "
            "nnx.split; restore a state dict of flax.serialization with from_state_dict first"
        )


def _check_placeable(node: PerWorker, mesh: jax.sharding.Mesh) -> None:
    if node.workers > 1:
        raise ValueError(
            f"the state has {node.workers} workers already. Give distribute that of one worker, as tx.init(params) "
            "makes it off the mesh; to move a distributed state, use jax.device_put"
        )
    if not set(node.axes) <= set(mesh.shape):
        raise ValueError(
            f"the mesh has axes {tuple(mesh.shape)}, but the state is per worker along {node.axes}; use a mesh "
            "with these axes, or give the compressor the mesh's axis_name"
        )


def sharding_axes(param_specs: PyTree, mesh: jax.sharding.Mesh) -> set[str]:
    """The axes over which any parameter is sharded."""
    specs = [sharded_dimensions(spec, tuple(mesh.shape)) for spec in jax.tree.leaves(param_specs, is_leaf=is_spec)]
    return {name for dimensions in specs for _, names in dimensions for name in names}


def on_mesh(params: PyTree, mesh: jax.sharding.Mesh, param_specs: PyTree) -> PyTree:
    """A copy of the parameters, sharded over the mesh."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs, is_leaf=is_spec)
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(placeable(params, mesh))


def is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
