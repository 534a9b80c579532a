"""Names of JAX outside its stable API, and differences between its releases. The rest of gcjax uses them through here.

Private names, their uses, and the loss without them:

- `ShapedArray.mat`: the mesh axes along which a value is typed as varying. Without it no gradient that JAX has already
  all-reduced would be noticed.
- `config._check_vma`: turns that typing off for a part of a program. Without it there is no `sample_axis` inside
  `shard_map`, and no agreement whose result is typed as equal on all workers.
- `JaxprEqn.ctx`, `Primitive.get_bind_params`: the inputs of `jax.core.eval_jaxpr` for an equation, beside its operands.
  Without them no equation of a loss can be run alone, so there are no squares but those of `method="vmap"`.
- `distributed.global_state.client`: the store that processes share before any collective runs. Without it processes
  that run different programs would wait for each other for ever, instead of raising.
"""

import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import batching, mlir

from gcjax._types import Array, PyTree

TESTED_SERIES = (0, 12)  # the newest series of JAX with which the tests were run
T = TypeVar("T")


class UntestedJaxWarning(UserWarning):
    """The installed JAX is of a newer series than those with which gcjax was tested; issued on import.

    >>> import warnings, gcjax
    >>> warnings.simplefilter("ignore", gcjax.UntestedJaxWarning)
    """


def needed(name: str) -> Any:
    """A name of JAX, given as "module:attribute".

    Raises:
      ImportError: the installed JAX does not have it.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        lacking = name.replace(":", ".")
        raise ImportError(
            f"gcjax needs {lacking}, which JAX {jax.__version__} does not have. Update gcjax, or install a JAX that it "
            f"was tested with: pip install 'jax<{_after_tested()}'"
        ) from error


def warn_if_untested(version: tuple[int, ...]) -> None:
    """Issue an `UntestedJaxWarning` for a release of JAX of a newer series than the tested ones."""
    if version[:2] > TESTED_SERIES:
        tested, installed = (".".join(map(str, numbers)) for numbers in (TESTED_SERIES, version))
        warnings.warn(
            f"gcjax was tested with JAX up to {tested}, and {installed} is installed. `python -m gcjax selfcheck` runs "
            f"the most important checks on it. For a tested JAX: pip install 'jax<{_after_tested()}'",
            UntestedJaxWarning,
            stacklevel=2,
        )


def _after_tested() -> str:
    return f"{TESTED_SERIES[0]}.{TESTED_SERIES[1] + 1}"


warn_if_untested(jax.__version_info__)
_check_vma = needed("jax._src.config:_check_vma")
_distributed = needed("jax._src.distributed:global_state")
for _name in (
    "jax:enable_x64",
    "jax:reshard",
    "jax:typeof",
    "jax.extend.core:Primitive",
    "jax.interpreters.batching:defvectorized",
    "jax.interpreters.mlir:register_lowering",
    "jax.lax:pcast",
    "jax.sharding:AxisType",
    "jax.sharding:auto_axes",
    "jax._src.core:JaxprEqn.ctx",
    "jax._src.core:Primitive.get_bind_params",
    "jax._src.core:ShapedArray.mat",
    "jax._src.distributed:State.client",
):
    needed(_name)  # the functions below use it


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Mesh axes over which any leaf is typed as varying; empty where JAX tracks none (pmap, check_vma=False)."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        manual = getattr(jax.typeof(leaf), "mat", None)  # refs and tokens have none
        axes |= manual.varying if manual is not None else frozenset()
    return axes


def tracks_variation(axes: tuple[str, ...]) -> bool:
    """Whether JAX types values as varying over these bound axes here: inside `shard_map` with check_vma=True."""
    return bool(axes) and bool(varying_axes(lax.axis_index(axes)))


def partitioned_axes(tree: PyTree) -> dict[str, int]:
    """Mesh axes of several devices among which JAX partitions here, with their sizes: of `jax.set_mesh`, of any leaf.

    Axes that `shard_map` or `pmap` bind are not among them. Leaves that get a sharding from `in_shardings` of `jax.jit`
    alone show none; see `when_lowered`.
    """
    axes: dict[str, int] = {}
    for mesh in (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))):
        axes |= _axes(mesh, manual=False)
    return axes


def _axes(mesh: jax.sharding.AbstractMesh, manual: bool) -> dict[str, int]:
    """The axes of several devices that `shard_map` or `pmap` binds, or the others, with their sizes."""
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return {name: n for (name, n), kind in kinds if n > 1 and (kind == jax.sharding.AxisType.Manual) == manual}


def _identity(x, *, check):
    del check
    return x


def _lower_checked(ctx, x, *, check):
    devices = getattr(ctx.module_context.axis_context, "num_devices", None)  # None inside `shard_map`
    if devices is not None:
        check(devices)
    return [x]


_checked = jax.extend.core.Primitive("gcjax_checked")
_checked.def_impl(_identity)
_checked.def_abstract_eval(_identity)
batching.defvectorized(_checked)
mlir.register_lowering(_checked, _lower_checked)


def when_lowered(x: Array, check: Callable[[int], None]) -> Array:
    """x, an integer, as it is. When JAX lowers a program, `check` gets its number of devices, except in `shard_map`.

    Shardings that only `in_shardings` and `out_shardings` of `jax.jit` name are not known before. No program changes.
    """
    return _checked.bind(x, check=check)


def unchecked_axes() -> dict[str, int]:
    """The axes of several devices that `pmap` or `shard_map` with check_vma=False binds here, with their sizes."""
    manual = _axes(jax.sharding.get_abstract_mesh(), manual=True)
    return {} if tracks_variation(tuple(manual)) else manual


def vary(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Type every leaf as varying over the mesh axes `axes`. The values stay as they are."""
    axes = frozenset(axes)

    def cast(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf), key=str))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def constrain(tree: PyTree, sharding: jax.sharding.NamedSharding) -> PyTree:
    """Lay arrays out as `sharding` says, inside jit. On a mesh that has explicit axes, along those axes only."""
    if not _explicit_axes(sharding.mesh):
        return lax.with_sharding_constraint(tree, sharding)
    return jax.reshard(tree, explicit_part(sharding))


