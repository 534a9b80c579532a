"""`make_train_step`: the arguments of a training step, described and checked."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from gcjax._training.checks import check_dimensions, check_no_further_axes, checked_axes, checked_specs
from gcjax._training.gradients import check_moments_option
from gcjax._training.step import TrainStep
from gcjax._types import AxisNames, PyTree
from gcjax._validation import check_flag, check_integer, check_transform


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    moments: Callable[..., Any] | str | None = "auto",
    accumulate: int = 1,
    param_specs: PyTree = None,
    has_aux: bool = False,
    trainable: PyTree | Callable[[PyTree], PyTree] = None,
    max_skipped: int = 10,
    checks: bool = True,
    check_vma: bool = True,
) -> TrainStep:
    """A data-parallel training step: `jax.jit` of `jax.shard_map` over `mesh`, the state donated.

    A bad step, in which the gradient of some worker is not finite, is skipped whole, bit for bit: only `step`,
    `skipped` and the compressor's count of skipped steps advance. With a transform of `gcjax.gossip` at the end of `tx`
    every worker has parameters of its own (`TrainState.params` is a `PerWorker`), skips its own bad updates, and still
    exchanges. A worker's `model_state` also stays if one of its entries would become non-finite.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, the mean over the leading axis of the batch's leaves. It gets `key=`
        and `model_state=` if `init` got them, and then returns `(loss, model_state)`. Where squares are computed it
        sees one sample at a time, as a batch of size 1 with its own key.
      tx: an optax chain. Its compressor or gossip transform names some of the axes of `axis_name`. Inside a worker of
        gossip, along the other axes, the step averages gradients. A transform that asks for `value` gets the mean of
        the losses of the workers with the same parameters.
      mesh: the devices.
      axis_name: axis or axes over which the batch is split.
      moments: "auto" computes squares of per-sample gradients if a compressor in `tx` reads them, by
        `gcjax.value_and_moments(groups="auto")`: where a loop over samples makes them, an estimate from 4 to 8 groups.
        `gcjax.value_and_moments` (exact), or a `functools.partial` of it, always; None never.
      accumulate: parts into which each worker's batch is split, one after the other; their gradients are averaged.
      param_specs: `PartitionSpec`s of the parameters, or a prefix; None if they are not sharded. Over an axis of
        `axis_name` (FSDP) the loss sees whole parameters, gathered, and a reduce-scatter averages gradient and squares;
        over another axis (tensor parallelism) it sees shards and calls the collectives itself. Each shard is compressed
        where it lives. What stands after the compressor in `tx` sees whole arrays.
      has_aux: whether `loss_fn` returns one thing more, as its last result. It comes back in `Metrics.aux`.
      trainable: booleans in a pytree like `params` or a prefix, or a function from `params` to these; None for all.
        The other parameters are frozen: `tx` sees None in their place.
      max_skipped: number of bad steps in a row after which `step` raises, up to 7 steps late; not inside `jax.jit`.
      checks: whether the first call looks for losses that are no mean of their samples, and the call after 100 steps
        runs `gcjax.check_training`. The first is silent inside `jax.jit`, with `microbatches`, with squares of one
        sample per worker, where `loss_fn` takes no 8 samples, and where rounding errors may explain the difference.
      check_vma: False for a loss that `jax.shard_map` takes only so, as with Pallas kernels. A loss that sums over the
        workers itself is then no longer found.

    Returns:
      `step` with `step.init(params, *, model_state=None, key=None) -> TrainState`,
      `step(state, batch) -> (state, Metrics)` and `step.lower(state, batch)` of arrays or `jax.ShapeDtypeStruct`s.
      `batch` is a pytree of global arrays, their leading axes split over the workers; on several processes made by
      `jax.make_array_from_process_local_data`.

    Raises:
      ValueError, TypeError: an argument is out of range or of another kind; (from `init`) the chain cannot work, as one
        with two compressors; (when called) batch, state or what `loss_fn` returns does not fit, an update would
        differ between workers, or a check found a mistake. The message names the cure.
      FloatingPointError: (when called, before the state is donated) too many bad steps in a row.
      RuntimeError: (when called) the state was donated before; (on all processes) the processes would not run the same
        step from the same state, see `gcjax.check_agreement`.

    Example:
      >>> import gcjax, jax, optax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.5))
      >>> step = gcjax.make_train_step(lambda w, x: jnp.mean((x - w) ** 2), tx, mesh)
      >>> state, metrics = step(step.init(jnp.zeros(())), jnp.array([2.0, 4.0]))
      >>> print(state.params, metrics.loss, metrics.grad_norm, metrics.skipped)
      3.0 [10.] 6.0 0
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    check_transform("tx", tx)
    check_moments_option(moments)
    check_flag("has_aux", has_aux)
    check_flag("checks", checks)
    check_flag("check_vma", check_vma)
    check_integer("max_skipped", max_skipped, 1)
    param_specs = PartitionSpec() if param_specs is None else param_specs
    for spec in checked_specs(param_specs, mesh):
        check_dimensions(spec, mesh, axes)
    if not check_vma:
        check_no_further_axes(mesh, axes)
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
        check_vma=check_vma,
    )
