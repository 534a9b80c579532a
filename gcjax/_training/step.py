"""The data-parallel training step."""

import math
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
from gcjax._jax_compat import constrain, zeros
from gcjax._kernels.buckets import path_name
from gcjax._moments import value_and_moments
from gcjax._training.consistency import check_agreement
from gcjax._training.sharding import as_local, init_sharded, place, state_specs
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_number, check_random_key


class TrainState(NamedTuple):
    """State of data-parallel training on a mesh.

    step: int32, steps done.  params: replicated, or sharded by `param_specs`.
    opt_state: of the optax chain, per worker in part.
    model_state: PerWorker or None, what the model changes but does not train, such as BatchNorm statistics; each
      worker has its own, as in the paper. To evaluate, average `model_state.stacked()` over axis 0.
    key: random key or None.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PerWorker | None
    key: Array | None


class Metrics(NamedTuple):
    """loss: float32[workers], each worker's own; not averaged, because no collective is spent on reporting."""

    loss: Array


def make_train_step(
    loss_fn,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    moments=value_and_moments,
    accumulate: int = 1,
    param_specs: PyTree = None,
) -> "TrainStep":
    """A data-parallel training step: `jax.jit` of `jax.shard_map` over `mesh`, the state donated.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, the mean over the leading axis of the batch's leaves. When `init` was
        given a `key` it is called with `key=` too; when it was given a `model_state`, with `model_state=`, and returns
        `(loss, model_state)`. With `moments` it sees one sample at a time, as a batch of size 1 with a key of its own.
      tx: any optax chain; its compressor must name the same axis (or a part of the axes). Transforms with state that
        stand before the compressor need `gcjax.per_worker`.
      mesh: the devices.
      axis_name: axis or axes over which the batch is split.
      moments: `gcjax.value_and_moments`, or a `functools.partial` of it with options; its sum of squares is passed to
        `tx.update`. None for methods that do not use it: the gradient then comes from `jax.value_and_grad`.
      accumulate: number of parts into which each worker's batch is split, their gradients added up one after the other.
      param_specs: how parameters are sharded, `PartitionSpec`s in a pytree like `params` or a prefix; None if not.
        Over an axis of `axis_name` (FSDP): the loss sees whole parameters, gathered; gradient and squares are averaged
        over that axis by a reduce-scatter, and the compressor names the other axes. Over any other axis (tensor
        parallelism): the loss sees the shards and calls the collectives itself, and `moments` is best None. Each shard
        is compressed where it lives, with state of its own.

    Returns:
      `step` with `step.init(params, *, model_state=None, key=None) -> TrainState`,
      `step(state, batch) -> (state, Metrics)` and `step.lower(state, batch)` as for a jitted function. `batch` is a
      pytree of global arrays, their leading axes split over the workers. The state that is passed in is used up.

    Raises:
      ValueError: an axis that the mesh lacks; a dimension of a parameter sharded over axes of both sorts; a batch that
        cannot be split evenly (when called).
      RuntimeError (when called, on all processes): several processes that would not run the same step from the same
        state; see `gcjax.check_agreement`.
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    param_specs = PartitionSpec() if param_specs is None else param_specs
    for spec in jax.tree.leaves(param_specs):
        _check_spec(spec, mesh, axes)
    return TrainStep(loss_fn, optax.with_extra_args_support(tx), mesh, axes, moments, accumulate, param_specs)


def checked_axes(mesh: jax.sharding.Mesh, axis_name: AxisNames, accumulate: int) -> tuple[str, ...]:
    """The worker axes of a training step. Raises ValueError unless the mesh has them and `accumulate` is at least 1."""
    axes = axis_tuple(axis_name)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(f"axis_name={axis_name!r} must name axes of the mesh, which has {tuple(mesh.shape)}")
    check_number("accumulate", accumulate, 1, low_included=True)
    return axes


def _check_spec(spec: PartitionSpec, mesh, axes: tuple[str, ...]) -> None:
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
    """What `make_train_step` returns; see there."""

    def __init__(self, loss_fn, tx, mesh, axes, moments, accumulate, param_specs):
        self._loss_fn, self._tx, self._mesh, self._axes = loss_fn, tx, mesh, axes
        self._moments, self._accumulate, self._param_specs = moments, accumulate, param_specs
        specs = [sharded_dimensions(spec, tuple(mesh.shape)) for spec in jax.tree.leaves(param_specs)]
        self._sharding = {name for dimensions in specs for _, names in dimensions for name in names}
        self._gathered = tuple(axis for axis in axes if axis in self._sharding)
        self._workers = math.prod(mesh.shape[axis] for axis in axes)
        self._jitted = jax.jit(self._global_step, donate_argnums=0)
        self._agreed: set = set()  # shapes with which all processes were found to run the same program
        # CPU devices of one process share a thread pool. With several steps in flight their collectives can take all of
        # its threads while some device has not begun, and wait for ever: so there, one step at a time.
        self._one_pool = mesh.local_mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh; the arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        held = None if model_state is None else PerWorker.pack(model_state, self._axes)
        if not self._sharding:
            return place(TrainState(jnp.int32(0), params, self._tx.init(params), held, key), self._mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._param_specs)
        params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(params)
        opt_state = init_sharded(self._tx, params, self._mesh, self._param_specs)
        return place(TrainState(jnp.int32(0), (), (), held, key), self._mesh)._replace(
            params=params, opt_state=opt_state
        )

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        self._check_batch(batch)
        if jax.process_count() > 1:
            self._check_agreement(state, batch)
        if self._one_pool:
            jax.block_until_ready((state, batch))  # the batch too: it may be the output of another program
        return self._jitted(state, batch)

    def lower(self, state: TrainState, batch: PyTree):
        """`jax.jit(...).lower`, for the compiled program and its cost."""
        self._check_batch(batch)
        return self._jitted.lower(state, batch)

    def _check_batch(self, batch) -> None:
        parts = self._workers * self._accumulate
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if not leaf.ndim or leaf.shape[0] == 0 or leaf.shape[0] % parts:
                raise ValueError(
                    f"batch leaf {path_name(path)} has shape {leaf.shape}; its leading axis must be a positive "
                    f"multiple of {parts} = {self._workers} workers * accumulate={self._accumulate}"
                )

    def _check_agreement(self, state, batch) -> None:
        """Before anything runs: whether all processes run the same program, and start from the same state."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        seen = (jax.tree.structure((state, shapes)), *jax.tree.leaves(shapes))
        if seen not in self._agreed:
            start = {} if self._agreed else {"state": state}
            # The call that follows uses this trace and lowering again.
            check_agreement(self._mesh, batch=shapes, **start, program=self._jitted.lower(state, batch))
            self._agreed.add(seen)

    def _global_step(self, state: TrainState, batch):
        over_workers = PartitionSpec(self._axes)
        specs = state_specs(state, state.params, self._param_specs)
        batch = constrain(batch, NamedSharding(self._mesh, over_workers))
        run = jax.shard_map(
            self._local_step, mesh=self._mesh, in_specs=(specs, over_workers), out_specs=(specs, over_workers)
        )
        return run(state, batch)

    def _local_step(self, state: TrainState, batch):
        model_state = None if state.model_state is None else state.model_state.unpack()
        key = None
        if state.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), worker_index(self._axes))
        params = as_local(gather_shards(state.params, self._param_specs, self._gathered), self._axes)
        loss, grad, squares, model_state = self._accumulated(params, batch, model_state, key)
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

    def _own_shards(self, grad, squares):
        """The mean over the axes over which parameters were gathered; there each sample counts 1 / size."""
        if not self._gathered:
            return grad, squares
        grad = scatter_mean(grad, self._param_specs, self._gathered)
        if squares is not None:
            mean = scatter_mean(squares, self._param_specs, self._gathered)
            squares = jax.tree.map(lambda s: s / axis_size(self._gathered), mean)
        return grad, squares

    def _accumulated(self, params, batch, model_state, key):
        """Loss, gradient, squares and model state of this worker's batch, part after part."""
        if self._accumulate == 1:
            return self._gradients(params, batch, model_state, key)
        parts = self._accumulate
        batch = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
        keys = None if key is None else jax.random.split(key, parts)

        def add(carry, part):
            sums, model_state = carry
            loss, grad, squares, model_state = self._gradients(params, part[0], model_state, part[1])
            return (jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, (loss, grad, squares)), model_state), None

        shapes = jax.eval_shape(self._gradients, params, jax.tree.map(lambda x: x[0], batch), model_state, key)[:3]

        def begin(tree):
            return jax.tree.map(lambda s, p: zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32), p), tree, params)

        loss, grad, squares = shapes
        sums = as_local(jnp.float32(0), self._axes), begin(grad), None if squares is None else begin(squares)
        carry = (sums, model_state)
        ((loss, grad, squares), model_state), _ = jax.lax.scan(add, carry, (batch, keys))
        grad = jax.tree.map(lambda g, s: (g / parts).astype(s.dtype), grad, shapes[1])
        # Each sample counts 1 / (parts * part size), so its square falls by parts**2.
        squares = jax.tree.map(lambda s: s / parts**2, squares)
        return loss / parts, grad, squares, model_state

    def _gradients(self, params, batch, model_state, key):
        has_state = model_state is not None

        def loss_fn(params, inputs):
            batch, keys, model_state = inputs
            extra: dict[str, Any] = {} if keys is None else {"key": keys if self._moments is None else keys[0]}
            if has_state:
                extra["model_state"] = model_state
            return self._loss_fn(params, batch, **extra)

        if self._moments is None:
            out, grad = jax.value_and_grad(loss_fn, has_aux=has_state)(params, (batch, key, model_state))
            squares = None
        else:
            size = jax.tree.leaves(batch)[0].shape[0]
            keys = None if key is None else jax.random.split(key, size)
            run = self._moments(loss_fn, has_aux=has_state, in_axes=(0, 0, None))
            out, (grad, squares) = run(params, (batch, keys, model_state))
        loss, model_state = out if has_state else (out, None)
        return loss.astype(jnp.float32), grad, squares, model_state
