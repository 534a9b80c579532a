"""From a loss, its options and its arguments to the loss of one group of samples, with the arguments checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax import _jax_compat

METHODS = ("auto", "sinks", "vmap", "scan")
REDUCTIONS = ("mean", "sum")


class Options(NamedTuple):
    """The keywords of `value_and_moments`, checked by `make_options`."""

    loss_fn: Callable
    has_aux: bool
    in_axes: Any
    sample_axis: Any
    microbatches: int | None
    reduction: str
    method: str
    max_bytes: int


class Problem(NamedTuple):
    """One call of `value_and_moments`.

    Attributes:
        gradient: `(params, mapped, shared) -> (grad, (value, aux))` of one group; `grad` already carries the 1/groups.
        params: pytree, typed as varying over every mesh axis of the batch.
        mapped: list of the split leaves of the batch, each `[groups, group size, ...]`.
        shared: list of the other leaves.
        groups: number of groups; equal to the batch size unless microbatches were asked for.
        aux_like: shapes of aux for the whole batch, or None without aux.
        options: the options.
    """

    gradient: Callable
    params: Any
    mapped: list
    shared: list
    groups: int
    aux_like: Any
    options: Options

    @property
    def sample_axis(self):
        return self.options.sample_axis


def make_options(
    loss_fn,
    has_aux=False,
    *,
    in_axes=0,
    sample_axis=None,
    microbatches=None,
    reduction="mean",
    method="auto",
    max_bytes=256 << 20,
) -> Options:
    """Check everything that can be checked before the arguments are known."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (params, batch) -> loss, got {loss_fn!r}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise ValueError(f"microbatches must be None or a positive int, got {microbatches!r}")
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"max_bytes must be a positive int, got {max_bytes!r}")
    if method == "scan" and sample_axis is not None:
        raise ValueError("method='scan' takes one sample at a time and cannot bind sample_axis; use 'sinks' or 'vmap'")
    for axis in jax.tree.leaves(in_axes):
        if isinstance(axis, bool) or axis != 0:
            raise ValueError(f"in_axes may only hold 0 (split over samples) and None (shared by them), got {axis!r}")
    return Options(loss_fn, has_aux, in_axes, sample_axis, microbatches, reduction, method, max_bytes)


def make_problem(options: Options, params, batch) -> Problem:
    """Check the arguments, split the batch into groups and close over the loss of one group."""
    params = _checked_params(params)
    leaves, is_mapped, treedef = _flat_batch(batch, options.in_axes)
    size = _batch_size(leaves, is_mapped)
    groups = options.microbatches or size
    if size % groups:
        raise ValueError(
            f"microbatches={groups} does not divide the batch size {size}; choose a divisor or pad the batch"
        )
    arrays = [jnp.asarray(leaf) for _, leaf in leaves]
    mapped = [a.reshape(groups, size // groups, *a.shape[1:]) for a, m in zip(arrays, is_mapped, strict=True) if m]
    shared = [a for a, m in zip(arrays, is_mapped, strict=True) if not m]
    scale = 1.0 / groups if options.reduction == "mean" else 1.0

    def batch_loss(params, mapped, shared):
        split, whole = iter(mapped), iter(shared)
        batch = treedef.unflatten([next(split if m else whole) for m in is_mapped])
        return _checked_loss(options, params, batch)

    def gradient(params, mapped, shared):
        def scaled(params):
            value, aux = batch_loss(params, mapped, shared)
            return value * scale, (value, aux)

        return jax.grad(scaled, has_aux=True)(params)

    # An invarying parameter under a varying batch would have its gradient summed over the mesh by autodiff.
    params = _jax_compat.vary(params, _jax_compat.varying_axes((mapped, shared)))
    aux_like = None
    if options.has_aux:
        whole = [a.reshape(size, *a.shape[2:]) for a in mapped]
        aux_like = _shapes_for_whole_batch(batch_loss, options.sample_axis, params, whole, shared)
    return Problem(gradient, params, mapped, shared, groups, aux_like, options)


def _shapes_for_whole_batch(batch_loss, sample_axis, params, whole, shared):
    env = [] if sample_axis is None else [(sample_axis, 1)]
    _, (_, aux) = jax.make_jaxpr(batch_loss, axis_env=env, return_shape=True)(params, whole, shared)
    return aux


def _checked_params(params):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {dtype}; moments need real floating parameters: "
                "pass it in the batch with in_axes None, or cast it"
            )
    return jax.tree.map(jnp.asarray, params)


def _flat_batch(batch, in_axes):
    """The leaves of the batch with their paths, for each whether it is split over samples, and the tree's structure."""

    def split(axis, part):
        return jax.tree.map(lambda _: axis == 0, part)

    try:
        is_mapped = jax.tree.leaves(jax.tree.map(split, in_axes, batch, is_leaf=lambda x: x is None))
    except ValueError as error:
        raise ValueError(f"in_axes={in_axes!r} is not a prefix of the batch's tree: {error}") from error
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
    return leaves, is_mapped, treedef


def _batch_size(leaves, is_mapped):
    sizes = {}
    for (path, leaf), mapped in zip(leaves, is_mapped, strict=True):
        name = f"batch{jax.tree_util.keystr(path)}"
        if not mapped:
            continue
        if not jnp.shape(leaf):
            raise ValueError(f"{name} is a scalar and cannot be split over samples; give it in_axes None")
        sizes[name] = jnp.shape(leaf)[0]
    if not sizes:
        raise ValueError("the batch has no leaf to split over samples: pass one, or set in_axes 0 for it")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"leaves of the batch differ in leading size ({listed}); give shared ones in_axes None")
    name, size = next(iter(sizes.items()))
    if size == 0:
        raise ValueError(f"{name} has leading size 0: an empty batch has no moments; skip the step")
    return size


def _checked_loss(options, params, batch):
    """Call the loss on a group; returns (loss, aux), aux None without has_aux."""
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
    if jnp.shape(value) != ():
        raise ValueError(f"loss_fn must return a scalar, got shape {jnp.shape(value)}; take the mean over the samples")
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a real floating scalar, got dtype {dtype}")
    return value, aux
