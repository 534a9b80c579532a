"""Collectives over mesh axes: the only module that names one of JAX's."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._types import Array, AxisNames, PyTree


def axis_tuple(axis_name: AxisNames) -> tuple[str, ...]:
    """`None`, one name or several, as a tuple of names. Raises TypeError for anything else."""
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a string, a tuple of strings or None, got {axis_name!r}")
    return names


def comm_for_axes(axis_names: tuple[str, ...], inner_axes: tuple[str, ...] = ()) -> Comm:
    """The workers along one or several mesh axes; without axes a single worker that moves nothing.

    Values given to a `Comm` with `inner_axes` must be equal along them. The inner workers, which share a slow link,
    then share the work: each moves one part over the slow link, and they gather the whole over the fast one.

    Raises:
      ValueError: when an axis is not bound, that is, outside `shard_map` or `pmap` over it.
    """
    return _factory.get()(axis_names, inner_axes)


@contextmanager
def replaced_comm(factory: Callable[[tuple[str, ...], tuple[str, ...]], Comm]) -> Iterator[None]:
    """Inside, transforms get their `Comm` from `factory(axis_names, inner_axes)` when they are traced."""
    token = _factory.set(factory)
    try:
        yield
    finally:
        _factory.reset(token)


def axis_size(axis_names: tuple[str, ...]) -> int:
    """Number of workers along the axes. Raises ValueError when an axis is not bound."""
    try:
        return lax.axis_size(axis_names)
    except NameError as error:
        raise ValueError(
            f"axis_name {axis_names} is not bound here ({error}). Call update inside jax.shard_map or jax.pmap over "
            "that axis, for example with gcjax.make_train_step, or leave axis_name out for a single worker."
        ) from error


def worker_index(axis_names: tuple[str, ...]) -> Array:
    """This worker's number along the axes, int32."""
    return lax.axis_index(axis_names)


def dense_mean(x: Array, axis_names: tuple[str, ...]) -> Array:
    """Mean over the axes, of the shape and dtype of `x`, added up in float32 at least."""
    return lax.pmean(_wide(x), axis_names).astype(x.dtype)


