"""Communication between workers: the only module that names a collective."""

import jax.numpy as jnp
from jax import lax

from gcjax._types import Comm

AxisNames = str | tuple[str, ...] | None


def axis_tuple(axis_name: AxisNames) -> tuple[str, ...]:
    """`None`, one name or several as a tuple of names. Raises TypeError for anything else."""
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a string, a tuple of strings or None, got {axis_name!r}")
    return names


def comm_over(axis_names: tuple[str, ...]) -> Comm:
    """The workers along one or several mesh axes; without axes a single worker that moves nothing.

    Raises ValueError when an axis is not bound, that is outside `shard_map` or `pmap` over it.
    """
    return _on_axes(axis_names, axis_size(axis_names)) if axis_names else _alone()


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


def _on_axes(axis_names: tuple[str, ...], size: int) -> Comm:
    moved = [0.0]

    def maximum(x):
        moved[0] += 2 * (size - 1) / size * x.nbytes
        return lax.pmax(x, axis_names)

    def total(x):
        moved[0] += 2 * (size - 1) / size * x.nbytes
        return lax.psum(x, axis_names)

    def gather(x):
        moved[0] += (size - 1) * x.nbytes
        # "invarying": typed as equal on all workers, which lets the result leave shard_map with out_specs=P().
        return lax.all_gather(x, axis_names, to="invarying")

    def swap(x):
        moved[0] += (size - 1) / size * x.nbytes
        return lax.all_to_all(x, axis_names, split_axis=0, concat_axis=0)

    return Comm(
        size=size,
        rank=lambda: worker_index(axis_names),
        max=maximum,
        sum=total,
        mean=lambda x: total(x) / size,
        gather=gather,
        swap=swap,
        bytes_moved=lambda: moved[0],
        metered=lambda: _on_axes(axis_names, size),
    )


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
