"""One update of the optimiser, with what it asks for and with its results checked."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from gcjax._core.per_worker import is_per_worker
from gcjax._core.state import is_compress_state
from gcjax._jax_compat import equal_everywhere, vary, varying_axes
from gcjax._training.sharding import differs_between_shards
from gcjax._types import Array, PyTree


def update_with(
    tx: optax.GradientTransformationExtraArgs,
    grad: PyTree,
    opt_state: PyTree,
    params: PyTree,
    squares: PyTree,
    value: Callable[[], Array],
    checks: bool,
) -> tuple[PyTree, PyTree]:
    """`tx.update`, which gets `value()` only if it asks for a value.

    Args:
      tx: the optimiser.
      grad, opt_state, params: its arguments.
      squares: `sum_grad_squared`, or None.
      value: computes the loss to pass on.
      checks: whether to look for transforms that mix parameters of which a device has a shard only.

    Raises:
      ValueError: an update, or state outside `PerWorker`, would differ between workers; or what `checks` looks for.
      TypeError: `tx` asks for more.
    """
    extra: dict[str, Any] = {} if squares is None else {"sum_grad_squared": squares}

    def update(grad, opt_state, params):
        try:
            return tx.update(grad, opt_state, params, **extra)
        except TypeError as error:
            if not _asks_for_more(error):
                raise
            return tx.update(grad, opt_state, params, value=value(), **extra)

    try:
        updates, new = update(grad, opt_state, params)
    except TypeError as error:
        if "unexpected keyword argument 'sum_grad_squared'" in str(error):
            raise TypeError(
                f"a transform of tx takes no extra arguments, although its type says that it does: {error}. After the "
                "compressor, wrap it: optax.GradientTransformation(*transform). It must not wrap the compressor, as in "
                "optax.contrib.sam(optax.chain(compressor, ...), ...): put it after the compressor"
            ) from error
        if not _asks_for_more(error):
            raise
        raise TypeError(
            f"tx needs an argument that a step does not have: {error}. It gets value, the mean of the workers' losses, "
            "and sum_grad_squared where squares are computed (moments=gcjax.value_and_moments does so always). A line "
            "search would need the loss of all workers"
        ) from error
    _check_compressors(opt_state, new)
    _check_updates(updates, params)
    _check_state(opt_state, new, params)
    if checks:
        _check_shards(update, grad, opt_state, params)
    return updates, new


def _asks_for_more(error: TypeError) -> bool:
    return "required keyword-only argument" in str(error)


def _check_updates(updates: PyTree, params: PyTree) -> None:
    """Raise ValueError if an update differs between workers that have the same parameter."""
    shards = varying_axes(params)
    for (path, update), param in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        axes = varying_axes(update) - varying_axes(param)
        if axes & shards:
            raise _mixed(path, axes)
        if axes:
            raise ValueError(
                f"the update of params{jax.tree_util.keystr(path)} differs between workers along {sorted(axes)}: no "
                "compressor has averaged it. To freeze it (optax.set_to_zero, optax.masked), pass "
                "make_train_step(trainable=...). To train it, give it to a compressor too, for example by "
                "optax.partition to gcjax.dense_compress; optax.masked passes the other leaves through unchanged"
            )


def _check_shards(
    update: Callable[..., tuple[PyTree, PyTree]], grad: PyTree, opt_state: PyTree, params: PyTree
) -> None:
    """Raise ValueError if the update of a sharded parameter depends on the shards of others.

    Traced as if that parameter were not sharded: its update must then be equal on all shards, too.
    """
    shards = varying_axes(params)
    sharded = [path for path, x in jax.tree_util.tree_leaves_with_path(params) if varying_axes(x)]
    if len(sharded) < 2:
        return
    whole = sharded[0]

    def is_of_whole(path):  # like the parameter, or state that belongs to it
        return path[len(path) - len(whole) :] == whole

    def unsharded(path, node):
        if is_compress_state(node) or not is_of_whole(path):
            return node
        return jax.tree.map(lambda x: vary(equal_everywhere(x), varying_axes(x) - shards), node)

    def update_unsharded(*trees):
        cast = [jax.tree_util.tree_map_with_path(unsharded, tree, is_leaf=is_compress_state) for tree in trees]
        return update(*cast)[0]

    try:
        updates = jax.eval_shape(update_unsharded, grad, opt_state, params)
    except TypeError:  # a condition or loop in which both types meet
        return
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        if path == whole and (axes := varying_axes(x) & shards):
            raise _mixed(path, axes)


def _mixed(path: tuple, axes: frozenset[str]) -> ValueError:
    return ValueError(
        f"the update of params{jax.tree_util.keystr(path)} depends on the shards of other parameters that a device "
        f"has along {sorted(axes)}: a transform that looks at all parameters, such as optax.clip_by_global_norm, would "
        "take a device's shards for the whole. Leave it out, or write it as optax.stateless with a jax.lax.psum over "
        "the shards. make_train_step(checks=False) turns this check off where all parameters are sharded"
    )


def _check_compressors(old: PyTree, new: PyTree) -> None:
    """Raise ValueError if state per worker would differ along axes that its transform does not name."""
    for path, after, axes in _differing(old, new):
        if is_per_worker(after):
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} would differ between workers along {axes}, which its transform "
                "does not name. A compressor averages over the axes in its axis_name, and those of a fast link in its "
                "inner_axis_name: together they must be all axes of the step along which no parameter is sharded"
            )


def _check_state(old: PyTree, new: PyTree, params: PyTree) -> None:
    """Raise ValueError if state that all workers share would differ between them."""
    for path, _, axes in _differing(old, new):
        if set(axes) <= varying_axes(params):
            raise differs_between_shards(path, axes)
        raise ValueError(
            f"opt_state{jax.tree_util.keystr(path)} would differ between workers along {axes}: a transform with "
            "state stands before the compressor and sees each worker's own gradient. Put it after the compressor, "
            "or wrap it in gcjax.local_transform"
        )


def _differing(old: PyTree, new: PyTree) -> Iterator[tuple[tuple, Any, list[str]]]:
    """The nodes of a new state that differ along more axes than before: path, node and these axes."""
    before = jax.tree.leaves(old, is_leaf=is_per_worker)
    for (path, after), x in zip(jax.tree_util.tree_leaves_with_path(new, is_leaf=is_per_worker), before, strict=True):
        if axes := sorted(varying_axes(after) - varying_axes(x)):
            yield path, after, axes
