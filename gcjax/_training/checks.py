"""What a training step checks of its arguments, and of what the optimiser returns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gcjax._comm.collectives import axis_tuple, sharded_dimensions
from gcjax._core.per_worker import is_per_worker
from gcjax._core.state import compress_states
from gcjax._kernels.layout import check_is_array, path_name
from gcjax._types import AxisNames, PyTree
from gcjax._validation import check_integer


def checked_axes(mesh: jax.sharding.Mesh, axis_name: AxisNames, accumulate: int) -> tuple[str, ...]:
    """The worker axes of a training step, after checking its arguments.

    Raises:
      ValueError: the mesh lacks an axis, or `accumulate` is below 1.
      TypeError: `accumulate` is not an int.
    """
    axes = axis_tuple(axis_name)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(f"axis_name={axis_name!r} must name axes of the mesh, which has {tuple(mesh.shape)}")
    check_integer("accumulate", accumulate, 1)
    return axes


def check_batch(batch: PyTree, workers: int, accumulate: int = 1) -> None:
    """Raise unless every leaf of a batch can be split over the workers and their parts.

    Raises:
      TypeError: a leaf is no array.
      ValueError: there is no leaf, or one is a scalar, empty, or its leading axis is no multiple of the number of
        parts.
    """
    parts = workers * accumulate
    if not jax.tree.leaves(batch):
        raise ValueError(f"the batch has no array, got {batch!r}; its arrays have one entry per sample")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape"):
            raise TypeError(f"batch leaf {path_name(path)} is {leaf!r}, but must be an array. {_SHARED}")
        if not leaf.shape:
            cure = _RANDOM if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _SHARED
            raise ValueError(f"batch leaf {path_name(path)} has shape (), but must have one entry per sample. {cure}")
        if leaf.shape[0] == 0 or leaf.shape[0] % parts:
            raise ValueError(
                f"batch leaf {path_name(path)} has shape {leaf.shape}; its leading axis must be a positive "
                f"multiple of {parts} = {workers} workers * accumulate={accumulate}"
            )


def check_placed(batch: PyTree, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError for a leaf of a batch that lies on one process, where the mesh spans several.

    `jax.jit` takes such arrays for equal on all processes: of the rows of each it would use a part. Arrays that are
    traced, and shapes, pass.
    """
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not hasattr(leaf, "shape"):
            continue
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            sharding = f"jax.NamedSharding(mesh, jax.P({axes}))"
            raise ValueError(
                f"batch leaf {path_name(path)} of shape {leaf.shape} lies on process {jax.process_index()} alone, but "
                "the mesh spans several processes, and a step would use only a part of its rows. Place it on the mesh. "
                f"Rows of this process: jax.make_array_from_process_local_data({sharding}, rows). A batch that every "
                f"process has whole: jax.device_put(batch, {sharding})"
            )


_RANDOM = (
    "Give a random key to step.init(params, key=...) instead: loss_fn(params, batch, key=...) then gets another one "
    "for each worker, step and sample"
)
_SHARED = (
    "A value that all samples share may be repeated for each of them, as in np.full(len(x), value), or be part of the "
    "model_state, or a constant of loss_fn"
)


def check_state(state: PyTree, mesh: jax.sharding.Mesh) -> None:
    """Raise ValueError unless all per-worker state holds as many workers as the mesh."""
    for node in jax.tree.leaves(state, is_leaf=is_per_worker):
        if is_per_worker(node) and any(map(np.prod, node.shapes)):
            workers = int(np.prod([mesh.shape[axis] for axis in node.axes]))
            if node.workers != workers:
                raise ValueError(
                    f"the state holds {node.workers} workers, but the mesh has {workers} along {node.axes}. Make it "
                    "with step.init(params) (or fn.init of gcjax.compressed_value_and_grad), which places it on the "
                    "mesh once; do not call gcjax.distribute on it again. To go on with a state of another number of "
                    "workers, use gcjax.resize(state, mesh)"
                )


