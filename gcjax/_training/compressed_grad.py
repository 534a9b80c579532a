"""Loss and compressed gradient of global arrays, for training steps that leave the partitioning to `jax.jit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gcjax._comm.collectives import axis_tuple, dense_mean, sharded_dimensions, worker_index
from gcjax._core.state import compress_states
from gcjax._jax_compat import constrain, varying_axes, without_mesh_types
from gcjax._kernels.layout import check_is_array, path_name
from gcjax._moments.aux import check_samples_lead
from gcjax._training.call_checks import check_batch, check_state
from gcjax._training.chain_check import reject_optimiser, reject_two_compressors
from gcjax._training.checks import checked_axes, checked_specs
from gcjax._training.gradients import (
    GradientFn,
    Inputs,
    batch_gradient,
    check_moments_option,
    moments_for,
    uniform_loss,
)
from gcjax._training.local import as_local
from gcjax._training.optimiser import Compressed, compress_shards, per_worker_specs, update_whole, update_with
from gcjax._training.sharding import distribute, init_sharded, is_spec, sharding_axes, state_specs
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_flag, check_random_key, check_transform


def compressed_value_and_grad(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    has_aux: bool = False,
    moments: Callable[..., Any] | str | None = "auto",
    param_specs: PyTree = None,
    check_vma: bool = True,
) -> "CompressedGrad":
    """`jax.value_and_grad` of global arrays, the gradient compressed where it crosses `axis_name`.

    For a step under plain `jax.jit` with a sharded batch, where `jax.grad` all-reduces densely before an optimiser sees
    the gradient. This computes each worker's gradient separately and returns the mean that `tx` makes of them. The
    optimiser and the rest of the step stay as they are:

        value_and_grad = gcjax.compressed_value_and_grad(loss_fn, gcjax.variance_compress(axis_name="data"), mesh)
        compression = value_and_grad.init(params)

        @jax.jit
        def train_step(params, opt_state, compression, batch):
            loss, grads, compression = value_and_grad(params, compression, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, compression, loss

    Only `axis_name` is manual (`jax.shard_map`) while the loss runs; all other axes, Auto or Explicit, are left to JAX:
    parameters, activations and the batch may be sharded over them (FSDP). With JAX 0.10.2 XLA aborts ("Check failed:
    partition_group_list") on embedding look-ups where two further automatic axes shard both the table and the batch;
    then shard the batch over `axis_name` only. The mean of the workers' losses is that of the batch only if each
    worker's part has the same weight, unlike means over unmasked tokens.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, or `(loss, aux)` with `has_aux`: the mean over one worker's part of the
        batch, or with squares over one sample. What it closes over is the same on all workers.
      tx: a compressor that names `axis_name`, before it at most transforms of each worker's own gradient
        (`gcjax.local_transform`), after it at most clipping and the like; not the optimiser.
      mesh: the devices.
      axis_name: axis or axes of the workers, with the compressor's `inner_axis_name`.
      has_aux: whether the loss returns auxiliary output. Leaves whose leading axis is the batch come back as global
        arrays, sharded like it. Other floating leaves are averaged over the workers by a dense all-reduce.
      moments: as in `gcjax.make_train_step`.
      param_specs: as there, over axes that are not the workers'.
      check_vma: as there. Where it is False, an auxiliary leaf that is not floating and has no batch axis counts as
        differing between workers.

    Returns:
      `fn(params, state, batch, *, key=None) -> value, grads, state`, to be called under `jax.jit`; `value` is the loss,
      a float32 scalar, or `(loss, aux)`. `grads` are like the parameters, replicated or sharded by `param_specs`. With
      a `key` the loss gets `key=`, another one for each worker (and sample, with squares). `fn.init(params)` makes
      `state` on the mesh, sharded as `gcjax.state_specs` says: keep it in checkpoints.

    Raises:
      ValueError, TypeError: an argument is out of range or of another kind; (from `init`) `tx` turns the gradient
        around, as an optimiser does, or has two compressors; (from `fn`) batch, state, the sharding of the parameters
        or aux do not fit. The message names the cure.

    Example:
      >>> import gcjax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> fn = compressed_value_and_grad(lambda w, x: jnp.mean(x @ w), gcjax.dense_compress(axis_name="data"), mesh)
      >>> w, x = jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 2.0]])
      >>> loss, grad, state = jax.jit(fn)(w, fn.init(w), x)
      >>> print(loss, grad)
      3.0 [2. 1.]
    """
    check_transform("tx", tx)
    axes = checked_axes(mesh, axis_name, 1)
    param_specs = PartitionSpec() if param_specs is None else param_specs
    for spec in checked_specs(param_specs, mesh):
        _reject_worker_axes(spec, axes)
    check_moments_option(moments)
    check_flag("check_vma", check_vma)

    def gradient(state: PyTree) -> GradientFn:
        found = batch_gradient(uniform_loss(loss_fn, has_aux), moments_for(state, moments), has_aux, axes)
        return found if check_vma else functools.partial(without_mesh_types, found)

    return CompressedGrad(gradient, optax.with_extra_args_support(tx), mesh, axes, has_aux, param_specs)


def _reject_worker_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> None:
    if both := sorted({name for entry in spec for name in axis_tuple(entry)} & set(axes)):
        raise ValueError(
            f"param_specs has {spec}, which shards over {both}, an axis of the workers: all workers must have the same "
            "parameters. Leave the axis out of axis_name and of the compressor; the batch may stay sharded over it, "
            "and JAX averages over it densely"
        )


class CompressedGrad:
    """What `compressed_value_and_grad` returns."""

    def __init__(
        self,
        gradient: Callable[[PyTree], GradientFn],  # for a state of `tx`
        tx: optax.GradientTransformationExtraArgs,
        mesh: jax.sharding.Mesh,
        axes: tuple[str, ...],
        has_aux: bool,
        param_specs: PyTree,
    ) -> None:
        self._gradient, self._tx = gradient, tx
        self._mesh, self._axes, self._has_aux, self._param_specs = mesh, axes, has_aux, param_specs
        self._sharded = bool(sharding_axes(param_specs, mesh))

    def init(self, params: PyTree) -> PyTree:
        """The state of `tx` before the first step, on the mesh."""
        self._check_sharding(params)
        reject_two_compressors(self._tx, params)
        reject_optimiser(self._tx, params)
        if self._sharded:
            return init_sharded(self._tx, params, self._mesh, self._param_specs)
        return distribute(self._tx.init(params), self._mesh)

    def __call__(
        self, params: PyTree, state: PyTree, batch: PyTree, *, key: Array | None = None
    ) -> tuple[Any, PyTree, PyTree]:
        """Loss (and aux), compressed gradient and new state. Call it under `jax.jit`."""
        if key is not None:
            check_random_key("key", key)
        self._check_sharding(params)
        check_batch(batch, self._mesh, self._axes)
        check_state(state, self._mesh)
        split, whole = PartitionSpec(self._axes), PartitionSpec()
        local = jax.shard_map(
            functools.partial(self._local_gradient, self._gradient(state)),
            mesh=self._mesh,
            axis_names=set(self._axes),
            in_specs=(whole, split, whole),
            out_specs=(whole, split, split, whole),
        )
        loss, stacked, of_samples, averaged = local(params, jax.tree.map(self._split_over_workers, batch), key)
        grads, state = self._exchanged(stacked, state, params)
        if not self._has_aux:
            return loss, grads, state
        aux = jax.tree.map(lambda x, y: y if x is None else x, of_samples, averaged, is_leaf=lambda x: x is None)
        return (loss, aux), grads, state

    def _split_over_workers(self, x: Array) -> Array:
        """A leaf of the batch, which along explicit axes must be sharded before `jax.shard_map` takes it."""
        kinds = dict(zip(self._mesh.axis_names, self._mesh.axis_types, strict=True))
        if all(kinds[axis] != AxisType.Explicit for axis in self._axes):
            return x
        others = [
            [axis for axis in axis_tuple(entry) if axis not in self._axes] for entry in jax.typeof(x).sharding.spec
        ]
        return constrain(
            x, NamedSharding(self._mesh, PartitionSpec((*self._axes, *others[0]), *map(tuple, others[1:])))
        )

    def _local_gradient(
        self, gradient: GradientFn, params: PyTree, batch: PyTree, key: Array | None
    ) -> tuple[Array, tuple[PyTree, PyTree], PyTree, PyTree]:
        """One worker's loss, its (gradient, squares) with a leading axis of 1, and its aux in two trees."""
        params = as_local(params, self._axes)
        key = None if key is None else jax.random.fold_in(key, worker_index(self._axes))
        found = gradient(params, Inputs(batch, key))
        stacked = jax.tree.map(lambda x: x[None], (found.gradient, found.squares))
        of_samples = averaged = None
        if self._has_aux:
            has_batch = self._has_batch_axis(gradient, found.aux, params, batch, key)
            of_samples = jax.tree.map(lambda x, own: x if own else None, found.aux, has_batch)
            averaged = jax.tree_util.tree_map_with_path(
                lambda path, x, own: None if own else self._mean_over_workers(path, x), found.aux, has_batch
            )
        return dense_mean(found.loss, self._axes), stacked, of_samples, averaged

    def _exchanged(self, stacked: tuple[PyTree, PyTree], state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """What `tx` makes of all workers' gradients and squares, in a second shard_map, over all axes of the mesh."""
        param_specs = jax.tree.broadcast(self._param_specs, params, is_leaf=is_spec)
        stacked_specs = jax.tree.map(lambda spec: PartitionSpec(self._axes, *spec), param_specs, is_leaf=is_spec)
        specs = state_specs(state, params, param_specs)
        in_specs = (stacked_specs, None if stacked[1] is None else stacked_specs), specs, param_specs
        run = functools.partial(jax.shard_map, mesh=self._mesh, in_specs=in_specs)
        if not self._sharded:
            return run(self._update, out_specs=(param_specs, specs))(stacked, state, params)
        count = len(compress_states(state))
        out_specs: Any = Compressed([param_specs] * count, per_worker_specs(state), [PartitionSpec()] * count)
        compressed = run(self._update, out_specs=out_specs)(stacked, state, params)
        return update_whole(self._tx, compressed, state, params, self._mesh, (param_specs, specs))

    def _update(self, stacked: tuple[PyTree, PyTree], state: PyTree, params: PyTree) -> Any:
        """`compress_shards` or `update_with` of one device's gradient."""
        grad, squares = jax.tree.map(lambda x: x[0], stacked)
        extra = {} if squares is None else {"sum_grad_squared": squares}
        if self._sharded:
            return compress_shards(self._tx, grad, state, params, **extra)
        found = update_with(self._tx, grad, state, params, **extra)
        return found.updates, found.opt_state

    @staticmethod
    def _has_batch_axis(gradient: GradientFn, aux: PyTree, params: PyTree, batch: PyTree, key: Array | None) -> PyTree:
        """For each leaf of aux, whether its leading axis grows with the batch."""

        def longer(params, batch, key):
            return gradient(params, Inputs(jax.tree.map(lambda x: jnp.concatenate([x, x]), batch), key)).aux

        def grows(x, y):
            check_samples_lead(x.shape, y.shape)
            return x.shape != y.shape

        return jax.tree.map(grows, aux, jax.eval_shape(longer, params, batch, key))

    def _mean_over_workers(self, path: tuple, x: Array) -> Array:
        if not varying_axes(x) & set(self._axes):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"aux leaf {path_name(path)} is {x.dtype}{list(x.shape)} and differs between workers, but has no batch "
                "axis: return one value for each sample, or a mean of floating-point dtype"
            )
        return dense_mean(x, self._axes)

    def _check_sharding(self, params: PyTree) -> None:
        """Raise where parameters are seen to be sharded otherwise than said. Tracers show only explicit axes."""

        def check(path, x, spec):
            check_is_array(path, x)
            sharding = x.sharding if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else None
            sharding = jax.typeof(x).sharding if sharding is None else sharding
            if not isinstance(sharding, NamedSharding):
                return
            seen, said = (self._dimensions(s) for s in (sharding.spec, spec))
            if seen and seen != said:
                raise ValueError(
                    f"the parameter {path_name(path)} is sharded as {sharding.spec}, but param_specs says {spec} for "
                    "it: pass param_specs=jax.tree.map(lambda x: x.sharding.spec, params)"
                )

        specs = jax.tree.broadcast(self._param_specs, params, is_leaf=is_spec)
        jax.tree_util.tree_map_with_path(check, params, specs)

    def _dimensions(self, spec: PartitionSpec) -> list:
        """The dimensions that are really sharded, and over which axes."""
        return sharded_dimensions(spec, tuple(name for name, size in self._mesh.shape.items() if size > 1))
