"""Parameters that differ between workers: placement on a mesh, mean and consensus distance."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.collectives import axis_tuple
from gcjax._core.per_worker import PerWorker
from gcjax._training.sharding import distribute
from gcjax._types import Array, ArrayLike, AxisNames, PyTree


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
      weights: float[workers], those of `sgp` from `gcjax.info`; None for equal weights.

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
                "weights of gcjax.info(state.opt_state)"
            )
        return jnp.average(x.astype(jnp.float32), axis=0, weights=weights).astype(x.dtype)

    return jax.tree.map(mean, stacked)


@jax.jit
def _distance_and_norm(stacked: PyTree) -> tuple[Array, Array]:
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(stacked)]
    means = [jnp.mean(x, axis=0) for x in leaves]
    square = sum(jnp.sum((x - m) ** 2) / len(x) for x, m in zip(leaves, means, strict=True))
    return jnp.sqrt(square), jnp.sqrt(sum(jnp.sum(m**2) for m in means))
