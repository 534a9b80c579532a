"""What a method costs to compute on this device, measured, as a function of model size and workers.

The seconds of one update are modelled as `fixed + per_parameter * parameters + per_byte * arriving bytes`. The arriving
bytes follow from the method's own transfers, so workers and density need no terms of their own.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._comm.simulated import Transfer, arriving_bytes, model_of, simulated_workers, transfers_of
from gcjax._table import METHODS, Make, Workload
from gcjax._types import Array, PyTree

# Parameters and workers. A vector of 8 million has 32 MB; glibc maps larger ones anew each time, and the cost bends up.
MEASURED = ((1_000_000, 2), (12_000_000, 2), (12_000_000, 8))
DENSITY = 0.01  # at which sparse methods are measured
SQUARE = NormalDist().inv_cdf(1 - DENSITY / 2) ** 2  # a share `DENSITY` of normal entries has a larger one
REPEATS = 4


class Method(NamedTuple):
    """A method to compare.

    Attributes:
      make: from the number of parameters to a transform without axis names.
      sparse: whether it sends a share of the entries that can be chosen.
      squares: whether it takes `sum_grad_squared`.

    >>> import gcjax
    >>> method = gcjax.Method(lambda parameters: gcjax.top_k_compress(0.05), sparse=True)
    >>> costs = {"dense float32": gcjax.Cost(0, 1e-9, 0), "mine": gcjax.Cost(0, 2e-9, 1e-9)}
    >>> gcjax.plan("1M", 8, "1Gbit", 0.01, methods={"mine": method}, costs=costs).best.transport
    'all_gather'
    """

    make: Callable[[int], optax.GradientTransformationExtraArgs]
    sparse: bool = False
    squares: bool = False


def standard_methods(density: float) -> dict[str, Method]:
    """The settings of all public methods, by the labels under which their costs are kept."""

    def at_density(make: Make) -> Callable[[int], optax.GradientTransformationExtraArgs]:
        return lambda parameters: make(Workload(density, parameters))

    return {
        label: Method(at_density(make), row.sparse, row.squares)
        for row in METHODS.values()
        for label, make in row.settings.items()
    }


class Cost(NamedTuple):
    """Seconds of one update: `fixed + per_parameter * parameters + per_byte * arriving bytes`.

    Attributes:
      fixed: seconds.
      per_parameter: seconds for each parameter of the model.
      per_byte: seconds for each byte that arrives at a worker.

    >>> import gcjax
    >>> cost = gcjax.Cost(fixed=0.001, per_parameter=2e-9, per_byte=1e-9)
    >>> cost.seconds(1_000_000, transfers=(), workers=8)
    0.003
    """

    fixed: float
    per_parameter: float
    per_byte: float

    def seconds(self, parameters: int, transfers: Iterable[Transfer], workers: int) -> float:
        """Seconds of one update with these transfers between `workers` workers."""
        return self.fixed + self.per_parameter * parameters + self.per_byte * _arriving(transfers, workers)


def _arriving(transfers: Iterable[Transfer], workers: int) -> int:
    return sum(arriving_bytes(transfer, workers) for transfer in transfers)


def measure(method: Method, settings: Iterable[tuple[int, int]] = MEASURED) -> Cost:
    """The cost of one method, measured for each (parameters, workers) of `settings`."""
    points = []
    for parameters, workers in settings:
        tx, params = method.make(parameters), model_of(parameters)
        transfers = transfers_of(tx, params, workers, method.squares)
        seconds = update_seconds(tx, params, workers, method.squares)
        points.append((parameters, _arriving(transfers, workers), seconds))
    return fit(points)


def fit(points: Iterable[tuple[float, float, float]]) -> Cost:
    """The cost with no negative part that comes closest to all (parameters, arriving bytes, seconds).

    It minimises the absolute error, not the relative one, so that large models decide: the planner adds these seconds
    to those of a whole step.
    """
    points = list(points)
    seconds = np.asarray([s for *_, s in points])
    columns = np.asarray([(1, n, m) for n, m, _ in points])
    best, best_error = np.zeros(3), np.inf
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        scale = np.linalg.norm(columns[:, used], axis=0)
        if not scale.all():
            continue  # nothing ever arrives
        found = np.linalg.lstsq(columns[:, used] / scale, seconds)[0] / scale
        error = float(np.linalg.norm(columns[:, used] @ found - seconds))
        if (found >= 0).all() and error < 0.999 * best_error:  # of equally good ones, the one with the fewest parts
            best, best_error = np.zeros(3), error
            best[list(used)] = found
    return Cost(*map(float, best))


def update_seconds(tx: optax.GradientTransformationExtraArgs, params: PyTree, workers: int, squares: bool) -> float:
    """Seconds of one update on this device: the shortest of `REPEATS` updates from the same state.

    The gradient is normal. The squares are such that a share `DENSITY` of the entries passes the variance criterion.

    Args:
      tx: a transform made without axis names.
      params: arrays or `jax.ShapeDtypeStruct`s.
      workers: number of workers, simulated.
      squares: whether `tx` takes `sum_grad_squared`.
    """

    @jax.jit
    def start(key: Array, zeros: Array) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
        gradient = optax.tree_utils.tree_random_like(key, params)
        extra = {"sum_grad_squared": jax.tree.map(lambda x: jnp.full_like(x, SQUARE), gradient)} if squares else {}
        with simulated_workers(workers, zeros, []):  # the state of owners depends on how many there are
            return gradient, tx.init(gradient), extra

    def update(gradient, state, extra, zeros):
        with simulated_workers(workers, zeros, []):
            return tx.update(gradient, state, **extra)

    zeros = jnp.zeros(workers, jnp.int32)
    *fresh, extra = start(jax.random.key(1), zeros)
    step = jax.jit(update, donate_argnums=(0, 1)).lower(*fresh, extra, zeros).compile()
    # Every update runs in the buffers of the last one, because fresh ones cost more than the arithmetic.
    refill = jax.jit(
        lambda old, new: jax.tree.map(lambda a, b: (a * 0 + b).astype(b.dtype), old, new), donate_argnums=0
    )
    used = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(fresh)
    times = []
    for _ in range(REPEATS):
        arguments = jax.block_until_ready(refill(used, fresh))
        begin = time.perf_counter()
        used = list(jax.block_until_ready(step(*arguments, extra, zeros)))
        times.append(time.perf_counter() - begin)
    return min(times)
