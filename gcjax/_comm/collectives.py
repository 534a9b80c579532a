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

    def whole(x: Array, spec: jax.sharding.PartitionSpec) -> Array:
        for dimension, names in sharded_dimensions(spec, axis_names):
            x = lax.all_gather(x, names, axis=dimension, tiled=True)
        return x

    return jax.tree.map(whole, tree, jax.tree.broadcast(specs, tree))


def scatter_mean(tree: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """The mean over the axes, sharded as the arrays were before `gather_shards`."""

    def shard(x: Array, spec: jax.sharding.PartitionSpec) -> Array:
        left, mean = set(axis_names), _wide(x)
        for dimension, names in sharded_dimensions(spec, axis_names):
            mean = lax.psum_scatter(mean, names, scatter_dimension=dimension, tiled=True) / axis_size(names)
            left -= set(names)
        return (dense_mean(mean, tuple(sorted(left))) if left else mean).astype(x.dtype)

    return jax.tree.map(shard, tree, jax.tree.broadcast(specs, tree))


def sharded_dimensions(
    spec: jax.sharding.PartitionSpec, axis_names: tuple[str, ...]
) -> list[tuple[int, tuple[str, ...]]]:
    """[(dimension, all axes that shard it)] for each dimension that a `PartitionSpec` shards over any of the axes."""
    dimensions = enumerate(axis_tuple(entry) for entry in spec)
    return [(dimension, names) for dimension, names in dimensions if set(names) & set(axis_names)]


GATHER_ROWS = 8  # of a gathered message: it is padded to a multiple of as many entries


class MeshComm(Comm):
    """The workers along mesh axes."""

    def __init__(
        self, axis_names: tuple[str, ...], size: int, inner_axes: tuple[str, ...] = (), inner_workers: int = 1
    ) -> None:
        self.size, self.inner_workers = size, inner_workers
        self._axes, self._inner_axes, self._moved = axis_names, inner_axes, 0.0

    def rank(self) -> Array:
        return worker_index(self._axes)

    def max(self, x: Array) -> Array:  # not in parts: it is exact in any order, and of few values
        self._moved += self._reduced * x.nbytes
        return lax.pmax(x, self._axes)

    def sum(self, x: Array) -> Array:
        def total(own: Array) -> Array:
            return lax.psum(own, self._axes)

        if self.inner_workers > 1:
            return self._in_parts(total, x.reshape(1, -1), self._reduced).reshape(x.shape)
        self._moved += self._reduced * x.nbytes  # in its own shape, which some backends would have to rearrange
        return total(x)

    def mean(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: self.sum(x) / self.size, tree)  # XLA combines the all-reduces

    def gather(self, x: Array) -> Array:
        def gathered(own: Array) -> Array:
            return _gathered(_in_rows(own), self._axes).reshape(self.size, -1)

        padded = jnp.pad(x.reshape(1, -1), ((0, 0), (0, -x.size % (GATHER_ROWS * self.inner_workers))))
        rows = self._in_parts(gathered, padded, self.size - 1)
        return rows[:, : x.size].reshape(self.size, *x.shape)

    def all_to_all(self, x: Array) -> Array:
        def swapped(own: Array) -> Array:
            return lax.all_to_all(own, self._axes, split_axis=0, concat_axis=0)

        return self._in_parts(swapped, x.reshape(self.size, -1), (self.size - 1) / self.size).reshape(x.shape)

    def bytes_moved(self) -> float:
        return self._moved

    def metered(self) -> Callable[[], Comm]:
        return lambda: MeshComm(self._axes, self.size, self._inner_axes, self.inner_workers)

    @property
    def _reduced(self) -> float:
        """The share of an array that a ring all-reduce moves."""
        return 2 * (self.size - 1) / self.size

    def _in_parts(self, collective: Callable[[Array], Array], rows: Array, share: float) -> Array:
        """`collective` of this inner worker's columns of `rows`, then all columns; a `share` of the bytes is moved."""
        own = rows if self.inner_workers == 1 else _own_columns(rows, self._inner_axes, self.inner_workers)
        self._moved += share * own.nbytes
        result = collective(own)
        if self.inner_workers == 1:
            return result
        # The gather makes the values equal everywhere, even where parts were summed in different orders.
        parts = _gathered(_in_rows(result), self._inner_axes).reshape(self.inner_workers, -1)[:, : result.size]
        parts = parts.reshape(self.inner_workers, *result.shape)
        return jnp.moveaxis(parts, 0, 1).reshape(len(result), -1)[:, : rows.shape[1]]


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


class SingleWorker(Comm):
    """One worker, which moves nothing."""

    size = 1

    def rank(self) -> Array:
        return jnp.int32(0)

    def max(self, x: Array) -> Array:
        return x

    def sum(self, x: Array) -> Array:
        return x

    def mean(self, tree: PyTree) -> PyTree:
        return tree

    def gather(self, x: Array) -> Array:
        return x[None]

    def all_to_all(self, x: Array) -> Array:
        return x

    def bytes_moved(self) -> float:
        return 0.0

    def metered(self) -> Callable[[], Comm]:
        return SingleWorker


def mesh_comm(axis_names: tuple[str, ...], inner_axes: tuple[str, ...] = ()) -> Comm:
    """The `Comm` of real mesh axes, which `comm_for_axes` returns unless it was replaced."""
    if not axis_names:
        return SingleWorker()
    return MeshComm(axis_names, axis_size(axis_names), inner_axes, axis_size(inner_axes) if inner_axes else 1)


_factory: ContextVar[Callable[[tuple[str, ...], tuple[str, ...]], Comm]] = ContextVar("_factory", default=mesh_comm)
