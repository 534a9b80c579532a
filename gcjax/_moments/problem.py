"""From a loss, its options and its arguments to the loss of one sample, with everything checked."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._kernels.layout import check_is_array
from gcjax._types import Array, PyTree
from gcjax._validation import check_choice, check_integer

MAX_BYTES = 256 << 20
MOST_GROUPS, FEWEST_GROUPS = 8, 4  # under groups="auto"


@dataclass(frozen=True)
class Options:
    """The options of `value_and_moments`, checked as far as they can be before the arguments are known."""

    loss_fn: Callable[[PyTree, PyTree], Any]
    has_aux: bool = False
    in_axes: PyTree = 0
    sample_axis: Hashable = None
    microbatches: int | None = None
    groups: int | str | None = None
    reduction: str = "mean"
    method: str = "auto"
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn must be a function (params, batch) -> loss, got {self.loss_fn!r}")
        check_choice("method", self.method, ("auto", "sinks", "vmap", "scan"))
        check_choice("reduction", self.reduction, ("mean", "sum"))
        if self.microbatches is not None:
            check_integer("microbatches", self.microbatches, 1)
        self._check_groups()
        check_integer("max_bytes", self.max_bytes, 1)
        if self.method == "scan" and self.sample_axis is not None:
            raise ValueError(
                f"method='scan' takes one sample at a time and cannot bind sample_axis={self.sample_axis!r}; use "
                "'sinks' or 'vmap'"
            )
        for axis in jax.tree.leaves(self.in_axes):
            if isinstance(axis, bool) or axis != 0:
                raise ValueError(
                    f"in_axes may only hold 0 (split over samples) and None (shared by all samples), got {axis!r}"
                )

    def _check_groups(self) -> None:
        if self.groups is None or self.groups == "auto":
            return
        if isinstance(self.groups, str):
            raise ValueError(f"groups must be an integer of at least 2, 'auto' or None, got {self.groups!r}")
        check_integer("groups", self.groups, 2)
        if self.microbatches is not None:
            raise ValueError("give groups or microbatches, not both: each says what takes the place of single samples")
        if self.method in ("vmap", "scan"):
            raise ValueError(f"method={self.method!r} takes every sample by itself; groups need 'auto' or 'sinks'")


class Problem(NamedTuple):
    """One call of `value_and_moments`.

    Attributes:
      gradient: `(params, mapped, shared) -> (grad, (value, aux))` of one part. Of a mean, `grad` is already divided by
        the number of parts; `value` is not.
      loss: `(params, mapped, shared) -> (value, aux)` of one part.
      params: pytree, typed as varying over every mesh axis of the batch.
      mapped: the leaves of the batch that are split over samples, each `[parts, part size, ...]`.
      shared: the other leaves.
      parts: number of microbatches, or else the batch size.
      groups: number of groups of parts that a loop takes at a time, a divisor of their number, or None: one by one.
    """

    gradient: Callable[[PyTree, list[Array], list[Array]], tuple[PyTree, tuple[Array, PyTree]]]
    loss: Callable[[PyTree, list[Array], list[Array]], tuple[Array, PyTree]]
    params: PyTree
    mapped: list[Array]
    shared: list[Array]
    parts: int
    groups: int | None
    options: Options


def make_problem(options: Options, params: PyTree, batch: PyTree) -> Problem:
    """Check the arguments, split the batch into parts and close over the loss of one part."""
    params = _checked_params(params)
    is_mapped = _is_mapped(batch, options.in_axes)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    size = _batch_size(leaves, is_mapped)
    parts = options.microbatches or size
    if size % parts:
        raise ValueError(
            f"microbatches={parts} does not divide the batch size {size}; choose a divisor or pad the batch"
        )
    arrays = [jnp.asarray(leaf) for _, leaf in leaves]
    mapped = [a.reshape(parts, size // parts, *a.shape[1:]) for a, m in zip(arrays, is_mapped, strict=True) if m]
    shared = [a for a, m in zip(arrays, is_mapped, strict=True) if not m]
    scale = 1.0 / parts if options.reduction == "mean" else 1.0

    def part_loss(params, mapped, shared):
        split, whole = iter(mapped), iter(shared)
        batch = jax.tree.unflatten(treedef, [next(split if m else whole) for m in is_mapped])
        return _checked_loss(options, params, batch)

    def gradient(params, mapped, shared):
        def scaled(params):
            value, aux = part_loss(params, mapped, shared)
            return value * scale, (value, aux)

        return jax.grad(scaled, has_aux=True)(params)

    # If the parameters did not vary over the mesh but the batch did, autodiff would sum the gradient over the mesh.
    params = _jax_compat.vary(params, _jax_compat.varying_axes((mapped, shared)))
    return Problem(gradient, part_loss, params, mapped, shared, parts, _groups(options, parts), options)


def _groups(options: Options, parts: int) -> int | None:
    """The number of groups that the options ask for; "auto" means single samples where no number fits."""
    groups = options.groups
    if isinstance(groups, str):
        if options.microbatches is not None or options.method in ("vmap", "scan"):
            return None
        fitting = (g for g in range(MOST_GROUPS, FEWEST_GROUPS - 1, -1) if parts % g == 0 and parts >= 2 * g)
        return next(fitting, None)
    if groups is not None and parts % groups:
        raise ValueError(
            f"groups={groups} does not divide the batch size {parts}: choose a divisor, pad the batch with "
            "samples of weight 0, or leave groups out"
        )
    return groups


def _checked_params(params: PyTree) -> PyTree:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_is_array(path, leaf)
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {dtype}, but moments need real floating parameters: "
                "pass it in the batch with in_axes None, or cast it"
            )
    return jax.tree.map(jnp.asarray, params)


def _is_mapped(batch: PyTree, in_axes: PyTree) -> list[bool]:
    """For each leaf of the batch, whether it is split over samples."""

    def split(axis, part):
        return jax.tree.map(lambda _: axis == 0, part)

    try:
        return jax.tree.leaves(jax.tree.map(split, in_axes, batch, is_leaf=lambda x: x is None))
    except ValueError as error:
        raise ValueError(f"in_axes={in_axes!r} is not a prefix of the batch's tree: {error}") from error


def _batch_size(leaves: list[tuple[Any, Any]], is_mapped: list[bool]) -> int:
    """The leading size of all leaves that are split; leaves: (path, leaf)."""
    sizes: dict[str, int] = {}
    for (path, leaf), mapped in zip(leaves, is_mapped, strict=True):
        if not mapped:
            continue
        name = f"batch{jax.tree_util.keystr(path)}"
        if not jnp.shape(leaf):
            raise ValueError(f"{name} is a scalar and cannot be split over samples; set in_axes None for it")
        sizes[name] = jnp.shape(leaf)[0]
    if not sizes:
        raise ValueError("the batch has no leaf to split over samples: pass one, or set in_axes 0 for it")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"leaves of the batch differ in leading size ({listed}); set in_axes None for shared ones")
    name, size = next(iter(sizes.items()))
    if size == 0:
        raise ValueError(f"{name} has leading size 0: an empty batch has no moments; skip the step")
    return size


def _checked_loss(options: Options, params: PyTree, batch: PyTree) -> tuple[Array, PyTree]:
    """Call the loss on a part; returns (loss, aux), with aux None unless has_aux."""
    out = options.loss_fn(params, batch)
    if options.has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"with has_aux=True loss_fn must return (loss, aux), got {type(out).__name__}")
        value, aux = out
    else:
        value, aux = out, None
    if isinstance(value, tuple | list | dict):
        raise TypeError(
            f"loss_fn returned a {type(value).__name__}; return one scalar, or (loss, aux) with has_aux=True"
        )
    check_scalar_loss(value)
    return value, aux


def check_scalar_loss(value: Array) -> None:
    """Raise unless a loss returned a real floating scalar."""
    if jnp.shape(value) != ():
        raise ValueError(f"loss_fn must return a scalar, got shape {jnp.shape(value)}; take the mean over the samples")
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(f"loss_fn must return a real floating scalar, got dtype {jnp.result_type(value)}")
