"""The data-parallel training step."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._comm.collectives import (
    axis_size,
    axis_tuple,
    gather_shards,
    scatter_mean,
    sharded_dimensions,
    worker_index,
)
from gcjax._core.per_worker import PerWorker
from gcjax._jax_compat import constrain
from gcjax._moments import value_and_moments
from gcjax._training.consistency import check_agreement
from gcjax._training.gradients import accumulated, batch_gradient, check_batch
from gcjax._training.sharding import as_local, init_sharded, place, state_specs
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_integer, check_random_key


class TrainState(NamedTuple):
    """State of data-parallel training on a mesh.

    Attributes:
      step: int32, steps done.
      params: replicated, or sharded by `param_specs`.
      opt_state: of the optax chain, in part per worker.
      model_state: PerWorker or None, what the model changes but does not train, such as BatchNorm statistics. Each
        worker has its own, as in the paper. To evaluate, average `model_state.stacked()` over axis 0.
      key: random key or None.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PerWorker | None
    key: Array | None


class Metrics(NamedTuple):
    """What a step reports.

    Attributes:
      loss: float32[workers], each worker's own: no collective is spent on reporting.
    """

    loss: Array


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    moments: Callable[..., Any] | None = value_and_moments,
    accumulate: int = 1,
    param_specs: PyTree = None,
) -> "TrainStep":
    """A data-parallel training step: `jax.jit` of `jax.shard_map` over `mesh`, the state donated.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, the mean over the leading axis of the batch's leaves. If `init` got a
        `key`, it is called with `key=` too. If `init` got a `model_state`, it is called with `model_state=` and returns
        `(loss, model_state)`. With `moments` it sees one sample at a time, as a batch of size 1 with its own key.
      tx: any optax chain. Its compressor must name the same axis (or some of the axes). Transforms with state that
        stand before the compressor need `gcjax.per_worker`.
      mesh: the devices.
      axis_name: axis or axes over which the batch is split.
      moments: `gcjax.value_and_moments`, or a `functools.partial` of it with options; its sum of squares is passed to
        `tx.update`. None for methods that do not use it: the gradient then comes from `jax.value_and_grad`.
      accumulate: number of parts into which each worker's batch is split. Their gradients are computed one after the
        other and averaged.
      param_specs: how parameters are sharded, `PartitionSpec`s in a pytree like `params` or a prefix; None if they are
        not. Over an axis of `axis_name` (FSDP): the loss sees whole parameters, gathered; gradient and squares are
        averaged over that axis by a reduce-scatter, and the compressor names the other axes. Over any other axis
        (tensor parallelism): the loss sees the shards and calls the collectives itself, and `moments` is best None.
        Each shard is compressed where it lives and has its own state.

    Returns:
      `step` with `step.init(params, *, model_state=None, key=None) -> TrainState`,
      `step(state, batch) -> (state, Metrics)` and `step.lower(state, batch)` as for a jitted function. `batch` is a
      pytree of global arrays, their leading axes split over the workers. The state passed in is donated.

    Raises:
      ValueError: the mesh lacks an axis; `accumulate` is below 1; a dimension of a parameter is sharded over axes of
        both sorts; (when called) a batch cannot be split evenly.
      TypeError: `accumulate` is not an int.
      RuntimeError: (when called, on all processes) the processes would not run the same step from the same state; see
        `gcjax.check_agreement`.
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    param_specs = PartitionSpec() if param_specs is None else param_specs
    for spec in jax.tree.leaves(param_specs):
        _check_spec(spec, mesh, axes)
    return TrainStep(loss_fn, optax.with_extra_args_support(tx), mesh, axes, moments, accumulate, param_specs)


def checked_axes(mesh: jax.sharding.Mesh, axis_name: AxisNames, accumulate: int) -> tuple[str, ...]:
    """The worker axes of a training step, after checking its arguments.

    Raises:
      ValueError: the mesh lacks an axis, or `accumulate` is below 1.
      TypeError: `accumulate` is not an int.
    """
    axes = axis_tuple(axis_name)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(f"axis_name={axis_name!r} must name axes of the mesh, which has {tuple(mesh.shape)}")
    check_integer("accumulate", accumulate, 1)
    return axes


def _check_spec(spec: PartitionSpec, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    for _, names in sharded_dimensions(spec, tuple(mesh.shape)):
        if set(names) & set(axes) and not set(names) <= set(axes):
            raise ValueError(
                f"param_specs has {spec}, which shards one dimension over {names}, some of them axes of the batch and "
                "some not; shard different dimensions over them"
            )
    if unknown := {name for entry in spec for name in axis_tuple(entry)} - set(mesh.shape):
        raise ValueError(
            f"param_specs has {spec}, but the mesh has no axis {sorted(unknown)}, only {tuple(mesh.shape)}"
        )


class TrainStep:
    """What `make_train_step` returns. A call goes through `_global_step`, under `jax.jit`, to `_local_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformationExtraArgs,
        mesh: jax.sharding.Mesh,
        axes: tuple[str, ...],
        moments: Callable[..., Any] | None,
        accumulate: int,
        param_specs: PyTree,
    ) -> None:
        self._gradient = accumulated(batch_gradient(loss_fn, moments), accumulate, axes)
        self._tx, self._mesh, self._axes = tx, mesh, axes
        self._accumulate, self._param_specs = accumulate, param_specs
        specs = [sharded_dimensions(spec, tuple(mesh.shape)) for spec in jax.tree.leaves(param_specs)]
        self._sharding = {name for dimensions in specs for _, names in dimensions for name in names}
        self._gathered = tuple(axis for axis in axes if axis in self._sharding)
        self._workers = math.prod(mesh.shape[axis] for axis in axes)
        self._jitted = jax.jit(self._global_step, donate_argnums=0)
        self._agreed: set = set()  # batch shapes for which all processes were found to run the same program
        # CPU devices of one process share a thread pool. With several steps in flight, collectives can take all of its
        # threads while some device has not begun, and wait for ever. So on CPUs only one step is in flight.
        self._one_at_a_time = mesh.local_mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh. The arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        own_state = None if model_state is None else PerWorker.pack(model_state, self._axes)
        if not self._sharding:
            return place(TrainState(jnp.int32(0), params, self._tx.init(params), own_state, key), self._mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._param_specs)
        params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(params)
        opt_state = init_sharded(self._tx, params, self._mesh, self._param_specs)
        rest = place(TrainState(jnp.int32(0), (), (), own_state, key), self._mesh)
        return rest._replace(params=params, opt_state=opt_state)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One step. Donates `state`."""
        check_batch(batch, self._workers, self._accumulate)
        if jax.process_count() > 1:
            self._check_agreement(state, batch)
        if self._one_at_a_time:
            jax.block_until_ready((state, batch))  # the batch too: it may be the output of another program
        return self._jitted(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """`jax.jit(...).lower`, for the compiled program and its cost."""
        check_batch(batch, self._workers, self._accumulate)
        return self._jitted.lower(state, batch)

    def _global_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step on global arrays: `_local_step` on every device."""
        over_workers = PartitionSpec(self._axes)
        specs = state_specs(state, state.params, self._param_specs)
        batch = constrain(batch, NamedSharding(self._mesh, over_workers))
        run = jax.shard_map(
            self._local_step, mesh=self._mesh, in_specs=(specs, over_workers), out_specs=(specs, over_workers)
        )
        return run(state, batch)

    def _local_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step of one worker: gradient of its batch, compressed exchange in `tx.update`, new parameters."""
        model_state = None if state.model_state is None else state.model_state.unpack()
        key = None
        if state.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), worker_index(self._axes))
        params = as_local(gather_shards(state.params, self._param_specs, self._gathered), self._axes)
        loss, grad, squares, model_state = self._gradient(params, batch, model_state, key)
        grad, squares = self._own_shards(grad, squares)
        extra = {} if squares is None else {"sum_grad_squared": squares}
        updates, opt_state = self._tx.update(grad, state.opt_state, state.params, **extra)
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            model_state=None if model_state is None else PerWorker.pack(model_state, self._axes),
            key=state.key,
        )
        return new, Metrics(loss[None])

    def _own_shards(self, grad: PyTree, squares: PyTree) -> tuple[PyTree, PyTree]:
        """The mean over the axes along which parameters were gathered. Each sample now counts 1 / size."""
        if not self._gathered:
            return grad, squares
        grad = scatter_mean(grad, self._param_specs, self._gathered)
        if squares is not None:
            mean = scatter_mean(squares, self._param_specs, self._gathered)
            squares = jax.tree.map(lambda s: s / axis_size(self._gathered), mean)
        return grad, squares

    def _check_agreement(self, state: TrainState, batch: PyTree) -> None:
        """Check before any collective that all processes run the same program, and start from the same state."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        seen = (jax.tree.structure((state, shapes)), *jax.tree.leaves(shapes))
        if seen not in self._agreed:
            start = {} if self._agreed else {"state": state}
            # The step itself reuses this trace and lowering.
            check_agreement(self._mesh, batch=shapes, **start, program=self._jitted.lower(state, batch))
            self._agreed.add(seen)
