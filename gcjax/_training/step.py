"""The data-parallel training step: its state, its callable, and the step of one worker."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._comm.collectives import (
    axis_size,
    dense_mean,
    gather_shards,
    scatter_mean,
    sharded_dimensions,
    worker_index,
)
from gcjax._core.per_worker import PerWorker
from gcjax._jax_compat import constrain, without_mesh_types
from gcjax._training.bad_steps import is_spoilt, skipping_bad, where_good
from gcjax._training.call_checks import CallChecks
from gcjax._training.chain_check import reject_two_compressors
from gcjax._training.checks import (
    check_batch,
    check_compressors,
    check_model_state,
    check_params,
    check_placed,
    check_state,
)
from gcjax._training.frozen import merge_params, of_trained, split_by
from gcjax._training.gradients import (
    GradientFn,
    Inputs,
    Moments,
    accumulated,
    batch_gradient,
    moments_for,
    uniform_loss,
)
from gcjax._training.local import as_local
from gcjax._training.loss_check import check_comparison, gradients_to_compare
from gcjax._training.optimiser import update_with
from gcjax._training.sharding import distribute, init_sharded, placeable, state_specs
from gcjax._types import Array, PyTree
from gcjax._validation import check_random_key

Result = TypeVar("Result")


class TrainState(NamedTuple):
    """State of data-parallel training on a mesh.

    Attributes:
      step: int32, steps done.
      params: replicated, or sharded by `param_specs`.
      opt_state: of the optax chain, in part per worker.
      model_state: PerWorker or None, what the model changes but does not train, such as BatchNorm statistics. Each
        worker has its own, as in the paper. To evaluate, average `model_state.stacked()` over axis 0.
      key: random key or None.
      skipped: int32, how many of the last steps were skipped in a row.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PerWorker | None
    key: Array | None
    skipped: Array = np.int32(0)  # type: ignore[assignment]  # an Array would start JAX on import


class Metrics(NamedTuple):
    """What a step reports.

    Attributes:
      loss: float32[workers], each worker's own: no collective is spent on reporting.
      skipped: int32, how many steps in a row were skipped, this one included; 0 if this one was not.
      aux: with `has_aux` the auxiliary output of the loss: leaves (workers, *shape), each worker's own; otherwise
        None.
    """

    loss: Array
    skipped: Array
    aux: PyTree


