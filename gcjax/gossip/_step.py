"""Training with parameters that differ between workers: the step, their place on a mesh, their mean and spread."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gcjax._comm.collectives import axis_tuple
from gcjax._core.per_worker import PerWorker
from gcjax._training.sharding import place
from gcjax._training.step import TrainState, TrainStep, checked_axes
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_random_key
from gcjax.gossip._state import hold, release, the_gossip_state


def make_train_step(
    loss_fn,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: AxisNames = "data",
    accumulate: int = 1,
) -> "GossipStep":
    """A training step in which every worker has parameters of its own: `jax.jit` of `jax.shard_map`, the state donated.

    Args:
      loss_fn, mesh, axis_name, accumulate: as in `gcjax.make_train_step`.
      tx: an optax chain that ends with a transform of `gcjax.gossip` over the same axis. All other state in it becomes
        per worker by itself.

    Returns:
      `step` as of `gcjax.make_train_step`: `step.init(params)` gives all workers the same parameters, and
      `state.params` is a `PerWorker`. `mean_params(state.params)` is the model to evaluate.

    Raises:
      As `gcjax.make_train_step`; ValueError (from `init`) for a chain without a gossip transform, or with one over
        other axes.
    """
    axes = checked_axes(mesh, axis_name, accumulate)
    return GossipStep(loss_fn, optax.with_extra_args_support(tx), mesh, axes, None, accumulate, PartitionSpec())


class GossipStep(TrainStep):
    """What `make_train_step` returns; see there."""

    def init(self, params: PyTree, *, model_state: PyTree = None, key: Array | None = None) -> TrainState:
        """The state before the first step, on the mesh; the arguments stay valid."""
        if key is not None:
            check_random_key("key", key)
        opt_state = self._tx.init(params)
        named = the_gossip_state(opt_state).traffic.axes
        if named != self._axes:
            raise ValueError(
                f"the step's workers are along {self._axes}, but the gossip transform names {named}; give it "
                "the same axis_name"
            )
        own = PerWorker.pack(params, self._axes)
        held = None if model_state is None else PerWorker.pack(model_state, self._axes)
        state = TrainState(jnp.int32(0), own, hold(opt_state, self._axes), held, key)
        return place(state, self._mesh)

    def _local_step(self, state: TrainState, batch):
        own = state._replace(params=state.params.unpack(), opt_state=release(state.opt_state))
        new, metrics = super()._local_step(own, batch)
        params = PerWorker.pack(new.params, self._axes)
        return new._replace(params=params, opt_state=hold(new.opt_state, self._axes)), metrics


def worker_params(params: PyTree, mesh: jax.sharding.Mesh, axis_name: AxisNames) -> PyTree:
    """One copy of `params` for each worker: leaves (workers, *shape), sharded over the axes along the first dimension.

    For training loops written by hand: `in_specs=P(axis_name)`, and inside `jax.shard_map` every leaf is (1, *shape).
    """
    one_each = jax.tree.map(lambda x: jnp.asarray(x)[None], params)
    return place(PerWorker.pack(one_each, axis_tuple(axis_name)), mesh).value


def mean_params(params: PyTree, weights=None) -> PyTree:
    """The mean over the workers, the model to evaluate. params: `TrainState.params` or leaves (workers, *shape).

    weights: float[workers], of `sgp` from `gcjax.gossip.info`, None for equal ones. Leaves of shape (*shape), of their
    own dtype.
    """
    return _mean(_stacked(params), None if weights is None else jnp.asarray(weights, jnp.float32))


class Spread(NamedTuple):
    """distance: sqrt(mean over workers of |x_i - mean|^2), over all parameters.  relative: of the mean's norm."""

    distance: float
    relative: float


def spread(params: PyTree) -> Spread:
    """How far the workers' models are from their mean. params: `TrainState.params` or leaves (workers, *shape)."""
    distance, norm = _spread(_stacked(params))
    return Spread(float(distance), float(distance) / float(norm) if norm else float("inf") if distance else 0.0)


def _stacked(params):
    return params.stacked() if isinstance(params, PerWorker) else params


@jax.jit
def _mean(stacked, weights):
    def mean(x):
        return jnp.average(x.astype(jnp.float32), axis=0, weights=weights).astype(x.dtype)

    return jax.tree.map(mean, stacked)


@jax.jit
def _spread(stacked):
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(stacked)]
    means = [jnp.mean(x, axis=0) for x in leaves]
    square = sum(jnp.sum((x - m) ** 2) / len(x) for x, m in zip(leaves, means, strict=True))
    return jnp.sqrt(square), jnp.sqrt(sum(jnp.sum(m**2) for m in means))
