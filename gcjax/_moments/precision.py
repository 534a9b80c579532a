"""Rounding errors: the distance of two correct computations of a gradient."""

import math

import jax
import jax.numpy as jnp

from gcjax._kernels.hashing import quick_bits
from gcjax._moments.jaxprs import Jaxpr, bodies
from gcjax._types import Array, ArrayLike, PyTree

NOISE = 4  # distance of two computations of a gradient, relative to its change under `nudged`


def coarsest_epsilon(jaxpr: Jaxpr) -> float:
    """The largest machine epsilon among the dtypes of all that a jaxpr computes; 0.0 if none is of floating point."""
    dtypes = [var.aval.dtype for eqn in jaxpr.eqns for var in eqn.outvars if hasattr(var.aval, "dtype")]
    own = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return max([*own, *(coarsest_epsilon(body) for eqn in jaxpr.eqns for body in bodies(eqn))], default=0.0)


def nudged(params: PyTree, amount: ArrayLike) -> PyTree:
    """The parameters, each entry larger or smaller by the factor `amount`.

    With a machine epsilon as the amount, a gradient changes about as much as rounding errors change it. It may jump: at
    ties of an argmax, or where the model is chaotic.
    """

    def changed(x):
        x = jnp.asarray(x)
        return (x * (1 + amount * signs(x.shape, 0))).astype(x.dtype)

    return jax.tree.map(changed, params)


def signs(shape: tuple[int, ...], number: int) -> Array:
    """float32 of this shape, 1 and -1 at random; independent for each number below 32."""
    position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return 1 - 2 * ((quick_bits(jnp.uint32(0), position) >> number) & 1).astype(jnp.float32)