class TrainStep:
    """What `gcjax.make_train_step` returns. A call goes through `_global_step`, under `jax.jit`, to `_local_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformationExtraArgs,
        mesh: jax.sharding.Mesh,
        axes: tuple[str, ...],
        moments: Moments,
        accumulate: int,
        param_specs: PyTree,
        *,
        has_aux: bool = False,
        trainable: PyTree = None,
        max_skipped: int | None = None,  # None: bad steps are not skipped
        checks: bool = False,
        check_vma: bool = True,
    ) -> None:
        self._check_vma = check_vma
        self._loss, self._moments, self._has_aux = uniform_loss(loss_fn, has_aux), moments, has_aux
        self._split = split_by(trainable)
        self._tx, self._mesh, self._axes = of_trained(tx, self._split), mesh, axes
        self._accumulate, self._param_specs = accumulate, param_specs
        specs = [sharded_dimensions(spec, tuple(mesh.shape)) for spec in jax.tree.leaves(param_specs)]
        self._sharding = {name for dimensions in specs for _, names in dimensions for name in names}
        self._gathered = tuple(axis for axis in axes if axis in self._sharding)
        self._workers = math.prod(mesh.shape[axis] for axis in axes)
        self._skips_bad, self._looks = max_skipped is not None, checks
        self._jitted = jax.jit(self._global_step, donate_argnums=0)
        self._checks = CallChecks(mesh, max_skipped, self._check_loss if checks else None, self._jitted.lower)

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh. The arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        check_params(params, self._split(params)[0])
        check_model_state(model_state)
        reject_two_compressors(self._tx, params, lambda params: self._split(params)[0])
        own_state = None if model_state is None else PerWorker.pack(model_state, self._axes)
        if not self._sharding:
            state = TrainState(jnp.int32(0), params, self._tx.init(params), own_state, key)
            check_compressors(state.opt_state, self._axes)
            return distribute(state, self._mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._param_specs)
        params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(
            placeable(params, self._mesh)
        )
        opt_state = init_sharded(self._tx, params, self._mesh, self._param_specs)
        check_compressors(opt_state, self._axes)
        rest = distribute(TrainState(jnp.int32(0), (), (), own_state, key), self._mesh)
        return rest._replace(params=params, opt_state=opt_state)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One step. Donates `state`."""
        self._check_arguments(state, batch)
        self._checks.before(state, batch)
        state, metrics = self._jitted(state, batch)
        self._checks.after(state, batch, metrics.skipped, metrics.loss)
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """`jax.jit(...).lower`, for the compiled program and its cost."""
        self._check_arguments(state, batch)
        return self._jitted.lower(self._with_shardings(state), batch)

    def _with_shardings(self, state: TrainState) -> TrainState:
        """The state with the shardings that a `jax.ShapeDtypeStruct` lacks."""
        specs = jax.tree.broadcast(self._state_specs(state), state)

        def with_sharding(x, spec):
            if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is not None:
                return x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec))

        return jax.tree.map(with_sharding, state, specs)

    def _state_specs(self, state: TrainState) -> PyTree:
        return state_specs(state, state.params, self._param_specs)

    def _global_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step on global arrays: `_local_step` on every device."""
        over_workers = PartitionSpec(self._axes)
        out_specs: PyTree = (self._state_specs(state), Metrics._make([over_workers, PartitionSpec(), over_workers]))
        return self._on_devices(self._local_step, state, batch, out_specs)

    def _on_devices(self, run: Callable[..., Any], state: TrainState, batch: PyTree, out_specs: PyTree) -> Any:
        """`run` of every device's part of the state and the batch."""
        over_workers = PartitionSpec(self._axes)
        in_specs = self._state_specs(state), over_workers
        check_state(state, self._mesh)
        batch = constrain(batch, NamedSharding(self._mesh, over_workers))
        return jax.shard_map(run, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)(state, batch)

    def _local_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step of one worker: gradient of its batch, compressed exchange in `tx.update`, new parameters."""
        own, inputs = self._loss_arguments(state, batch)
        loss, grad, squares, model_state, aux = self._gradient(state.opt_state)(own, inputs)
        grad, squares = self._own_shards(grad, squares)
        params, frozen = self._split(state.params)
        update = functools.partial(
            update_with,
            self._tx,
            grad,
            params=params,
            squares=squares,
            value=lambda: self._value(loss),
            checks=self._looks,
        )
        skipped = state.skipped
        if not self._skips_bad:
            updates, opt_state = update(state.opt_state)
            new_params = optax.apply_updates(params, updates)
        else:
            updates, opt_state, bad = skipping_bad(update, state.opt_state)
            new_params = where_good(bad, params, optax.apply_updates(params, updates))
            spoilt = is_spoilt(inputs.model_state, model_state)
            model_state = where_good(bad | spoilt, inputs.model_state, model_state)
            skipped = jnp.where(bad, skipped + 1, 0)
        new = TrainState(
            step=state.step + 1,
            params=merge_params(new_params, frozen),
            opt_state=opt_state,
            model_state=None if model_state is None else PerWorker.pack(model_state, self._axes),
            key=state.key,
            skipped=skipped,
        )
        return new, Metrics(loss[None], skipped, jax.tree.map(lambda x: jnp.asarray(x)[None], aux))

    def _gradient(self, opt_state: PyTree) -> GradientFn:
        """With squares if `moments` asks for them, or leaves it to a state in which a compressor reads them."""
        moments = moments_for(opt_state, self._moments)
        whole = batch_gradient(self._loss, moments, self._has_aux, self._axes)
        return self._tracked(accumulated(whole, self._accumulate, self._axes, moments))

    def _tracked(self, run: Callable[..., Result]) -> Callable[..., Result]:
        """What calls the loss, with JAX's tracking of varying values unless it was turned off."""
        return run if self._check_vma else functools.partial(without_mesh_types, run)

    def _value(self, loss: Array) -> Array:
        """The loss for transforms that ask for a `value`: the same on all workers, as their updates must be."""
        return dense_mean(loss, self._axes)

    def _loss_arguments(self, state: TrainState, batch: PyTree) -> tuple[PyTree, Inputs]:
        """The parameters to train, whole and typed as the worker's own, and what else its loss depends on."""
        key = None
        if state.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), worker_index(self._axes))
        model_state = None if state.model_state is None else state.model_state.unpack()
        trained, frozen = self._split(gather_shards(state.params, self._param_specs, self._gathered))
        return as_local(trained, self._axes), Inputs(batch, key, model_state, frozen)

    def _own_shards(self, grad: PyTree, squares: PyTree) -> tuple[PyTree, PyTree]:
        """The mean over the axes along which parameters were gathered. Each sample now counts 1 / size."""
        if not self._gathered:
            return grad, squares
        grad = scatter_mean(grad, self._param_specs, self._gathered)
        if squares is not None:
            mean = scatter_mean(squares, self._param_specs, self._gathered)
            squares = jax.tree.map(lambda s: s / axis_size(self._gathered), mean)
        return grad, squares

    def _check_arguments(self, state: TrainState, batch: PyTree) -> None:
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be the TrainState that init or the last step returned, got {type(state)}")
        check_placed(batch, self._mesh, self._axes)
        check_batch(batch, self._workers, self._accumulate)

    def _check_loss(self, state: TrainState, batch: PyTree) -> None:
        """Check that the loss is a mean over samples, on all processes alike."""
        over_devices = PartitionSpec(self._mesh.axis_names)
        moments = moments_for(state.opt_state, self._moments)
        compared = self._tracked(functools.partial(gradients_to_compare, self._loss, moments))

        def local(state, batch):
            return compared(*self._loss_arguments(state, batch))[None]

        def compare(state, batch):
            return self._on_devices(local, state, batch, over_devices)

        everywhere = NamedSharding(self._mesh, PartitionSpec())
        try:
            lowered = jax.jit(compare, out_shardings=everywhere).lower(state, batch)
        except Exception:  # the user's loss may raise anything where it takes no other number of samples
            return
        check_comparison(np.asarray(lowered.compile()(state, batch)), moments)
