"""One update of the optimiser, on one device or split in two where parameters are sharded, with its results checked."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from gcjax._core.chain import noting_means, replaying
from gcjax._core.per_worker import is_per_worker
from gcjax._core.state import is_compress_state
from gcjax._jax_compat import constrain, equal_everywhere, explicit_part, vary, varying_axes
from gcjax._training.bad_steps import bad_flags
from gcjax._training.sharding import is_spec, state_specs
from gcjax._types import Array, PyTree

_EXTRA_ARGUMENTS = (
    "A step gives tx the extra arguments value, the mean of the workers' losses, and sum_grad_squared, where squares "
    "are computed. A transform that takes no extra arguments, although its type says that it does, such as "
    "optax.contrib.sam, stands after the compressor, and you wrap it: optax.GradientTransformation(*transform). A "
    "transform that needs an argument that a step does not have, such as a line search, cannot be used"
)


class Updated(NamedTuple):
    """What an update returns.

    Attributes:
      updates: for the parameters.
      opt_state: the new state.
      means: the means that the compressors return.
    """

    updates: PyTree
    opt_state: PyTree
    means: list[PyTree]


def update_with(
    tx: optax.GradientTransformationExtraArgs,
    grad: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra: Any,
) -> Updated:
    """`tx.update` on one device.

    Args:
      tx: the optimiser.
      grad, opt_state, params: its arguments.
      **extra: more arguments of `tx.update`. XLA computes none that no transform reads.

    Raises:
      ValueError: an update, or state outside `PerWorker`, would differ between workers.
      TypeError: `tx` asks for more.
    """
    with noting_means() as means:
        updates, new = _update(tx, grad, opt_state, params, extra)
    _check_axes(opt_state, new)
    _check_updates(updates, params)
    _check_state(opt_state, new, params)
    return Updated(updates, new, means)


def _update(
    tx: optax.GradientTransformationExtraArgs, grad: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    try:
        return tx.update(grad, opt_state, params, **extra)
    except TypeError as error:
        error.add_note(_EXTRA_ARGUMENTS)
        raise


class Compressed(NamedTuple):
    """What the shards of all workers make of their gradients, before the optimiser sees the mean.

    Attributes:
      means: the means that the compressors return, sharded like the parameters.
      per_worker: the new state with None in place of all nodes but `PerWorker`.
      flags: bool[] for each compressor: whether it reports a bad step.
    """

    means: list[PyTree]
    per_worker: PyTree
    flags: list[Any]


def compress_shards(
    tx: optax.GradientTransformationExtraArgs,
    grad: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    checks: bool = True,
    **extra: Any,
) -> Compressed:
    """The part of `tx.update` that a device does with its shards: all up to the compressors. Inside `jax.shard_map`.

    Args:
      tx, grad, opt_state, params, **extra: as for `update_with`.
      checks: whether to look for transforms before the compressors that mix parameters; it costs a trace.

    Raises:
      ValueError: as `update_with`; a parameter passes through no compressor; `checks` found something.
    """
    found, shards = update_with(tx, grad, opt_state, params, **extra), varying_axes(params)
    means = {path: x for mean in found.means for path, x in jax.tree_util.tree_leaves_with_path(mean)}
    for (path, _), param in zip(jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(params), strict=True):
        if path not in means:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} passes through no compressor. Where parameters are sharded, all "
                "of them must: give it to gcjax.dense_compress, for example by optax.partition"
            )
        if axes := (varying_axes(means[path]) - varying_axes(param)) & shards:
            raise _mixed(path, axes)
    if checks:
        _check_mixing(tx, grad, opt_state, params, extra)
    flags = bad_flags(found.updates, opt_state, found.opt_state)
    return Compressed(found.means, per_worker_part(found.opt_state), flags)


def _check_mixing(
    tx: optax.GradientTransformationExtraArgs, grad: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> None:
    """Raise ValueError if a transform before the compressors mixes the shards of different parameters.

    Traced as if one sharded parameter were whole: its mean must then be equal on all shards, too.
    """
    shards = varying_axes(params)
    sharded = [path for path, x in jax.tree_util.tree_leaves_with_path(params) if varying_axes(x)]
    if len(sharded) < 2:
        return
    whole = sharded[0]

    def unsharded(path, node):  # the parameter, or state that belongs to it
        if is_compress_state(node) or path[len(path) - len(whole) :] != whole:
            return node
        return jax.tree.map(lambda x: vary(equal_everywhere(x), varying_axes(x) - shards), node)

    def means_of(*trees):
        cast = jax.tree_util.tree_map_with_path
        grad, opt_state, params = (cast(unsharded, tree, is_leaf=is_compress_state) for tree in trees)
        with noting_means() as means:
            _update(tx, grad, opt_state, params, extra)
        return means

    try:
        found = jax.eval_shape(means_of, grad, opt_state, params)
    except TypeError:  # a condition or loop in which both types meet
        return
    for path, x in (leaf for mean in found for leaf in jax.tree_util.tree_leaves_with_path(mean)):
        if path == whole and (axes := varying_axes(x) & shards):
            raise _mixed(path, axes)


def _mixed(path: tuple, axes: frozenset[str]) -> ValueError:
    return ValueError(
        f"the gradient of params{jax.tree_util.keystr(path)} depends, before the compressor, on the shards of other "
        f"parameters that a device has along {sorted(axes)}: a transform that looks at all parameters, such as "
        "optax.clip_by_global_norm, takes a device's shards for the whole. Put it after the compressor, where it sees "
        "whole arrays"
    )


def per_worker_part(tree: PyTree) -> PyTree:
    """A state with None in place of all nodes but `PerWorker`."""
    return jax.tree.map(lambda node: node if is_per_worker(node) else None, tree, is_leaf=is_per_worker)


def per_worker_specs(tree: PyTree) -> PyTree:
    """`PartitionSpec`s of `per_worker_part`."""
    return jax.tree.map(state_specs, per_worker_part(tree), is_leaf=is_per_worker)


def norm_of(trees: list[PyTree]) -> Array:
    """2-norm, float32, over all leaves; NaN if there is none."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(trees)]
    return jnp.sqrt(sum(squares)) if squares else jnp.float32(jnp.nan)


