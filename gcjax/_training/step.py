"""The data-parallel training step."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gcjax._comm.collectives import (
    axis_size,
    axis_tuple,
    dense_mean,
    gather_shards,
    scatter_mean,
    sharded_dimensions,
    worker_index,
)
from gcjax._core.per_worker import PerWorker
from gcjax._jax_compat import constrain
from gcjax._moments import value_and_moments
from gcjax._training.bad_steps import is_spoilt, skipping_bad, where_good
from gcjax._training.call_checks import CallChecks
from gcjax._training.checks import (
    check_batch,
    check_compressors,
    check_params,
    check_spec,
    check_state,
)
from gcjax._training.frozen import merge_params, of_trained, split_by
from gcjax._training.gradients import Inputs, accumulated, batch_gradient, uniform_loss
from gcjax._training.local import as_local
from gcjax._training.loss_check import check_losses, losses_to_compare
from gcjax._training.optimiser import update_with
from gcjax._training.sharding import distribute, init_sharded, state_specs
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_flag, check_integer, check_random_key


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
      aux: what the loss returned beside itself, with `has_aux`: leaves (workers, *shape), each worker's own. None
        without.
    """

    loss: Array
    skipped: Array
    aux: PyTree


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    moments: Callable[..., Any] | None = value_and_moments,
    accumulate: int = 1,
    param_specs: PyTree = None,
    has_aux: bool = False,
    trainable: PyTree | Callable[[PyTree], PyTree] = None,
    max_skipped: int = 10,
    checks: bool = True,
) -> "TrainStep":
    """A data-parallel training step: `jax.jit` of `jax.shard_map` over `mesh`, the state donated.

    A bad step, in which the gradient of some worker is not finite, is skipped whole: parameters, optimiser and
    `model_state` stay as they were, bit for bit. Only `step` and `skipped` go on, and the compressor's state, which
    counts the step and holds nothing of its gradient. Where parameters pass by all compressors, their updates must be
    finite too. A loss that is not finite beside a finite gradient does not make a step bad. With `overlap="next_step"`
    the bad step is the one after, whose update is made of the gradient that is not finite. A worker's `model_state`
    also stays as it was when one of its entries would stop being finite.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, the mean over the leading axis of the batch's leaves. If `init` got a
        `key`, it is called with `key=` too. If `init` got a `model_state`, it is called with `model_state=` and returns
        `(loss, model_state)`. With `moments` it sees one sample at a time, as a batch of size 1 with its own key.
      tx: any optax chain. Its compressor must name the same axis (or some of the axes). Transforms with state that
        stand before the compressor need `gcjax.local_transform`. Transforms that ask for `value`, such as
        `optax.contrib.reduce_on_plateau`, get the mean of the workers' losses; only then is it computed.
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
      has_aux: whether `loss_fn` returns more, as its last result: `(loss, aux)`, or `(loss, model_state, aux)`. It
        comes back in `Metrics.aux`; over samples and parts it is put together as in `gcjax.value_and_moments`.
      trainable: which parameters are trained: booleans in a pytree like `params` or a prefix, or a function from
        `params` to these; None for all. The others are frozen: they have no gradient and no squares, are not sent, and
        `tx` sees `optax.MaskedNode` in their place. They may have any dtype.
      max_skipped: number of bad steps in a row after which `step` raises, up to 7 steps late: so as not to wait for the
        devices, each call looks at the result of 8 calls ago. It cannot raise inside `jax.jit`.
      checks: whether to look for mistakes. The first call looks at losses of two samples, together and alone, to see
        that `loss_fn` is their mean (a sum under reduction="sum"). That takes one forward pass and its compilation, and
        finds sums, and with `moments` also BatchNorm without `sample_axis` and weighted means. It does not look inside
        `jax.jit`, with `microbatches`, with less than two samples per worker, and where `loss_fn` cannot take two
        samples. The call after 100 steps runs `gcjax.check_training`.

    Returns:
      `step` with `step.init(params, *, model_state=None, key=None) -> TrainState`,
      `step(state, batch) -> (state, Metrics)` and `step.lower(state, batch)` as for a jitted function, of arrays or
      `jax.ShapeDtypeStruct`s. `batch` is a pytree of global arrays, their leading axes split over the workers. The
      state passed in is donated.

    Raises:
      ValueError: the mesh lacks an axis; `accumulate` or `max_skipped` is below 1; a dimension of a parameter is
        sharded over axes of both sorts; (from `init`) a compressor without axis; `trainable` is no prefix of the
        parameters, or freezes them all; (when called) a batch cannot be split evenly; `loss_fn` is not the mean of its
        samples, or averages over the workers itself; an update or state of the optimiser would differ between workers;
        the state is not of this mesh.
      TypeError: `accumulate` or `max_skipped` is not an int, a flag is no boolean; (from `init`) a parameter is no
        array, or is to be trained and not of a floating-point dtype; (when called) a leaf of the batch is no array, the
        state is no `TrainState`, `loss_fn` returns something else, `tx` asks for what a training step does not have.
      FloatingPointError: (when called, before the state is donated) too many bad steps in a row.
      RuntimeError: (when called, on all processes) the processes would not run the same step from the same state; see
        `gcjax.check_agreement`.

    Example:
      >>> import gcjax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.5))
      >>> step = gcjax.make_train_step(lambda w, x: jnp.mean((x - w) ** 2), tx, mesh, moments=None)
      >>> state, metrics = step(step.init(jnp.zeros(())), jnp.array([2.0, 4.0]))
      >>> print(state.params, metrics.loss, metrics.skipped)
      3.0 [10.] 0
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    check_flag("has_aux", has_aux)
    check_flag("checks", checks)
    check_integer("max_skipped", max_skipped, 1)
    param_specs = PartitionSpec() if param_specs is None else param_specs
    for spec in jax.tree.leaves(param_specs):
        check_spec(spec, mesh, axes)
    return TrainStep(
        loss_fn,
        optax.with_extra_args_support(tx),
        mesh,
        axes,
        moments,
        accumulate,
        param_specs,
        has_aux=has_aux,
        trainable=trainable,
        max_skipped=max_skipped,
        checks=checks,
    )


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
        *,
        has_aux: bool = False,
        trainable: PyTree = None,
        max_skipped: int | None = None,  # None: bad steps are not skipped
        checks: bool = False,
    ) -> None:
        self._loss, self._moments = uniform_loss(loss_fn, has_aux), moments
        self._gradient = accumulated(batch_gradient(self._loss, moments, has_aux, axes), accumulate, axes)
        self._split = split_by(trainable)
        self._tx, self._mesh, self._axes = of_trained(tx, self._split), mesh, axes
        self._accumulate, self._param_specs = accumulate, param_specs
        specs = [sharded_dimensions(spec, tuple(mesh.shape)) for spec in jax.tree.leaves(param_specs)]
        self._sharding = {name for dimensions in specs for _, names in dimensions for name in names}
        self._gathered = tuple(axis for axis in axes if axis in self._sharding)
        self._workers = math.prod(mesh.shape[axis] for axis in axes)
        self._skips_bad = max_skipped is not None
        self._jitted = jax.jit(self._global_step, donate_argnums=0)
        self._checks = CallChecks(mesh, max_skipped, self._check_loss if checks else None, self._jitted.lower)

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh. The arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        check_params(params, self._split(params)[0])
        own_state = None if model_state is None else PerWorker.pack(model_state, self._axes)
        if not self._sharding:
            state = TrainState(jnp.int32(0), params, self._tx.init(params), own_state, key)
            check_compressors(state.opt_state, self._axes)
            return distribute(state, self._mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._param_specs)
        params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(params)
        opt_state = init_sharded(self._tx, params, self._mesh, self._param_specs)
        check_compressors(opt_state, self._axes)
        rest = distribute(TrainState(jnp.int32(0), (), (), own_state, key), self._mesh)
        return rest._replace(params=params, opt_state=opt_state)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One step. Donates `state`."""
        self._check_arguments(state, batch)
        self._checks.before(state, batch)
        state, metrics = self._jitted(state, batch)
        self._checks.after(metrics.skipped)
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
        loss, grad, squares, model_state, aux = self._gradient(own, inputs)
        grad, squares = self._own_shards(grad, squares)
        params, frozen = self._split(state.params)
        update = functools.partial(
            update_with, self._tx, grad, params=params, squares=squares, value=functools.partial(self._value, loss)
        )
        skipped = state.skipped
        if not self._skips_bad:
            updates, opt_state = update(state.opt_state)
            new_params = optax.apply_updates(params, updates)
        else:
            updates, opt_state, bad = skipping_bad(update, state.opt_state)
            new_params = where_good(bad, params, optax.apply_updates(params, updates))
            # With overlap="next_step" the compressor reports a bad gradient in the step after.
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

    def _loss_arguments(self, state: TrainState, batch: PyTree) -> tuple[PyTree, Inputs]:
        """The parameters to train, whole and typed as the worker's own, and what else its loss depends on."""
        key = None
        if state.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), worker_index(self._axes))
        model_state = None if state.model_state is None else state.model_state.unpack()
        trained, frozen = self._split(gather_shards(state.params, self._param_specs, self._gathered))
        return as_local(trained, self._axes), Inputs(batch, key, model_state, frozen)

    def _value(self, loss: Array) -> Array:
        """What transforms get as `value`."""
        return dense_mean(loss, self._axes)

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
        check_batch(batch, self._workers, self._accumulate)

    def _check_loss(self, state: TrainState, batch: PyTree) -> None:
        """Check that the loss is a mean over samples, on all processes alike."""
        over_workers = PartitionSpec(self._axes)

        def local(state, batch):
            return losses_to_compare(self._loss, self._moments, *self._loss_arguments(state, batch))[None]

        def compare(state, batch):
            return self._on_devices(local, state, batch, over_workers)

        everywhere = NamedSharding(self._mesh, PartitionSpec())
        try:
            lowered = jax.jit(compare, out_shardings=everywhere).lower(state, batch)
        except Exception:  # the user's loss may raise anything where it takes no two samples
            return
        check_losses(np.asarray(lowered.compile()(state, batch)), self._moments, self._split(state.params)[0])
