"""The checks of a compressing transform's `update`, while it is traced: of its state, and of the gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._core.options import check_checksum, check_options, meaning
from gcjax._core.owned import check_workers
from gcjax._core.state import CompressState
from gcjax._jax_compat import partitioned_axes, tracks_variation, unchecked_axes, varying_axes
from gcjax._kernels.layout import Layout, path_name
from gcjax._types import Array, PyTree

_BY_JAX = (
    "JAX has reduced it over these devices already, so compressing it would save nothing. Take gradients with "
    "gcjax.compressed_value_and_grad, or the whole step from gcjax.make_train_step, and give the compressor axis_name. "
    "(To compress as a single worker all the same, call update inside jax.shard_map over the mesh.)"
)


def is_masked(node: PyTree) -> bool:
    return isinstance(node, optax.MaskedNode)


def mask_like(updates: PyTree, tree: PyTree) -> PyTree:
    """`optax.masked` and `optax.partition` hide parts of the updates but not of extra arguments. Hide the same."""
    if tree is None:
        return None
    try:
        return jax.tree.map(lambda u, x: u if is_masked(u) else x, updates, tree, is_leaf=is_masked)
    except ValueError:  # of another structure: `check_inputs` says so
        return tree


def check_state(
    buckets: PyTree, recorded: Array, options: dict[str, str], workers: int, new_buckets: Callable[[], PyTree]
) -> None:
    """Raise ValueError for a state of another number of workers, or one that other options made.

    Args:
      buckets: one worker's state of each bucket.
      recorded: the checksum of options in its arrays.
      options: the `meaning` of the state.
      workers: how many run.
      new_buckets: makes a new state of this transform.
    """
    check_workers(buckets, workers)
    check_options(meaning(jax.eval_shape(new_buckets)), options)
    if not isinstance(recorded, jax.core.Tracer):
        check_checksum(options, recorded)


def check_gradient(updates: PyTree, entries: int, axes: tuple[str, ...]) -> None:
    """Raise ValueError for a gradient that is not this worker's own and whole; see the functions below."""
    if axes:
        check_countable(entries)
        _reject_hidden(updates)
    else:
        _reject_several_devices(updates)
    _reject_reduced(updates, axes)


def check_countable(entries: int) -> None:
    """Raise ValueError if counts of a device's entries would not fit into int32."""
    if entries >= 2**31:
        raise ValueError(
            f"this device holds {entries:,} parameters, and gcjax counts to {2**31 - 1:,}; shard the parameters over a "
            "further mesh axis (gcjax.init_sharded)"
        )


def check_inputs(layout: Layout, state: CompressState, params: PyTree, sum_grad_squared: PyTree) -> None:
    if tuple(s.bucket for s in state.buckets.value) != layout.buckets:
        raise ValueError(
            f"the state was initialised for other leaves than this gradient with shapes {layout.shapes}; call init "
            "with the parameters that update sees"
        )
    for name, tree in (("params", params), ("sum_grad_squared", sum_grad_squared)):
        if tree is not None:
            _check_like_gradient(name, tree, layout)
    if sum_grad_squared is not None:
        _check_not_negative(sum_grad_squared)


def _check_like_gradient(name: str, tree: PyTree, layout: Layout) -> None:
    if jax.tree.structure(tree) != layout.treedef:
        raise ValueError(
            f"{name} has the structure {jax.tree.structure(tree)}, the gradient {layout.treedef}; they must agree. "
            "(Inside optax.flatten: put the compressor before it.)"
        )
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(tree), layout.shapes, strict=True):
        if jnp.shape(leaf) != shape:
            raise ValueError(f"{name} leaf {path_name(path)} has shape {jnp.shape(leaf)}, the gradient {shape}")


def _check_not_negative(sum_grad_squared: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(sum_grad_squared):
        if not isinstance(leaf, jax.core.Tracer) and (np.asarray(leaf) < 0).any():
            raise ValueError(
                f"sum_grad_squared leaf {path_name(path)} has a negative entry ({np.min(leaf)}); it must be a sum of "
                "squares, as gcjax.value_and_moments returns"
            )


def _reject_reduced(updates: PyTree, axes: tuple[str, ...]) -> None:
    """Raise when a gradient is typed as equal on all workers. Where JAX tracks no such types, nothing is checked."""
    if not tracks_variation(axes):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        reduced = [axis for axis in axes if axis not in varying_axes(leaf)]
        if reduced:
            raise ValueError(
                f"gradient leaf {path_name(path)} does not vary over {reduced}: it has been reduced already, so "
                "compressing it would save nothing. jax.grad of replicated parameters inside shard_map sums over the "
                "workers. Take local gradients: gcjax.local_gradients(jax.grad(loss), axis_name=...), "
                "gcjax.value_and_moments or gcjax.make_train_step. (Behind another compressor in the chain: keep one. "
                "Inside optax.MultiSteps, whose accumulator is not per worker: use make_train_step(accumulate=...) "
                "instead.)"
            )


def _reject_hidden(updates: PyTree) -> None:
    """Raise when leaves are hidden where JAX has no types that would show whether anything else averages them."""
    hidden = [path for path, x in jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_masked) if is_masked(x)]
    if hidden and (axes := unchecked_axes()):
        raise ValueError(
            f"optax.masked or optax.partition hides the gradient at {path_name(hidden[0])} from the compressor, on the "
            f"devices of {axes}, in jax.pmap or in jax.shard_map with check_vma=False. There gcjax cannot see whether "
            "anything else averages it over the workers; if nothing does, the parameters drift apart. Compress all "
            "parameters, or use jax.shard_map with check_vma=True or gcjax.make_train_step, where it is checked. To "
            "freeze parameters, use make_train_step(trainable=...)"
        )


def _reject_several_devices(updates: PyTree) -> None:
    """Raise when a single worker is seen to be one of several: JAX partitions, or has workers that it does not know."""
    if axes := unchecked_axes():
        raise ValueError(
            f"no axis_name was given, but update runs on the devices of {axes}, in jax.pmap or in jax.shard_map with "
            "check_vma=False: each would apply its own update, and the parameters would drift apart. Give the "
            "compressor the axis_name. (To compress as a single worker all the same, use check_vma=True.)"
        )
    if axes := partitioned_axes(updates):
        raise ValueError(f"no axis_name was given, but the gradient is computed on a mesh with axes {axes}: {_BY_JAX}")


def reject_partitioned(devices: int) -> None:
    """Raise when the program of a single worker is lowered for several devices."""
    if devices > 1:
        raise ValueError(f"no axis_name was given, but the gradient is computed on {devices} devices: {_BY_JAX}")
