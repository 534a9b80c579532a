"""The data-parallel training step: its state, its callable, and the step of one worker."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._comm.collectives import axis_size, dense_mean, gather_shards, scatter_mean, worker_index
from gcjax._core.own_models import gossip_states, own_axes, own_value, pack_leaves, unpack_leaves, without_gossip
from gcjax._core.per_worker import PerWorker
from gcjax._core.state import compress_states
from gcjax._jax_compat import constrain, without_mesh_types
from gcjax._training.bad_steps import any_of, bad_flags, is_finite, is_spoilt, kept_state
from gcjax._training.call_checks import CallChecks, check_batch, check_state
from gcjax._training.checks import check_start
from gcjax._training.frozen import merge_params, of_trained, split_by
from gcjax._training.gradients import Inputs, Moments, accumulated, batch_gradient, moments_for, uniform_loss
from gcjax._training.local import as_local
from gcjax._training.loss_check import check_comparison, gradients_to_compare
from gcjax._training.optimiser import Compressed, compress_shards, norm_of, per_worker_specs, update_whole, update_with
from gcjax._training.sharding import distribute, init_sharded, is_spec, on_mesh, sharding_axes, state_specs
from gcjax._types import Array, PyTree
from gcjax._xla import kept_unless

Result = TypeVar("Result")


class TrainState(NamedTuple):
    """State of data-parallel training on a mesh.

    Attributes:
      step: int32, steps done.
      params: replicated, or sharded by `param_specs`; with a transform of `gcjax.gossip` a `PerWorker`.
      opt_state: of the optax chain, in part per worker.
      model_state: PerWorker or None, what the model changes but does not train, such as BatchNorm statistics. Each
        worker has its own, as in the paper. To evaluate, average `model_state.stacked()` over axis 0.
      key: random key or None.
      skipped: int32, how many of the last steps were skipped in a row; with gossip a `PerWorker` of such numbers.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PerWorker | None
    key: Array | None
    skipped: Any = np.int32(0)  # an Array would start JAX on import


class Metrics(NamedTuple):
    """What a step reports.

    Attributes:
      loss: float32[workers], each worker's own: no collective is spent on reporting.
      skipped: int32, how many steps in a row were skipped, this one included; 0 if this one was not. With gossip
        int32[workers]: each worker skips its own steps.
      aux: with `has_aux` the auxiliary output of the loss: leaves (workers, *shape), each worker's own; otherwise
        None.
      grad_norm: float32, the 2-norm of the mean gradient as the compressors return it: the first transform after them
        sees it. NaN in a skipped step and without a compressor. With gossip float32[workers]: the norm of each
        worker's own gradient.
    """

    loss: Array
    skipped: Array
    aux: PyTree
    grad_norm: Array