def check_compressors(opt_state: PyTree, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a compressor exchanges nothing along the axes of the step, or not in every step.

    Raises:
      TypeError: `optax.lookahead`, which takes no parameters but pairs of them.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_is_special):
        if isinstance(node, optax.LookaheadState):
            raise TypeError(
                "optax.lookahead trains pairs of parameters (LookaheadParams), but a loss takes single ones. Give the "
                "step the inner optimiser, and every k steps move the slow parameters yourself: "
                "slow = optax.incremental_update(state.params, slow, 0.5), then "
                "state = state._replace(params=jax.tree.map(jnp.copy, slow))"
            )
        if isinstance(node, optax.ApplyIfFiniteState) and compress_states(node):
            raise ValueError(
                "optax.apply_if_finite wraps a compressor, which must take part in every step. Leave it out: "
                "the training step skips bad steps by itself"
            )
    for compressor in compress_states(opt_state):
        if not set(compressor.report.axes) & set(axes):
            named = axes[0] if len(axes) == 1 else axes
            raise ValueError(
                f"a compressor in tx has no axis_name, so the workers' parameters would drift apart; give it "
                f"axis_name={named!r}, the axis of the training step"
            )


def check_params(params: PyTree, trained: PyTree) -> None:
    """Raise TypeError for a parameter that is no array, or that is to be trained and has no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_is_array(path, leaf)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    for path, leaf in leaves:  # first, as counters come with keys
        if _is_key(leaf):
            raise TypeError(f"params{jax.tree_util.keystr(path)} is a random key, which cannot be trained. {_OWN_KEYS}")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, which cannot be trained; make "
                "it part of the model_state, or freeze it with make_train_step(trainable=...)"
            )


def check_model_state(model_state: PyTree) -> None:
    """Raise TypeError for a random key in the model state: all workers and samples would draw the same from it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if _is_key(leaf):
            raise TypeError(
                f"model_state{jax.tree_util.keystr(path)} is a random key, which would be the same for all workers and "
                f"samples. {_OWN_KEYS}"
            )


def _is_key(leaf: object) -> bool:
    return jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


_OWN_KEYS = (
    "Leave random keys out of both, and give step.init(key=...): loss_fn(params, batch, key=...) then gets another key "
    "for each worker, step and sample. With Flax NNX: graphdef, params, rest = nnx.split(model, nnx.Param, ...); in "
    "loss_fn: model = nnx.merge(graphdef, params, rest, copy=True), then nnx.reseed(model, default=key) if the model "
    "was made with nnx.Rngs(0), or dropout=key for a stream of that name"
)


def checked_specs(param_specs: PyTree, mesh: jax.sharding.Mesh) -> list[PartitionSpec]:
    """The leaves of `param_specs`.

    Raises:
      TypeError: one is no `PartitionSpec`.
      ValueError: one shards over no axis of the mesh.
    """
    found = jax.tree_util.tree_leaves_with_path(param_specs)
    for path, spec in found:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"param_specs{jax.tree_util.keystr(path)} must be a jax.sharding.PartitionSpec, got {spec!r}"
            )
        if unknown := sorted({name for entry in spec for name in axis_tuple(entry)} - set(mesh.shape)):
            raise ValueError(f"param_specs has {spec}, but the mesh has no axis {unknown}, only {tuple(mesh.shape)}")
    return [spec for _, spec in found]


def check_dimensions(spec: PartitionSpec, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a spec shards a dimension over axes of both sorts."""
    for _, names in sharded_dimensions(spec, tuple(mesh.shape)):
        if set(names) & set(axes) and not set(names) <= set(axes):
            raise ValueError(
                f"param_specs has {spec}, which shards one dimension over {names}, some of them axes of the batch and "
                "some not; shard different dimensions over them"
            )


def check_no_further_axes(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a loss could use axes of the mesh along which the workers do not lie.

    Without its tracking JAX would count a gradient once for every device along an axis over which the loss sums.
    """
    if others := [name for name, size in mesh.shape.items() if size > 1 and name not in axes]:
        raise ValueError(
            f"check_vma=False, but the mesh has the axes {others} beside axis_name={axes}: without JAX's tracking, "
            "gradients of a loss that calls collectives over them would be wrong. Use gcjax.compressed_value_and_grad, "
            "which leaves them to JAX, or a mesh of the workers' axes alone"
        )


def _is_special(node: object) -> bool:
    return isinstance(node, (optax.ApplyIfFiniteState, optax.LookaheadState))
