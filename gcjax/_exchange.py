"""Communication between workers: the only module that names a collective."""

from collections.abc import Callable
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._types import Comm, PyTree

AxisNames = str | tuple[str, ...] | None


def axis_tuple(axis_name: AxisNames) -> tuple[str, ...]:
    """`None`, one name or several as a tuple of names. Raises TypeError for anything else."""
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a string, a tuple of strings or None, got {axis_name!r}")
    return names


def comm_over(axis_names: tuple[str, ...], inner_axes: tuple[str, ...] = ()) -> Comm:
    """The workers along one or several mesh axes; without axes a single worker that moves nothing.

    Everything given to a `Comm` with `inner_axes` must be equal along them. The q workers along them, which share a
    slow link, then share the work: each moves a q-th part over it, and they gather the whole over the fast one.

    Raises ValueError when an axis is not bound, that is outside `shard_map` or `pmap` over it.
    """
    if not axis_names:
        return without_axes.get()()
    return _on_axes(axis_names, axis_size(axis_names), inner_axes, axis_size(inner_axes) if inner_axes else 1)


def axis_size(axis_names: tuple[str, ...]) -> int:
    """Number of workers along the axes. Raises ValueError when one is not bound."""
    try:
        return lax.axis_size(axis_names)
    except NameError as error:
        raise ValueError(
            f"axis_name {axis_names} is not bound here ({error}). Call update inside jax.shard_map or jax.pmap over "
            "that axis, for example with gcjax.make_train_step, or leave axis_name out for a single worker."
        ) from error


def worker_index(axis_names: tuple[str, ...]):
    """This worker's number along the axes, int32."""
    return lax.axis_index(axis_names)


def dense_mean(tree_leaf, axis_names: tuple[str, ...]):
    """Mean over the axes, of the leaf's own shape and dtype."""
    return lax.pmean(tree_leaf, axis_names)


def send(x, destinations, axis_names: tuple[str, ...]):
    """What the worker sent that has this one as its destination; zeros where none has.

    destinations: static, one worker's number for each; its own number for a worker that sends nothing.
    """
    pairs = [(worker, int(to)) for worker, to in enumerate(destinations) if to != worker]
    return lax.ppermute(x, axis_names, pairs)


def gather_shards(tree: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """The whole of what the `PartitionSpec`s, a prefix of the tree, shard over those of the axes that they name."""

    def whole(x, spec):
        for dimension, names in sharded_dimensions(spec, axis_names):
            x = lax.all_gather(x, names, axis=dimension, tiled=True)
        return x

    return jax.tree.map(whole, tree, jax.tree.broadcast(specs, tree))


def scatter_mean(tree: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """The mean over the axes, and of it the shards that `gather_shards` began with."""

    def shard(x, spec):
        left = set(axis_names)
        for dimension, names in sharded_dimensions(spec, axis_names):
            x = lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True) / axis_size(names)
            left -= set(names)
        return dense_mean(x, tuple(sorted(left))) if left else x

    return jax.tree.map(shard, tree, jax.tree.broadcast(specs, tree))


def sharded_dimensions(spec, axis_names: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions that a `PartitionSpec` shards over any of the axes, and all the axes over which it does."""
    dimensions = enumerate(axis_tuple(entry) for entry in spec)
    return [(dimension, names) for dimension, names in dimensions if set(names) & set(axis_names)]


def anywhere(x, axis_names: tuple[str, ...]):
    """The maximum over the axes, of which there may be none."""
    return lax.pmax(x, axis_names) if axis_names else x


def _on_axes(axis_names: tuple[str, ...], size: int, inner_axes: tuple[str, ...], stripes: int) -> Comm:
    moved = [0.0]

    def on_stripe(collective, rows, share):
        """`collective` of this inner worker's columns of `rows`, then all columns; `share` of the bytes is moved."""
        width = -(-rows.shape[1] // stripes)
        own = rows if stripes == 1 else _own_columns(rows, width, inner_axes)
        moved[0] += share * own.nbytes
        result = collective(own)
        if stripes == 1:
            return result
        # The same values everywhere from here on, also where the order of a sum differs between the stripes.
        return lax.all_gather(result, inner_axes, axis=1, tiled=True, to="invarying")[:, : rows.shape[1]]

    def maximum(x):  # not in stripes: it is exact in any order, and of few values
        moved[0] += 2 * (size - 1) / size * x.nbytes
        return lax.pmax(x, axis_names)

    def total(x):
        share = 2 * (size - 1) / size
        return on_stripe(lambda own: lax.psum(own, axis_names), x.reshape(1, -1), share).reshape(x.shape)

    def gather(x):
        # "invarying": typed as equal on all workers, which lets the result leave shard_map with out_specs=P().
        rows = on_stripe(
            lambda own: lax.all_gather(own, axis_names, tiled=True, to="invarying"), x.reshape(1, -1), size - 1
        )
        return rows.reshape(size, *x.shape)

    def swap(x):
        share = (size - 1) / size
        return on_stripe(
            lambda own: lax.all_to_all(own, axis_names, split_axis=0, concat_axis=0), x.reshape(size, -1), share
        ).reshape(x.shape)

    return Comm(
        size=size,
        rank=lambda: worker_index(axis_names),
        max=maximum,
        sum=total,
        mean=lambda x: total(x) / size,
        gather=gather,
        swap=swap,
        bytes_moved=lambda: moved[0],
        metered=lambda: _on_axes(axis_names, size, inner_axes, stripes),
        stripes=stripes,
    )


def _own_columns(rows, width: int, inner_axes: tuple[str, ...]):
    """This inner worker's `width` columns, the last of them padded with zeros."""
    stripes = axis_size(inner_axes)
    padded = jnp.pad(rows, ((0, 0), (0, width * stripes - rows.shape[1])))
    return lax.dynamic_slice_in_dim(padded, worker_index(inner_axes) * width, width, axis=1)


def _alone() -> Comm:
    return Comm(
        size=1,
        rank=lambda: jnp.int32(0),
        max=lambda x: x,
        sum=lambda x: x,
        mean=lambda x: x,
        gather=lambda x: x[None],
        swap=lambda x: x,
        bytes_moved=lambda: 0.0,
        metered=_alone,
    )


# Makes the workers of a transform without axis names. The planner puts an imitation of many here.
without_axes: ContextVar[Callable[[], Comm]] = ContextVar("without_axes", default=_alone)
