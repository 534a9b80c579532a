"""Training with parameters that differ between workers: the step, placement on a mesh, mean and consensus distance."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gcjax._comm.collectives import axis_tuple
from gcjax._core.per_worker import PerWorker
from gcjax._training.checks import check_compressors, check_model_state, check_params, checked_axes
from gcjax._training.sharding import distribute
from gcjax._training.step import Metrics, TrainState, TrainStep
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_random_key, check_transform
from gcjax.gossip._state import check_chain, find_gossip_state, pack_leaves, unpack_leaves


def make_train_step(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    accumulate: int = 1,
) -> "GossipStep":
    """A training step in which every worker has its own parameters: `jax.jit` of `jax.shard_map`, the state donated.

    Args:
      loss_fn: as in `gcjax.make_train_step`.
      tx: an optax chain that ends with a transform of `gcjax.gossip` over the same axis. All other state in it becomes
        per worker by itself.
      mesh: the devices.
      axis_name: axis or axes over which the batch is split.
      accumulate: as in `gcjax.make_train_step`.

    Returns:
      `step` as of `gcjax.make_train_step`: `step.init(params)` gives all workers the same parameters, and
      `state.params` is a `PerWorker`. `mean_params(state.params)` is the model to evaluate.

    Raises:
      ValueError: as `gcjax.make_train_step`; (from `init`) a chain without a gossip transform, with one over other
        axes, with another transform after it, with `optax.apply_if_finite` or `optax.MultiSteps` around it, or with a
        compressor over the same axes beside it.
      TypeError, RuntimeError: as `gcjax.make_train_step`.

    >>> import gcjax, jax, jax.numpy as jnp, optax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> tx = optax.chain(optax.sgd(0.5), gcjax.gossip.local_sgd(2, axis_name="data"))
    >>> step = gcjax.gossip.make_train_step(lambda w, x: jnp.mean((x - w) ** 2), tx, mesh)
    >>> state, metrics = step(step.init(jnp.zeros(())), jnp.array([2.0, 4.0]))
    >>> print(gcjax.gossip.mean_params(state.params), metrics.loss)
    3.0 [10.]
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    check_transform("tx", tx)
    return GossipStep(loss_fn, optax.with_extra_args_support(tx), mesh, axes, None, accumulate, PartitionSpec())


class GossipStep(TrainStep):
    """The return type of `make_train_step`."""

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh; the arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        check_params(params, params)
        check_model_state(model_state)
        opt_state = self._tx.init(params)
        gossip_axes = find_gossip_state(opt_state).traffic.axes
        if gossip_axes != self._axes:
            raise ValueError(
                f"the step's workers are along {self._axes}, but the gossip transform names {gossip_axes}; give it "
                "the same axis_name"
            )
        check_chain(opt_state)
        check_compressors(opt_state, self._axes)
        local = PerWorker.pack(params, self._axes)
        local_model_state = None if model_state is None else PerWorker.pack(model_state, self._axes)
        state = TrainState(jnp.int32(0), local, pack_leaves(opt_state, self._axes), local_model_state, key)
        return distribute(state, self._mesh)

    def _value(self, loss: Array) -> Array:
        return loss  # the optimisers are the workers' own, too

    def _local_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        local = state._replace(params=state.params.unpack(), opt_state=unpack_leaves(state.opt_state))
        new, metrics = super()._local_step(local, batch)
        params = PerWorker.pack(new.params, self._axes)
        return new._replace(params=params, opt_state=pack_leaves(new.opt_state, self._axes)), metrics


def worker_params(params: PyTree, mesh: jax.sharding.Mesh, axis_name: AxisNames) -> PyTree:
    """One copy of `params` for each worker: leaves (workers, *shape), sharded over the axes along the first dimension.

    For hand-written training loops: `in_specs=P(axis_name)`, and inside `jax.shard_map` every leaf is (1, *shape).

    >>> import gcjax, jax, jax.numpy as jnp
    >>> gcjax.gossip.worker_params(jnp.ones(3), jax.make_mesh((1,), ("data",)), "data").shape  # of one worker
    (1, 3)
    """
    one_each = jax.tree.map(lambda x: jnp.asarray(x)[None], params)
    return distribute(PerWorker.pack(one_each, axis_tuple(axis_name)), mesh).value


def mean_params(params: PyTree, weights: ArrayLike | None = None) -> PyTree:
    """The mean over the workers, the model to evaluate.

    Args:
      params: `TrainState.params`, or leaves (workers, *shape).
      weights: float[workers], those of `sgp` from `gcjax.gossip.info`; None for equal weights.

    Returns:
      Leaves (*shape) of the same dtypes.

    Raises:
      ValueError: weights of another number of workers.

    >>> import gcjax, jax.numpy as jnp
    >>> print(gcjax.gossip.mean_params({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])})["w"])  # of two workers
    [2. 4.]
    """
    return _mean(_stacked(params), None if weights is None else jnp.asarray(weights, jnp.float32))


class ConsensusDistance(NamedTuple):
    """How far the workers' models are from their mean.

    Attributes:
      distance: sqrt(mean over workers of |x_i - mean|^2), over all parameters.
      relative: `distance` divided by the norm of the mean.
    """

    distance: float
    relative: float


def consensus_distance(params: PyTree) -> ConsensusDistance:
    """How far the workers' models are from their mean.

    Args:
      params: `TrainState.params`, or leaves (workers, *shape).

    >>> import gcjax, jax.numpy as jnp
    >>> print(gcjax.gossip.consensus_distance({"w": jnp.array([[1.0], [3.0]])}))
    ConsensusDistance(distance=1.0, relative=0.5)
    """
    distance, norm = map(float, _distance_and_norm(_stacked(params)))
    return ConsensusDistance(distance, distance / norm if norm else float("inf") if distance else 0.0)


def _stacked(params: PyTree) -> PyTree:
    return params.stacked() if isinstance(params, PerWorker) else params


@jax.jit
def _mean(stacked: PyTree, weights: Array | None) -> PyTree:
    def mean(x):
        if weights is not None and weights.shape != x.shape[:1]:
            raise ValueError(
                f"weights has shape {weights.shape}, but the parameters are those of {len(x)} workers; give the "
                "weights of gcjax.gossip.info(state.opt_state)"
            )
        return jnp.average(x.astype(jnp.float32), axis=0, weights=weights).astype(x.dtype)

    return jax.tree.map(mean, stacked)


@jax.jit
def _distance_and_norm(stacked: PyTree) -> tuple[Array, Array]:
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(stacked)]
    means = [jnp.mean(x, axis=0) for x in leaves]
    square = sum(jnp.sum((x - m) ** 2) / len(x) for x, m in zip(leaves, means, strict=True))
    return jnp.sqrt(square), jnp.sqrt(sum(jnp.sum(m**2) for m in means))