def _wide(x: Array) -> Array:
    """In a dtype in which many values can be added up: not in bfloat16 or float16.

    XLA for CPUs also aborts on all-reduces of 16 bits where only some axes are manual.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def pmax_if_axes(x: Array, axis_names: tuple[str, ...]) -> Array:
    """Maximum over the axes; identity if there are none."""
    return lax.pmax(x, axis_names) if axis_names else x


def send(x: Array, destinations: Sequence[int], axis_names: tuple[str, ...]) -> Array:
    """What was sent to this worker; zeros if nobody sent anything.

    Args:
      x: what this worker sends.
      destinations: for each worker, the number of the worker it sends to; its own number if it sends nothing. Static.
      axis_names: mesh axes of the workers.
    """
    number, in_order = list(range(len(destinations))), axis_names
    if len(axis_names) > 1:
        # `lax.ppermute` counts in the order of the mesh's axes, and since JAX 0.12 wants them in that order.
        in_mesh = jax.sharding.get_abstract_mesh().axis_names
        in_order = tuple(sorted(axis_names, key=in_mesh.index))
        sizes = [axis_size((name,)) for name in axis_names]
        mine = np.arange(math.prod(sizes)).reshape(sizes)
        number = np.argsort(mine.transpose([axis_names.index(name) for name in in_order]).ravel()).tolist()
    pairs = [(number[worker], number[to]) for worker, to in enumerate(destinations) if to != worker]
    return lax.ppermute(x, in_order, pairs)


def gather_shards(tree: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """Gather whole arrays from the shards over `axis_names`; `specs` are `PartitionSpec`s, a prefix of the tree."""

    def whole(x, spec):
        for dimension, names in sharded_dimensions(spec, axis_names):
            x = lax.all_gather(x, names, axis=dimension, tiled=True)
        return x

    return jax.tree.map(whole, tree, jax.tree.broadcast(specs, tree))


def scatter_mean(tree: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """The mean over the axes, sharded as the arrays were before `gather_shards`."""

    def shard(x, spec):
        left, mean = set(axis_names), _wide(x)
        for dimension, names in sharded_dimensions(spec, axis_names):
            mean = lax.psum_scatter(mean, names, scatter_dimension=dimension, tiled=True) / axis_size(names)
            left -= set(names)
        return (dense_mean(mean, tuple(sorted(left))) if left else mean).astype(x.dtype)

    return jax.tree.map(shard, tree, jax.tree.broadcast(specs, tree))


def sharded_dimensions(spec: jax.sharding.PartitionSpec, axis_names: tuple[str, ...]) -> list:
    """[(dimension, all axes that shard it)] for each dimension that a `PartitionSpec` shards over any of the axes."""
    dimensions = enumerate(axis_tuple(entry) for entry in spec)
    return [(dimension, names) for dimension, names in dimensions if set(names) & set(axis_names)]


GATHER_ROWS = 8  # of a gathered message: it is padded to a multiple of as many entries


def _on_axes(axis_names: tuple[str, ...], size: int, inner_axes: tuple[str, ...], inner_workers: int) -> Comm:
    moved = [0.0]

    def in_parts(collective, rows, share):
        """`collective` of this inner worker's columns of `rows`, then all columns; a `share` of the bytes is moved."""
        own = rows if inner_workers == 1 else _own_columns(rows, inner_axes, inner_workers)
        moved[0] += share * own.nbytes
        result = collective(own)
        if inner_workers == 1:
            return result
        # The gather makes the values equal everywhere, even where parts were summed in different orders.
        parts = _gathered(_in_rows(result), inner_axes).reshape(inner_workers, -1)[:, : result.size]
        parts = parts.reshape(inner_workers, *result.shape)
        return jnp.moveaxis(parts, 0, 1).reshape(len(result), -1)[:, : rows.shape[1]]

    def maximum(x):  # not in parts: it is exact in any order, and of few values
        moved[0] += 2 * (size - 1) / size * x.nbytes
        return lax.pmax(x, axis_names)

    def total(x):
        share = 2 * (size - 1) / size
        if inner_workers > 1:
            return in_parts(lambda own: lax.psum(own, axis_names), x.reshape(1, -1), share).reshape(x.shape)
        moved[0] += share * x.nbytes  # in its own shape, which some backends would have to rearrange
        return lax.psum(x, axis_names)

    def mean(tree):
        return jax.tree.map(lambda x: total(x) / size, tree)  # XLA combines the all-reduces

    def gather(x):
        rows = in_parts(
            lambda own: _gathered(_in_rows(own), axis_names).reshape(size, -1),
            jnp.pad(x.reshape(1, -1), ((0, 0), (0, -x.size % (GATHER_ROWS * inner_workers)))),
            size - 1,
        )
        return rows[:, : x.size].reshape(size, *x.shape)

    def all_to_all(x):
        share = (size - 1) / size
        return in_parts(
            lambda own: lax.all_to_all(own, axis_names, split_axis=0, concat_axis=0), x.reshape(size, -1), share
        ).reshape(x.shape)

    return Comm(
        size=size,
        rank=lambda: worker_index(axis_names),
        max=maximum,
        sum=total,
        mean=mean,
        gather=gather,
        all_to_all=all_to_all,
        bytes_moved=lambda: moved[0],
        metered=lambda: lambda: _on_axes(axis_names, size, inner_axes, inner_workers),
        inner_workers=inner_workers,
    )


def _gathered(rows: Array, axis_names: tuple[str, ...]) -> Array:
    """[1, 8, m] of each worker -> [workers, 8, m].

    XLA makes an all-reduce of the whole result out of a gather of [m] or [1, m] for TPUs, where m does not fill tiles,
    and that moves twice the bytes. "invarying" types the result as equal on all workers, so that it may leave
    `jax.shard_map` with out_specs=P().
    """
    return lax.all_gather(rows, axis_names, tiled=True, to="invarying")


def _in_rows(x: Array) -> Array:
    """Any array as [1, 8, m], padded with zeros."""
    return jnp.pad(x.reshape(-1), (0, -x.size % GATHER_ROWS)).reshape(1, GATHER_ROWS, -1)


def _own_columns(rows: Array, inner_axes: tuple[str, ...], inner_workers: int) -> Array:
    """This inner worker's columns; the last worker's are padded with zeros."""
    width = -(-rows.shape[1] // inner_workers)
    padded = jnp.pad(rows, ((0, 0), (0, width * inner_workers - rows.shape[1])))
    return lax.dynamic_slice_in_dim(padded, worker_index(inner_axes) * width, width, axis=1)


def _single_worker() -> Comm:
    return Comm(
        size=1,
        rank=lambda: jnp.int32(0),
        max=lambda x: x,
        sum=lambda x: x,
        mean=lambda x: x,
        gather=lambda x: x[None],
        all_to_all=lambda x: x,
        bytes_moved=lambda: 0.0,
        metered=lambda: _single_worker,
    )


def mesh_comm(axis_names: tuple[str, ...], inner_axes: tuple[str, ...] = ()) -> Comm:
    """The `Comm` of real mesh axes, which `comm_for_axes` returns unless it was replaced."""
    if not axis_names:
        return _single_worker()
    return _on_axes(axis_names, axis_size(axis_names), inner_axes, axis_size(inner_axes) if inner_axes else 1)


_factory: ContextVar[Callable[[tuple[str, ...], tuple[str, ...]], Comm]] = ContextVar("_factory", default=mesh_comm)
