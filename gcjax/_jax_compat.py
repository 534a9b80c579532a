"""The names of JAX that change between releases, or lie outside its stable API: used only through this module.

Written for jax 0.10; where 0.11 is known to differ, both ways are tried.
"""

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax._src import config, distributed


def varying_axes(tree) -> frozenset:
    """Mesh axes over which any leaf is typed as varying; empty where JAX tracks none (pmap, check_vma=False)."""
    axes: frozenset = frozenset()
    for leaf in jax.tree.leaves(tree):
        aval = jax.typeof(leaf)
        manual = getattr(aval, "mat", None)
        axes |= manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return axes


def tracks_variation(axes: tuple[str, ...]) -> bool:
    """Whether JAX types values as varying over these bound axes here: inside `shard_map` with check_vma=True."""
    return bool(axes) and bool(varying_axes(lax.axis_index(axes)))


def vary(tree, axes):
    """Type every leaf as varying over `axes` (an iterable of mesh axis names); values stay as they are."""

    def cast(leaf):
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf), key=str))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def constrain(tree, sharding: jax.sharding.NamedSharding):
    """Lay arrays out as `sharding` says, inside jit; the call differs for meshes with explicit and automatic axes."""
    explicit = any(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)
    return (jax.reshard if explicit else lax.with_sharding_constraint)(tree, sharding)


def without_mesh_types(fn, *args):
    """Run `fn` with the tracking of varying mesh axes off, as under check_vma=False, and type the results again.

    JAX 0.10.2 fails an assertion at any `psum` over an axis of `jax.vmap` inside a `shard_map` with check_vma=True.
    """
    axes = varying_axes(args)
    tracking = getattr(config, "_check_vma", None)
    if not axes or tracking is None:
        return fn(*args)
    with tracking(False):
        # What passes through an operation while tracking is off has lost its type; typed and untyped values do not mix.
        untyped = jax.tree.map(lambda x: lax.squeeze(lax.expand_dims(x, (0,)), (0,)), args)
        out = fn(*untyped)
    return vary(out, axes)


def zeros(shape, dtype, like):
    """Zeros to start a loop with: typed as varying over the mesh axes of `like`, or the loop would not type-check."""
    return vary(jnp.zeros(shape, dtype), varying_axes(like))


def is_literal(atom) -> bool:
    """Whether an operand of an equation is a constant written into it."""
    return isinstance(atom, jax.extend.core.Literal)


def closed(jaxpr):
    """A closed jaxpr, from one that may be open but then has no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, ())


def bind(eqn, values) -> list:
    """Evaluate one equation of a jaxpr on new values."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def has_side_effects(eqn) -> bool:
    """Whether the equation must run though nobody reads it; naming a mapped axis is no such reason."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def shared_store():
    """The key-value store that the processes of `jax.distributed` share; None where that was not initialised."""
    return distributed.global_state.client
