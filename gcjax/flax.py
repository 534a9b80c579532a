"""What Flax users need: BatchNorm under `value_and_moments`, optimisers on a mesh, squares, serialisation.

Needs flax; no other module of gcjax imports it. Under `value_and_moments` a model sees one sample at a time. Its
BatchNorm must average its statistics over the sample axis; otherwise the gradient is silently wrong (see
`gcjax.check_moments`).

On import, `flax.serialization` (`to_bytes`, `to_state_dict`, ...) learns to save and restore states of gcjax.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import optax
from flax import linen, nnx, serialization
from flax.training import train_state
from jax.sharding import Mesh, PartitionSpec

from gcjax._core.per_worker import PerWorker, is_per_worker
from gcjax._core.state import CompressState
from gcjax._training import sharding
from gcjax._types import Array, PyTree

State = TypeVar("State", bound=train_state.TrainState)


@contextlib.contextmanager
def sync_batchnorm(axis_name: str, *models: nnx.Module) -> Iterator[None]:
    """Make every BatchNorm that has no axis name of its own average its statistics over `axis_name`.

    Linen: works on any module applied inside the context. NNX: works on the models passed in, until the context ends.
    Inside a loss make them with `nnx.merge(graphdef, params, rest, copy=True)`: NNX forbids changing a module that was
    made outside the current trace. Layers with an axis name and layers that use running averages are left alone.
    Initialise models outside the context.

    Running statistics come out equal for all samples, so `has_aux` returns them as plain training would.

    Args:
      axis_name: the `sample_axis` of `value_and_moments`.
      *models: NNX modules.

    Raises:
      TypeError: a model is not an NNX module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from gcjax import value_and_moments
      >>> model = linen.BatchNorm(use_running_average=False)
      >>> x = jnp.array([[1.0], [3.0]])
      >>> variables = model.init(jax.random.key(0), x)
      >>> def loss_fn(params, batch):
      ...     with sync_batchnorm("batch"):
      ...         variables = {"params": params, "batch_stats": batch["stats"]}
      ...         out, updated = model.apply(variables, batch["x"], mutable=["batch_stats"])
      ...     return jnp.mean(out), updated["batch_stats"]
      >>> fn = value_and_moments(loss_fn, has_aux=True, sample_axis="batch", in_axes={"x": 0, "stats": None})
      >>> (loss, stats), moments = fn(variables["params"], {"x": x, "stats": variables["batch_stats"]})
      >>> print(moments.grad["scale"].round(3), moments.sum_grad_squared["scale"].round(3))
      [0.] [0.5]
    """

    def set_axis(next_fun, args, kwargs, context):
        module = context.module
        if isinstance(module, linen.BatchNorm) and module.axis_name is None:
            # A bound module is a clone made by apply, so the user's module stays as it is. It is a frozen dataclass.
            object.__setattr__(module, "axis_name", axis_name)
        return next_fun(*args, **kwargs)

    layers = [layer for model in models for layer in _batchnorms(model)]
    for layer in layers:
        layer.axis_name = axis_name
    try:
        with linen.intercept_methods(set_axis):
            yield
    finally:
        for layer in layers:
            layer.axis_name = None


def _batchnorms(model: nnx.Module) -> list[nnx.BatchNorm]:
    """The BatchNorm layers of a model that have no axis name."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"sync_batchnorm takes NNX modules, got {type(model).__name__}; do not pass linen modules")
    nodes = (node for _, node in nnx.iter_graph(model))
    return [node for node in nodes if isinstance(node, nnx.BatchNorm) and node.axis_name is None]


def reseed(model: nnx.Module, **keys: Any) -> None:
    """`nnx.reseed` that raises where it would change nothing: dropout would then be the same in every step.

    Args:
      model: the model, inside a loss made with `nnx.merge(graphdef, params, rest, copy=True)`.
      **keys: the new random key of each stream, by the stream's name.

    Raises:
      ValueError: the model has no stream of that name.

    Example:
      >>> import jax
      >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
      >>> reseed(model, dropout=jax.random.key(1))
    """
    names = {node.key.tag for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)}
    if unknown := sorted(set(keys) - names):
        raise ValueError(f"the model has no random stream {unknown}; its streams are {sorted(names)}")
    streams: dict[str, Any] = dict(keys)
    nnx.reseed(model, **streams)


def apply_gradients(state: State, *, grads: PyTree, sum_grad_squared: PyTree, **kwargs: Any) -> State:
    """`state.apply_gradients(grads=grads, **kwargs)` that also hands the squares to the compressor.

    Flax's own method has no way to pass extra arguments to the optimiser. Without squares the batch would count as one
    sample.

    Args:
      state: a `flax.training.train_state.TrainState` or a class derived from it.
      grads: local gradients, a pytree like `state.params`.
      sum_grad_squared: of `gcjax.value_and_moments`, a pytree like `grads`.
      **kwargs: fields of the state to replace.

    Returns:
      The new state.

    Example:
      >>> import gcjax, jax, jax.numpy as jnp
      >>> tx = optax.chain(gcjax.variance_compress(alpha=1.0, capacity=32), optax.sgd(1.0))
      >>> state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=tx)
      >>> squares = {"w": jnp.array([0.5, 2.0])}  # the second entry's gradient is noise
      >>> state = jax.jit(apply_gradients)(state, grads={"w": jnp.ones(2)}, sum_grad_squared=squares)
      >>> print(state.step, state.params["w"])
      1 [-1.  0.]
    """
    tx = optax.with_extra_args_support(state.tx)
    with_squares = functools.partial(tx.update, sum_grad_squared=sum_grad_squared)
    bound = state.replace(tx=optax.GradientTransformation(tx.init, with_squares))
    return bound.apply_gradients(grads=grads, **kwargs).replace(tx=state.tx)


