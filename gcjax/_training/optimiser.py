"""One update of the optimiser, with what it asks for and with its results checked."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from gcjax._core.per_worker import is_per_worker
from gcjax._jax_compat import varying_axes
from gcjax._types import Array, PyTree


def update_with(
    tx: optax.GradientTransformationExtraArgs,
    grad: PyTree,
    opt_state: PyTree,
    params: PyTree,
    squares: PyTree,
    value: Callable[[], Array],
) -> tuple[PyTree, PyTree]:
    """`tx.update`, which gets `value()` only if it asks for a value.

    Args:
      tx: the optimiser.
      grad, opt_state, params: its arguments.
      squares: `sum_grad_squared`, or None.
      value: computes the loss to pass on.

    Raises:
      ValueError: an update, or state outside `PerWorker`, would differ between workers.
      TypeError: `tx` asks for more.
    """
    extra: dict[str, Any] = {} if squares is None else {"sum_grad_squared": squares}
    try:
        try:
            updates, new = tx.update(grad, opt_state, params, **extra)
        except TypeError as error:
            if not _asks_for_more(error):
                raise
            updates, new = tx.update(grad, opt_state, params, value=value(), **extra)
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
            "and with moments sum_grad_squared. A line search would need the loss of all workers"
        ) from error
    _check_updates(updates, params)
    _check_state(opt_state, new)
    return updates, new


def _asks_for_more(error: TypeError) -> bool:
    return "required keyword-only argument" in str(error)


def _check_updates(updates: PyTree, params: PyTree) -> None:
    """Raise ValueError if an update differs between workers that have the same parameter."""
    for (path, update), param in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        if axes := sorted(varying_axes(update) - varying_axes(param)):
            raise ValueError(
                f"the update of params{jax.tree_util.keystr(path)} differs between workers along {axes}: no compressor "
                "has averaged it. To freeze it (optax.set_to_zero, optax.masked), pass "
                "make_train_step(trainable=...). To train it, give it to a compressor too, for example by "
                "optax.partition to gcjax.dense_compress; optax.masked passes the other leaves through unchanged"
            )


def _check_state(old: PyTree, new: PyTree) -> None:
    """Raise ValueError if state that all workers share would differ between them."""
    before = jax.tree.leaves(old, is_leaf=is_per_worker)
    for (path, after), x in zip(jax.tree_util.tree_leaves_with_path(new, is_leaf=is_per_worker), before, strict=True):
        if not is_per_worker(after) and (axes := sorted(varying_axes(after) - varying_axes(x))):
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} would differ between workers along {axes}: a transform with "
                "state stands before the compressor and sees each worker's own gradient. Put it after the compressor, "
                "or wrap it in gcjax.local_transform"
            )
