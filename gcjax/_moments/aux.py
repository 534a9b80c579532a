"""Auxiliary output of a loss: that of a batch, from that of its parts."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from gcjax._kernels.layout import path_name
from gcjax._moments.jaxprs import depends
from gcjax._moments.program import inline
from gcjax._types import Array, PyTree


class Traced:
    """A function of the whole batch, traced and not run.

    Args:
      fn: the function.
      args: its arguments, pytrees of arrays.
      axis: name of the axis over the samples, or None. It is bound with size 1.

    Attributes:
      shapes: of the results.
    """

    def __init__(self, fn: Callable[..., PyTree], *args: PyTree, axis: Hashable = None) -> None:
        env = [] if axis is None else [(axis, 1)]
        self._closed, self.shapes = jax.make_jaxpr(fn, axis_env=env, return_shape=True)(*args)
        self._args, self._axis = args, axis

    def depends_on(self, marks: PyTree) -> PyTree:
        """For each result, whether it depends on an argument that `marks`, a prefix of the arguments, marks True."""
        inputs = jax.tree.leaves(jax.tree.broadcast(marks, self._args))
        found = depends(self._closed.jaxpr, inputs, self._axis)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), found)

    def values(self) -> PyTree:
        """The results, of which only few may be used: under `jax.jit`, what only the others need does not run."""
        found = inline(self._closed, jax.tree.leaves(self._args), keep_effects=False)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), found)


def check_samples_lead(of_part: tuple[int, ...], of_batch: tuple[int, ...]) -> None:
    """Raise ValueError if the shapes of a leaf of aux for a part of a batch and for all of it differ behind axis 0."""
    if of_part[1:] != of_batch[1:]:
        raise ValueError(
            f"loss_fn returns aux of shape {of_part} for a part of the batch, and {of_batch} for all of it; only the "
            "leading axis may be that of the samples: transpose it in loss_fn"
        )


def whole_batch_aux(stacked: PyTree, shapes: PyTree, depend: PyTree, values: Callable[[], PyTree]) -> PyTree:
    """Aux of the whole batch.

    Args:
      stacked: aux of all parts, each leaf `[parts, ...]`.
      shapes: those of aux for the whole batch.
      depend: for each leaf, whether it depends on the samples.
      values: to leaves of aux for the whole batch, right where they do not depend on the samples.

    Raises:
      TypeError: a leaf without an axis of samples depends on them, and has no mean.
    """
    shared: list[Array] = []

    def merge(path: tuple, a: Array, like: jax.ShapeDtypeStruct, depends: bool, index: int) -> Array:
        if a.shape[1:] != like.shape:
            check_samples_lead(a.shape[1:], like.shape)
            return a.reshape(like.shape)
        if a.shape[0] == 1:
            return a[0]
        if jnp.issubdtype(a.dtype, jnp.inexact):
            # The mean of equal values, such as running statistics under sample_axis, could differ in the last bit.
            return jnp.where(jnp.all(a == a[0], axis=0), a[0], jnp.mean(a, axis=0))
        if depends:
            raise TypeError(_no_mean(path, a))
        if not shared:
            shared.extend(jax.tree.leaves(values()))
        return jnp.asarray(shared[index])

    indices = jax.tree.unflatten(jax.tree.structure(stacked), range(len(jax.tree.leaves(stacked))))
    return jax.tree_util.tree_map_with_path(merge, stacked, shapes, depend, indices)


def _no_mean(path: tuple, a: Array) -> str:
    return (
        f"the leaf {path_name(path)} that loss_fn returns beside its loss is {a.dtype}{list(a.shape[1:])}. It depends "
        "on the samples and has no axis of them, so that the batch is taken in parts whose values have no mean. Return "
        "one value for each sample and add them up outside (pred == y, of shape [batch], instead of its sum), or "
        "return a floating-point mean (jnp.mean(pred == y)). A model_state may hold such a mean; it may hold a count "
        "of samples under moments=None"
    )