def update_whole(
    tx: optax.GradientTransformationExtraArgs,
    compressed: Compressed,
    opt_state: PyTree,
    params: PyTree,
    mesh: Mesh,
    specs: tuple[PyTree, PyTree],
    **extra: Any,
) -> tuple[PyTree, PyTree]:
    """The rest of `tx.update`, all after the compressors, on global arrays: what it looks at is never a shard.

    Args:
      tx, opt_state, params, **extra: as for `update_with`, outside `jax.shard_map`.
      compressed: of `compress_shards`.
      mesh: the devices.
      specs: `PartitionSpec`s of the updates and of the state.

    Returns:
      The updates and the new state.
    """

    def update(means, opt_state, params, extra):
        with replaying(means):
            return _update(tx, jax.tree.map(jnp.zeros_like, params), opt_state, params, extra)

    leaf_specs = jax.tree.broadcast(specs, (params, opt_state), is_leaf=is_spec)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), leaf_specs, is_leaf=is_spec)
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if explicit:
        out_sharding = jax.tree.map(explicit_part, shardings)
        update = jax.sharding.auto_axes(update, axes=tuple(explicit), out_sharding=out_sharding)
    updates, new = update(compressed.means, opt_state, params, extra)
    if not explicit:
        updates, new = jax.tree.map(constrain, (updates, new), shardings)
    state = jax.tree.map(lambda x, own: x if own is None else own, new, compressed.per_worker, is_leaf=_is_whole)
    return updates, state


def _is_whole(node: object) -> bool:
    return node is None or is_per_worker(node)


def _check_updates(updates: PyTree, params: PyTree) -> None:
    """Raise ValueError if an update differs between workers that have the same parameter."""
    shards = varying_axes(params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if axes := varying_axes(update) - shards:
            raise ValueError(
                f"the update of params{jax.tree_util.keystr(path)} differs between workers along {sorted(axes)}: no "
                "compressor has averaged it. To freeze it (optax.set_to_zero, optax.masked), pass "
                "make_train_step(trainable=...). To train it, give it to a compressor too, for example by "
                "optax.partition to gcjax.dense_compress; optax.masked passes the other leaves through unchanged"
            )


def _check_axes(old: PyTree, new: PyTree) -> None:
    """Raise ValueError if state per worker would differ along axes that its transform does not name."""
    for where, before, after in _pairs(old, new):
        if is_per_worker(after) and (axes := sorted(varying_axes(after) - varying_axes(before))):
            raise ValueError(
                f"{where} would differ between workers along {axes}, which its transform does not name. A compressor "
                "averages over the axes in its axis_name, and those of a fast link in its inner_axis_name: together "
                "they must be all axes of the workers along which no parameter is sharded"
            )


def _check_state(old: PyTree, new: PyTree, params: PyTree) -> None:
    """Raise ValueError if other state would differ between workers."""
    shards = varying_axes(params)
    for where, before, after in _pairs(old, new):
        if not is_per_worker(after) and (axes := sorted(varying_axes(after) - varying_axes(before) - shards)):
            raise ValueError(
                f"{where} would differ between workers along {axes}: a transform with state stands before the "
                "compressor and sees each worker's own gradient. Put it after the compressor, or wrap it in "
                "gcjax.local_transform"
            )


def _pairs(old: PyTree, new: PyTree) -> Iterator[tuple[str, PyTree, PyTree]]:
    """Name, old and new value of each leaf of an optimiser's state, and of each node of `PerWorker`."""
    before = jax.tree.leaves(old, is_leaf=is_per_worker)
    for (path, after), x in zip(jax.tree_util.tree_leaves_with_path(new, is_leaf=is_per_worker), before, strict=True):
        yield f"opt_state{jax.tree_util.keystr(path)}", x, after
