"""Idioms that compilers need, each with its reason once. They change no value."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gcjax._types import Array, ArrayLike, PyTree


def computed_once(x: Array, limit: ArrayLike) -> Array:
    """x, integers from 0 to limit - 1, as they are; `limit` is known only when the program runs.

    XLA fuses cheap operations into each of their uses, and computes them again in every one. A remainder by an unknown
    number counts as dear: it is computed once.
    """
    return x % limit


def entries_once(fn: Callable[..., PyTree], *arrays: Array) -> PyTree:
    """`fn(*arrays)`, computed once. It acts entry by entry on arrays of one shape.

    XLA fuses cheap operations into each of their uses. On CPU a barrier does not keep it from that, but it does not
    fuse what a loop computes.
    """
    shape = arrays[0].shape
    axis = next((i for i, size in enumerate(shape) if size % 2 == 0), None)

    def in_a_loop(*arrays: Array) -> PyTree:
        if axis is None:
            return fn(*arrays)
        halved = [jnp.moveaxis(x.reshape(*shape[:axis], 2, -1, *shape[axis + 1 :]), axis, 0) for x in arrays]
        halves = jax.lax.map(lambda half: fn(*half), halved)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis).reshape(shape), halves)

    def behind_a_barrier(*arrays: Array) -> PyTree:
        return jax.lax.optimization_barrier(fn(*arrays))

    return jax.lax.platform_dependent(*arrays, cpu=in_a_loop, default=behind_a_barrier)


def larger(x: Array, y: Array) -> Array:
    """The larger one, entry by entry, of arrays without NaN; for reductions in place of `lax.max`.

    XLA's CPU backend looks for NaN in `lax.max`, and passes a reduction by it to a library, for which it writes the
    operand to memory.
    """
    return jnp.where(x > y, x, y)


def kept_unless(go: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `go`, else `old`, entry by entry.

    XLA works in the buffers of the old state. For a conditional around the whole step it would copy the state.
    """
    return jax.tree.map(lambda x, y: jnp.where(go, x, y), new, old)
