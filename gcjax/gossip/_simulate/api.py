"""`simulate`: algorithms that no SPMD program can express, because nodes have their own clocks, and their baselines.

**Source.** SwarmSGD: Giorgi Nadiradze, Amirmojtaba Sabour, Peter Davies, Shigang Li, Dan Alistarh, "Asynchronous
Decentralized SGD with Quantized and Local Updates", NeurIPS 2021, arXiv 1910.12308. D-PSGD: Lian et al. 2017, arXiv
1705.09056. AD-PSGD: Lian et al. 2018, arXiv 1710.06952. SGP: Assran et al. 2019, arXiv 1811.10792. Local SGD: Stich
2019, arXiv 1805.09767.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.link import Link, as_link
from gcjax._types import Array, PyTree
from gcjax._validation import check_choice, check_flag, check_integer, check_number
from gcjax.gossip._graphs import Graph, adjacency, is_undirected
from gcjax.gossip._simulate.algorithms import algorithm_of, summary
from gcjax.gossip._simulate.nodes import make_trainer
from gcjax.gossip._simulate.schedule import lockstep, message_bits, pairs

GRAPHS = {"swarm": "complete", "d_psgd": "ring", "sgp": "exponential", "local_sgd": "complete", "allreduce": "complete"}


class Curves(NamedTuple):
    """The result of a simulation at k + 1 moments, the first at the start. NumPy arrays of length k + 1 unless noted.

    Attributes:
      events: int64, meetings of two nodes so far, or rounds of all nodes.
      gradients: float64, gradient steps so far, mean over the nodes.
      seconds: float64, simulated time.
      bits: float64, bits sent so far, with padding and headers, mean over the nodes.
      resent: int64, messages so far that could not be decoded and were sent again in full. `bits` includes both.
      consensus_distance: float64, sqrt(mean_i |x_i - mean|**2) of the nodes' models; if non-blocking, of their
        communication copies.
      metrics: the values of `evaluate` for the mean model, leaves stacked along a leading axis.
      params: the mean model at the end.
    """

    events: np.ndarray
    gradients: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    resent: np.ndarray
    consensus_distance: np.ndarray
    metrics: PyTree
    params: PyTree


def simulate(
    loss_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    data: PyTree,
    tx: optax.GradientTransformation,
    *,
    nodes: int,
    steps: int,
    evaluate: Callable[[PyTree], PyTree],
    key: Array,
    algorithm: str = "swarm",
    local_steps: int = 1,
    blocking: bool = False,
    bits: int | None = None,
    graph: Graph | None = None,
    batch_size: int | None = None,
    link: Link | str | float = "1Gbit",
    step_seconds: float | Sequence[float] = 0.01,
    moments: int = 20,
    progress: Callable[[int, int], None] | None = None,
) -> Curves:
    """Trains `nodes` models, one per node, and records accuracy, traffic and simulated time.

    `algorithm` is one of:

    - "swarm", SwarmSGD: a node that has finished its local steps (a Poisson clock) averages with a random neighbour.
      Non-blocking, the neighbour meets the average when its own clock rings. Blocking, the node waits
      for the neighbour to finish its local steps, and both go on from the mean of the two. AD-PSGD is the non-blocking
      variant with one local step, in full precision.
    - "d_psgd": in every round each node averages with all its neighbours, by Metropolis weights.
    - "sgp": in every round each node pushes half of its model and weight to its neighbours in turn.
    - "local_sgd": local steps, then the mean of all models.
    - "allreduce": large-batch SGD, the mean gradient of all nodes and one optimiser.

    All but "swarm" run in rounds that wait for the slowest node. No algorithm overlaps the exchange with the steps.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`.
      params: where all nodes start, floating point.
      data: a pytree whose leaves begin with (nodes, samples): each node's own samples.
      tx: an optax optimiser. Each node has its own state, which is never exchanged.
      nodes: 2 or more.
      steps: gradient steps, mean over the nodes. Nodes with clocks make more of them the faster they are.
      evaluate: params -> a pytree of numbers; called with the mean model.
      key: random key of batches, clocks, partners and rounding. A node's k-th batch is the same in all algorithms.
      algorithm: see above.
      local_steps: gradient steps between two exchanges of a node; 1 for "allreduce".
      blocking: "swarm": the blocking variant.
      bits: "swarm": bits per entry on the lattice, 4 to 16; None in full precision. A message that cannot be decoded is
        sent again in full, which takes no simulated time.
      graph: as for the transforms; None for the complete graph, D-PSGD's ring and SGP's exponential graph.
      batch_size: samples of a batch, drawn with replacement; None for all samples of the node.
      link: every node's link, as in `gcjax.plan`; given as a speed, its latency is 50 us.
      step_seconds: mean seconds of one gradient step: a number, or one for every node.
      moments: how often to evaluate after the start.
      progress: called as `progress(done, units)` after each evaluation, in events or rounds.

    Raises:
      ValueError, TypeError: an argument out of range; data that does not fit; a graph that is not connected.

    >>> import gcjax, jax, jax.numpy as jnp, optax
    >>> data = jnp.arange(8.0).reshape(4, 2)  # 4 nodes with 2 samples each
    >>> loss = lambda x, batch: jnp.mean((x - batch) ** 2)
    >>> options = {"nodes": 4, "steps": 300, "evaluate": lambda x: x, "key": jax.random.key(0)}
    >>> curves = gcjax.gossip.simulate(loss, jnp.zeros(()), data, optax.sgd(0.02), **options)
    >>> print(abs(curves.metrics[-1] - 3.5) < 0.3, curves.bits[-1] == 64 * curves.events[-1] / 4)
    True True
    """
    check_integer("nodes", nodes, 2)
    check_integer("steps", steps, 1)
    check_integer("moments", moments, 1)
    link, seconds = as_link("link", link, 50e-6), _step_seconds(step_seconds, nodes)
    used = _checked_graph(algorithm, local_steps, blocking, bits, graph, nodes)
    data = jax.tree.map(jnp.asarray, data)
    trainer = make_trainer(loss_fn, params, tx, data, nodes, local_steps, bits, batch_size, key)
    size = len(trainer.start)
    if algorithm == "swarm":
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
        message = message_bits(size, bits)
        schedule = pairs(used, link, seconds, steps, local_steps, message=message, blocking=blocking, rng=rng)
    else:
        schedule = lockstep(algorithm, used, link, seconds, steps, local_steps, message=message_bits(size, None))
    state, unit = algorithm_of(trainer, nodes, algorithm, blocking)
    plan = jax.tree.map(jnp.asarray, schedule.plan)
    run = jax.jit(
        lambda state, begin, end, data, plan: lax.fori_loop(begin, end, lambda k, s: unit(s, data, plan, k), state),
        donate_argnums=0,
    )

    @jax.jit
    def measure(state):
        mean, distance = summary(state)
        return evaluate(trainer.unravel(mean)), distance, state.resent, mean

    units = len(schedule.gradients) - 1
    shares = schedule.gradients[-1] * np.arange(moments + 1) / moments
    marks = np.unique(np.searchsorted(schedule.gradients, shares * (1 - 1e-12)).clip(0, units))
    found, last = [], 0
    for mark in map(int, marks):
        if mark > last:
            state = run(state, last, mark, data, plan)
        *seen, mean = measure(state)
        found.append(jax.device_get(seen))
        last = mark
        if progress is not None:
            progress(mark, units)
    metrics, distance, resent = jax.tree.map(lambda *values: np.stack(values), *found)
    return Curves(
        events=marks,
        gradients=schedule.gradients[marks],
        seconds=schedule.seconds[marks],
        bits=schedule.bits[marks] + resent * (message_bits(size, None) / nodes),
        resent=resent.astype(np.int64),
        consensus_distance=distance.astype(np.float64),
        metrics=metrics,
        params=trainer.unravel(mean),
    )


def _step_seconds(step_seconds: float | Sequence[float], nodes: int) -> np.ndarray:
    """The nodes' seconds of a step, float64[nodes]."""
    seconds = np.asarray(step_seconds, np.float64)
    if seconds.shape not in ((), (nodes,)):
        raise ValueError(f"step_seconds must be a number or {nodes} of them, one per node, got shape {seconds.shape}")
    for value in seconds.ravel():
        check_number("step_seconds", value, 0)
    return np.broadcast_to(seconds, (nodes,))


def _checked_graph(
    algorithm: str, local_steps: int, blocking: bool, bits: int | None, graph: Graph | None, nodes: int
) -> Graph:
    """The graph of checked options."""
    check_choice("algorithm", algorithm, tuple(GRAPHS))
    check_flag("blocking", blocking)
    if algorithm != "swarm" and (blocking or bits is not None):
        raise ValueError(f"blocking and bits are options of algorithm='swarm', got {algorithm!r}")
    if algorithm == "allreduce" and local_steps != 1:
        raise ValueError(f"'allreduce' exchanges after every step; for local_steps={local_steps} use 'local_sgd'")
    used: Graph = GRAPHS[algorithm] if graph is None else graph
    if algorithm in ("local_sgd", "allreduce") and graph is not None:
        raise ValueError(f"{algorithm!r} is an all-reduce between all nodes: leave graph out, got {graph!r}")
    if algorithm != "sgp" and not is_undirected(adjacency(used, nodes)):
        raise ValueError(f"{algorithm!r} averages both ways: the graph must be undirected, got {graph!r}")
    return used