def distribute(optimizer: nnx.Optimizer, mesh: Mesh) -> nnx.Optimizer:
    """`gcjax.distribute` for an `nnx.Optimizer` whose chain holds a compressor.

    Args:
      optimizer: as `nnx.Optimizer(model, tx, wrt=nnx.Param)` makes it, before the first step.
      mesh: a mesh with the axes that the compressor names.

    Returns:
      A new optimiser on the mesh: the compressor's state once for each worker, the rest replicated.

    Raises:
      TypeError: it is no `nnx.Optimizer`.
      ValueError: the mesh lacks an axis that the compressor names.

    Example:
      >>> import gcjax, jax
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> tx = optax.chain(gcjax.top_k_compress(0.5, axis_name="data"), optax.sgd(0.1))
      >>> optimizer = distribute(nnx.Optimizer(model, tx, wrt=nnx.Param), jax.make_mesh((1,), ("data",)))
      >>> print(gcjax.info(optimizer.opt_state).residual_norm)  # one for each worker
      [0.]
    """
    _check_optimizer(optimizer)
    placed = sharding.distribute_any(optimizer, mesh)
    # What owners keep is new on the mesh. NNX updates Variables only.
    wrapped = jax.tree.map(lambda x: x if _is_variable(x) else nnx.OptArray(x), placed.opt_state, is_leaf=_is_variable)
    placed.opt_state = nnx.data(wrapped)
    return placed


def state_sharding(optimizer: nnx.Optimizer) -> nnx.StateSharding:
    """How an optimiser is sharded, for `in_specs` of `nnx.shard_map`: like `gcjax.state_specs`.

    `nnx.split` turns `PerWorker` nodes into dicts, which do not say that they are per worker. This takes the optimiser
    before that. (`jax.shard_map` also takes NNX objects, with `gcjax.state_specs(optimizer)`.)

    Args:
      optimizer: an `nnx.Optimizer`.

    Returns:
      A `nnx.StateSharding`: per-worker state sharded over the axes of the workers, the rest replicated.

    Raises:
      TypeError: it is no `nnx.Optimizer`.

    Example:
      >>> import gcjax, jax
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> tx = optax.chain(gcjax.variance_compress(axis_name="data"), optax.adam(1e-3))
      >>> optimizer = distribute(nnx.Optimizer(model, tx, wrt=nnx.Param), jax.make_mesh((1,), ("data",)))
      >>> in_specs = (nnx.StateSharding({...: PartitionSpec()}), state_sharding(optimizer), PartitionSpec("data"))
      >>> print(state_sharding(optimizer).shardings)
      (P('data',), P())
    """
    _check_optimizer(optimizer)
    below: dict[tuple[str, ...], list[tuple]] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(optimizer, is_leaf=is_per_worker):
        if is_per_worker(node):
            below.setdefault(node.axes, []).append(tuple(map(_nnx_key, path)))
    specs = [(_Below(tuple(paths)), PartitionSpec(axes or None)) for axes, paths in below.items()]
    return nnx.StateSharding([*specs, (..., PartitionSpec())])


@dataclasses.dataclass(frozen=True)
class _Below:
    """A filter of NNX: what lies below one of some paths."""

    paths: tuple[tuple, ...]

    def __call__(self, path: tuple, value: Any) -> bool:
        del value
        return any(path[: len(above)] == above for above in self.paths)


def _nnx_key(key: Any) -> Any:
    """A key of a path of JAX as NNX writes it."""
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def _check_optimizer(optimizer: nnx.Optimizer) -> None:
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"expected an nnx.Optimizer, got {type(optimizer).__name__}; for states of optax use gcjax.distribute and "
            "gcjax.state_specs"
        )


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _to_state_dict(node: PerWorker) -> dict[str, Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(node.value)}


def _from_state_dict(node: PerWorker, state: dict[str, Array]) -> PerWorker:
    """The saved leaves in the structure of `node`."""
    own = _to_state_dict(node)
    shapes, saved = ({name: x.shape for name, x in leaves.items()} for leaves in (own, state))
    if shapes != saved:
        name = next(name for name in {**shapes, **saved} if shapes.get(name) != saved.get(name))
        raise ValueError(
            f"the saved state does not fit: {name} has the shape {saved.get(name)} there and {shapes.get(name)} in the "
            "target. Restore into a state of the same options, parameters and number of workers, as gcjax.distribute "
            "made it"
        )
    value = jax.tree.unflatten(jax.tree.structure(node.value), [state[name] for name in own])
    return dataclasses.replace(node, value=value)


def _fields(node: CompressState) -> dict[str, PyTree]:
    """The fields that are not static, as of a NamedTuple."""
    return {"buckets": node.buckets, "report": node.report}


def _fields_to_state_dict(node: CompressState) -> dict[str, PyTree]:
    return {name: serialization.to_state_dict(x) for name, x in _fields(node).items()}


def _fields_from_state_dict(node: CompressState, state: dict[str, PyTree]) -> CompressState:
    found = {name: serialization.from_state_dict(x, state[name], name) for name, x in _fields(node).items()}
    return dataclasses.replace(node, **found)


serialization.register_serialization_state(PerWorker, _to_state_dict, _from_state_dict)
serialization.register_serialization_state(CompressState, _fields_to_state_dict, _fields_from_state_dict)
