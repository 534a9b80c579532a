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

    A bad step, in which the gradient of some worker is not finite, is skipped whole: parameters, optimiser and
    `model_state` stay as they were, bit for bit. Only `step`, `skipped` and the compressor's count of steps advance.
    Updates of parameters that no compressor handles must be finite too. A loss that is not finite does not make a step
    bad if the gradient is finite. A worker's `model_state` also stays as it was if one of its entries would become
    non-finite.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, the mean over the leading axis of the batch's leaves. If `init` got a
        `key`, it is called with `key=` too. If `init` got a `model_state`, it is called with `model_state=` and returns
        `(loss, model_state)`. Where squares are computed (see `moments`) it sees one sample at a time, as a batch of
        size 1 with its own key.
      tx: any optax chain. Its compressor must name the same axis (or some of the axes). Transforms with state before
        the compressor need `gcjax.local_transform`. Transforms that ask for `value`, such as
        `optax.contrib.reduce_on_plateau`, get the mean of the workers' losses; only then is it computed.
      mesh: the devices.
      axis_name: axis or axes over which the batch is split.
      moments: "auto" computes squares of per-sample gradients with `gcjax.value_and_moments` if a compressor in `tx`
        reads them, as `gcjax.variance_compress` does; without one, the gradient comes from `jax.value_and_grad`.
        `gcjax.value_and_moments`, or a `functools.partial` of it with options, always computes them. None never does.
      accumulate: number of parts into which each worker's batch is split. Their gradients are computed one after the
        other and averaged (added up under reduction="sum").
      param_specs: how parameters are sharded, `PartitionSpec`s in a pytree like `params` or a prefix; None if they are
        not. Over an axis of `axis_name` (FSDP): the loss sees whole parameters, gathered; gradient and squares are
        averaged over that axis by a reduce-scatter, and the compressor names the other axes. Over any other axis
        (tensor parallelism): the loss sees the shards and calls the collectives itself; take a method without squares.
        Each shard is compressed where it lives and has its own state.
      has_aux: whether `loss_fn` returns more, as its last result: `(loss, aux)`, or `(loss, model_state, aux)`. It
        comes back in `Metrics.aux`; over samples and parts it is put together as in `gcjax.value_and_moments`.
      trainable: which parameters are trained: booleans in a pytree like `params` or a prefix, or a function from
        `params` to these; None for all. The others are frozen: they have no gradient and no squares, are not sent, and
        `tx` sees None in their place. They may have any dtype.
      max_skipped: number of bad steps in a row after which `step` raises, up to 7 steps late: each call looks at the
        result of 8 calls ago, so as not to wait for the devices. It cannot raise inside `jax.jit`.
      checks: whether to look for mistakes. Where squares are computed, the first call compares the gradient of up to 8
        samples of each worker, as one batch, with the mean (sum under reduction="sum") of their own gradients. That
        finds sums, BatchNorm without `sample_axis` and weighted means. Elsewhere it compares a batch with the same
        batch twice, and finds sums. It is silent where rounding errors may explain the difference, or where the
        gradients of half of the parameters agree. It takes the time of a few steps of 8 samples, the memory of one with
        squares, and their compilation. It does not look inside `jax.jit`, with `microbatches`, with squares of one
        sample per worker, and where `loss_fn` cannot take so few samples. The call after 100 steps runs
        `gcjax.check_training`. Where parameters are sharded, transforms that mix them, such as
        `optax.clip_by_global_norm`, are found; not those that look at one parameter as a whole, as LAMB does: they see
        a shard.
      check_vma: False for a loss that `jax.shard_map` takes only with its check_vma=False, as with Pallas kernels. JAX
        then does not track while the loss runs which values differ between workers; gradient, squares and updates are
        the same. One check is lost: a loss that sums over the workers itself is no longer found.

    Returns:
      `step` with `step.init(params, *, model_state=None, key=None) -> TrainState`,
      `step(state, batch) -> (state, Metrics)` and `step.lower(state, batch)` as for a jitted function, of arrays or
      `jax.ShapeDtypeStruct`s. `batch` is a pytree of global arrays, their leading axes split over the workers. With
      a mesh of several processes they must be on it: `jax.make_array_from_process_local_data` takes the rows of each.
      The state passed in is donated.

    Raises:
      ValueError: the mesh lacks an axis, or with `check_vma=False` has others than `axis_name`; `accumulate` or
        `max_skipped` is below 1; a dimension of a parameter is sharded over axes of both sorts; (from `init`) a
        compressor without axis, or two in one chain; `trainable` is no prefix of the parameters, or freezes them all;
        (when called) a batch cannot be split evenly, or lies on one process of several; `loss_fn` is not the mean of
        its samples, or averages over the workers itself; an update or state of the optimiser would differ between
        workers; a transform mixes shards of different parameters; the state is not of this mesh, or was restored from a
        checkpoint of other options.
      TypeError: `tx` is not a transform, `accumulate` or `max_skipped` is not an int, a flag is no boolean, `moments`
        or a leaf of `param_specs` is something else; (from `init`) a parameter is no array, or is to be trained and not
        of a floating-point dtype; (when called) a leaf of the batch is no array, the state is no `TrainState`,
        `loss_fn` returns something else, `tx` needs an argument that a step does not have.
      FloatingPointError: (when called, before the state is donated) too many bad steps in a row.
      RuntimeError: (when called) the state was donated to an earlier step; (on all processes) the processes
        would not run the same step from the same state; see `gcjax.check_agreement`.

    Example:
      >>> import gcjax, jax, optax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.5))
      >>> step = gcjax.make_train_step(lambda w, x: jnp.mean((x - w) ** 2), tx, mesh)
      >>> state, metrics = step(step.init(jnp.zeros(())), jnp.array([2.0, 4.0]))
      >>> print(state.params, metrics.loss, metrics.skipped)
      3.0 [10.] 0
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
