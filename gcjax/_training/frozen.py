"""Parameters that are trained, and those that are frozen.

Each of the two is a pytree like the parameters with None, which has no leaves, in place of the others. An
`optax.MaskedNode` would look to a compressor like a leaf that `optax.masked` hides from it.
"""

from collections.abc import Callable

import jax
import optax

from gcjax._types import PyTree
from gcjax._validation import check_flag

Split = Callable[[PyTree], tuple[PyTree, PyTree]]  # of the parameters, into the trained and the frozen ones


def split_by(trainable: PyTree | Callable[[PyTree], PyTree]) -> Split:
    """The function that splits parameters. `trainable`: see `make_train_step`."""

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        if trainable is None:
            return params, None
        flags = trainable(params) if callable(trainable) else trainable
        for path, flag in jax.tree_util.tree_leaves_with_path(flags):
            check_flag(f"trainable{jax.tree_util.keystr(path)}", flag)
        try:
            flags = jax.tree.broadcast(flags, params)
        except ValueError as error:
            raise ValueError(f"trainable={flags!r} is not a prefix of the parameters' tree: {error}") from error
        if not any(jax.tree.leaves(flags)):
            raise ValueError(f"trainable={flags!r} freezes all parameters: nothing is left to train")
        trained = jax.tree.map(lambda x, flag: x if flag else None, params, flags)
        frozen = jax.tree.map(lambda x, flag: None if flag else x, params, flags)
        return trained, frozen

    return split


def merge_params(trained: PyTree, frozen: PyTree) -> PyTree:
    """The inverse of a split."""
    if frozen is None:
        return trained
    return jax.tree.map(lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None)


def of_trained(tx: optax.GradientTransformationExtraArgs, split: Split) -> optax.GradientTransformationExtraArgs:
    """`tx` whose `init` takes all parameters, and keeps state of the trained ones only."""
    return optax.GradientTransformationExtraArgs(lambda params: tx.init(split(params)[0]), tx.update)
