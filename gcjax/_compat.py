"""The names that differ between JAX releases, in one place (written for jax 0.10, guarded for 0.11)."""

import jax
from jax import lax


def varying_axes(x) -> frozenset:
    """Mesh axes over which `x` is typed as varying; empty where JAX does not track it (pmap, check_vma=False)."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def as_varying(x, axis_names: tuple[str, ...]):
    """Type `x` as varying over `axis_names`; a no-op where it is already, or where JAX does not track it."""
    if not axis_names or not varying_axes(lax.axis_index(axis_names)):
        return x
    missing = tuple(name for name in axis_names if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def constrain(tree, sharding: jax.sharding.NamedSharding):
    """Lay arrays out as `sharding` says, inside jit; the call differs for meshes with explicit and automatic axes."""
    explicit = any(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)
    return (jax.reshard if explicit else lax.with_sharding_constraint)(tree, sharding)