def explicit_part(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """The sharding along the explicit axes of its mesh alone, which is all that the types of arrays say."""
    explicit = _explicit_axes(sharding.mesh)
    entries = (tuple(name for name in _names(entry) if name in explicit) for entry in sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*entries))


def _explicit_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit}


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()


def without_mesh_types(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Run `fn` with the tracking of varying mesh axes off, as under check_vma=False, and type the results again.

    JAX 0.10.2 fails an assertion at any `psum` over an axis of `jax.vmap` inside a `shard_map` with check_vma=True.
    """
    axes = varying_axes(args)
    if not axes:
        return fn(*args)
    with _check_vma(False):
        out = fn(*jax.tree.map(_untyped, args))  # typed and untyped values do not mix
    return vary(out, axes)


def _untyped(x: Array) -> Array:
    """x without its type, where tracking is off: any operation loses it."""
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def in_32_bits(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fn` with jax_enable_x64 off: its arrays without a named dtype are float32 or int32, for any user."""

    @functools.wraps(fn)
    def run(*args):
        with jax.enable_x64(False):
            return fn(*args)

    return run


def with_automatic_samples(
    fn: Callable[[PyTree, PyTree], PyTree], params: PyTree, batch: PyTree
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """`fn(params, batch) -> value, (sums, sums)`, with explicit axes that shard the samples automatic inside.

    Samples could not be taken one by one otherwise. `value` comes back replicated over these axes; the sums, trees like
    `params`, are sharded like them.
    """
    sharding, axes = jax.sharding.NamedSharding, set()
    for x in jax.tree.leaves(batch):
        mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
        names = _names(spec[0]) if spec else ()
        axes |= {(mesh, name) for name in names if name in _explicit_axes(mesh)}
    if not axes:
        return fn(params, batch)
    mesh = next(iter(axes))[0]  # JAX lets no computation have two
    like_params = jax.tree.map(lambda x: sharding(mesh, jax.typeof(x).sharding.spec), params)
    out_sharding = (sharding(mesh, jax.sharding.PartitionSpec()), (like_params, like_params))
    names = tuple(name for name in mesh.axis_names if (mesh, name) in axes)
    # In jit, because JAX 0.10.2 cannot run it op by op.
    return jax.jit(jax.sharding.auto_axes(fn, axes=names, out_sharding=out_sharding))(params, batch)


def equal_everywhere(x: Array) -> Array:
    """Type `x` as equal along all mesh axes. The caller knows that it is: nothing is checked or exchanged."""
    with _check_vma(False):
        return _untyped(x)


def vary_like(tree: PyTree, like: PyTree) -> PyTree:
    """Type every leaf as varying over the mesh axes of any leaf of `like` as well."""
    return vary(tree, varying_axes(like))


def zeros(shape: Sequence[int], dtype: jax.typing.DTypeLike, like: PyTree) -> Array:
    """Zeros to start a loop with: typed as varying over the mesh axes of `like`, or the loop would not type-check."""
    return vary_like(jnp.zeros(shape, dtype), like)


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr, from one that may be open and then has no constants. Since JAX 0.11 both are one class."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def bind(eqn: JaxprEqn, values: Sequence[Array]) -> list[Array]:
    """Evaluate one equation of a jaxpr on new values."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_parts(scan: JaxprEqn, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Divide a sequence aligned with a scan's inputs into (constants, carries, scanned inputs)."""
    if "ft_in" in scan.params:  # since JAX 0.11
        consts, carries, xs = scan.params["ft_in"].update(inputs).unpack()
        return list(consts), list(carries), list(xs)
    first = scan.params["num_consts"]
    last = first + scan.params["num_carry"]
    return list(inputs[:first]), list(inputs[first:last]), list(inputs[last:])


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether the equation must run even if nothing reads its results. Naming a mapped axis does not count.

    If JAX renames that effect, equations that name an axis are kept although nothing reads them.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


class KeyValueStore(Protocol):
    """The methods that gcjax calls of the store that the processes of `jax.distributed` share."""

    def key_value_set(self, key: str, value: str) -> None: ...
    def key_value_set_bytes(self, key: str, value: bytes) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int, process_ids: list[int] | None) -> None: ...


def shared_store() -> KeyValueStore | None:
    """The store that all processes share; None where `jax.distributed` was not initialised."""
    return _distributed.client