class Worker(NamedTuple):
    """What one device has computed from its part of the batch.

    Attributes:
      loss: float32.
      gradient: of its parameters, or of its shard of them.
      squares: likewise, or None.
      old_model_state: before the step, or None.
      model_state: after it, or None.
      aux: of the loss, or None.
    """

    loss: Array
    gradient: PyTree
    squares: PyTree
    old_model_state: PyTree
    model_state: PyTree
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
        has_aux: bool,
        trainable: PyTree,
        max_skipped: int,
        checks: bool,
        check_vma: bool,
    ) -> None:
        self._check_vma = check_vma
        self._loss, self._moments, self._has_aux = uniform_loss(loss_fn, has_aux), moments, has_aux
        self._split = split_by(trainable)
        self._tx, self._mesh, self._axes = of_trained(tx, self._split), mesh, axes
        self._accumulate, self._param_specs = accumulate, param_specs
        self._sharding = sharding_axes(param_specs, mesh)
        self._jitted = jax.jit(self._global_step, donate_argnums=0)
        self._looks = checks
        check_loss = self._check_loss if checks else None
        self._checks = CallChecks(mesh, axes, accumulate, max_skipped, check_loss, self._jitted.lower)

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh. The arguments stay valid."""
        models = check_start(self._tx, params, self._split, model_state, key, self._axes, self._sharding)
        own_state = None if model_state is None else PerWorker.pack(model_state, self._axes)
        state = TrainState(jnp.int32(0), (), (), own_state, key, jnp.int32(0))
        if self._sharding:
            params = on_mesh(params, self._mesh, self._param_specs)
            opt_state = init_sharded(self._tx, params, self._mesh, self._param_specs)
            return distribute(state, self._mesh)._replace(params=params, opt_state=opt_state)
        opt_state = self._tx.init(params)
        if models:
            params, opt_state = PerWorker.pack(params, models), pack_leaves(opt_state, models)
            state = state._replace(skipped=PerWorker.pack(state.skipped, models))
        return distribute(state._replace(params=params, opt_state=opt_state), self._mesh)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One step. Donates `state`."""
        self._checks.before(state, batch)
        state, metrics = self._jitted(state, batch)
        self._checks.after(state, batch, metrics.skipped, metrics.loss)
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """`jax.jit(...).lower`, for the compiled program and its cost."""
        check_batch(batch, self._mesh, self._axes, self._accumulate)
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
        if self._sharding:
            return self._step_of_shards(state, batch)
        models, over_workers = own_axes(state.params), PartitionSpec(self._axes)
        of_models = PartitionSpec(models) if models else PartitionSpec()
        metrics = Metrics(over_workers, of_models, over_workers, of_models)  # type: ignore[arg-type]
        return self._on_devices(self._local_step, state, batch, (self._state_specs(state), metrics))

    def _on_devices(self, run: Callable[..., Any], state: TrainState, batch: PyTree, out_specs: PyTree) -> Any:
        """`run` of every device's part of the state and the batch."""
        over_workers = PartitionSpec(self._axes)
        in_specs = self._state_specs(state), over_workers
        check_state(state, self._mesh)
        batch = constrain(batch, NamedSharding(self._mesh, over_workers))
        return jax.shard_map(run, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)(state, batch)

    def _local_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step of one worker: gradient of its batch, compressed exchange in `tx.update`, new parameters."""
        models = own_axes(state.params)
        found = self._gradient(state, batch)
        own = state._replace(
            params=own_value(state.params), opt_state=unpack_leaves(state.opt_state), skipped=own_value(state.skipped)
        )
        flags = [~is_finite(found.gradient)]  # of this worker, which skips its own update with gossip
        extra = self._extra(found, models) | ({"skips": flags[0]} if models else {})
        new = update_with(self._tx, found.gradient, own.opt_state, self._split(own.params)[0], **extra)
        if not models:
            flags = bad_flags(new.updates, own.opt_state, new.opt_state)
        norm = norm_of([found.gradient] if models else new.means)
        model_state = self._kept_model_state(found, flags)
        after = self._after(own, new.updates, new.opt_state, flags, model_state)
        if models:
            skipped, norm = after.skipped[None], norm[None]
            after = after._replace(
                params=PerWorker.pack(after.params, models),
                opt_state=pack_leaves(after.opt_state, models),
                skipped=PerWorker.pack(after.skipped, models),
            )
        return after, _metrics(found, skipped if models else after.skipped, norm)

    def _step_of_shards(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step of sharded parameters: each shard is compressed where it lives, the rest sees whole arrays."""
        specs, over_workers = self._state_specs(state), PartitionSpec(self._axes)
        params = self._split(state.params)[0]
        of_params = jax.tree.broadcast(self._param_specs, state.params, is_leaf=is_spec)
        of_trained = jax.tree.map(lambda x, s: None if x is None else s, params, of_params, is_leaf=lambda x: x is None)

        def local(state, batch):
            found = self._gradient(state, batch)
            own, extra = self._split(state.params)[0], self._extra(found, ())
            compressed = compress_shards(self._tx, found.gradient, state.opt_state, own, checks=self._looks, **extra)
            return compressed, self._kept_model_state(found, compressed.flags), _metrics(found, (), ())

        count = len(compress_states(state.opt_state))
        out_specs: Any = (
            Compressed([of_trained] * count, per_worker_specs(state.opt_state), [PartitionSpec()] * count),
            over_workers,
            Metrics(over_workers, (), over_workers, ()),  # type: ignore[arg-type]
        )
        compressed, model_state, metrics = self._on_devices(local, state, batch, out_specs)
        updates, opt_state = update_whole(
            self._tx,
            compressed,
            state.opt_state,
            params,
            self._mesh,
            (of_trained, specs.opt_state),
            value=jnp.mean(metrics.loss),
        )
        after = self._after(state, updates, opt_state, compressed.flags, model_state)
        return after, metrics._replace(skipped=after.skipped, grad_norm=norm_of(compressed.means))

    def _after(
        self, state: TrainState, updates: PyTree, opt_state: PyTree, flags: list[Array], model_state: PyTree
    ) -> TrainState:
        """The state after a step, which in a bad step is as before."""
        bad = any_of(flags)
        params, frozen = self._split(state.params)
        moved = optax.apply_updates(params, updates)
        # The updates of gossip are those of an exchange, without the worker's own if it is bad.
        if not gossip_states(opt_state):
            moved = kept_unless(~bad, moved, params)
        return TrainState(
            step=state.step + 1,
            params=merge_params(moved, frozen),
            opt_state=kept_state(flags, state.opt_state, opt_state),
            model_state=model_state,
            key=state.key,
            skipped=jnp.where(bad, state.skipped + 1, 0),
        )

    def _kept_model_state(self, found: Worker, flags: list[Array]) -> PerWorker | None:
        if found.model_state is None:
            return None
        bad = any_of(flags) | is_spoilt(found.old_model_state, found.model_state)
        return PerWorker.pack(kept_unless(~bad, found.model_state, found.old_model_state), self._axes)

    def _gradient(self, state: TrainState, batch: PyTree) -> Worker:
        """One device's loss and gradient, averaged over the axes inside of which parameters are sharded or equal.

        With squares if `moments` asks for them, or leaves it to a state in which a compressor reads them.
        """
        trained, inputs = self._loss_arguments(state, batch)
        moments = moments_for(without_gossip(state.opt_state), self._moments)
        whole = batch_gradient(self._loss, moments, self._has_aux, self._axes)
        found = self._tracked(accumulated(whole, self._accumulate, self._axes, moments))(trained, inputs)
        grad, squares, inside = found.gradient, found.squares, self._inside(own_axes(state.params))
        if inside:
            grad = scatter_mean(grad, self._param_specs, inside)
        if inside and squares is not None:  # each sample now counts 1 / size
            mean = scatter_mean(squares, self._param_specs, inside)
            squares = jax.tree.map(lambda s: s / axis_size(inside), mean)
        return Worker(found.loss, grad, squares, inputs.model_state, found.model_state, found.aux)

    def _inside(self, models: tuple[str, ...]) -> tuple[str, ...]:
        """The axes along which the step averages gradients itself: of shards, and inside of a worker of gossip."""
        return tuple(axis for axis in self._axes if axis in self._sharding or (models and axis not in models))

    def _tracked(self, run: Callable[..., Result]) -> Callable[..., Result]:
        """What calls the loss, with JAX's tracking of varying values unless it was turned off."""
        return run if self._check_vma else functools.partial(without_mesh_types, run)

    def _extra(self, found: Worker, models: tuple[str, ...]) -> dict[str, Any]:
        """Further arguments of `tx.update`. The loss is the mean of the workers with the same parameters."""
        over = tuple(axis for axis in self._axes if axis not in models)
        value = dense_mean(found.loss, over) if over else found.loss
        return {"value": value} | ({} if found.squares is None else {"sum_grad_squared": found.squares})

    def _loss_arguments(self, state: TrainState, batch: PyTree) -> tuple[PyTree, Inputs]:
        """The parameters to train, whole and typed as the worker's own, and what else its loss depends on."""
        key = None
        if state.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), worker_index(self._axes))
        model_state = None if state.model_state is None else state.model_state.unpack()
        params = gather_shards(own_value(state.params), self._param_specs, self._inside(()))
        trained, frozen = self._split(params)
        return as_local(trained, self._axes), Inputs(batch, key, model_state, frozen)

    def _check_loss(self, state: TrainState, batch: PyTree) -> None:
        """Check that the loss is a mean over samples, on all processes alike."""
        over_devices = PartitionSpec(self._mesh.axis_names)
        moments = moments_for(without_gossip(state.opt_state), self._moments)
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


def _metrics(found: Worker, skipped: Any, norm: Any) -> Metrics:
    """What one device reports."""
    return Metrics(found.loss[None], skipped, jax.tree.map(lambda x: jnp.asarray(x)[None], found.aux), norm)
