"""`simulate`: algorithms that no SPMD program can express, because nodes have their own clocks, and their baselines.

**Source.** SwarmSGD: Giorgi Nadiradze, Amirmojtaba Sabour, Peter Davies, Shigang Li, Dan Alistarh, "Asynchronous
Decentralized SGD with Quantized and Local Updates", NeurIPS 2021, arXiv 1910.12308. D-PSGD: Lian et al. 2017, arXiv
1705.09056. AD-PSGD: Lian et al. 2018, arXiv 1710.06952. SGP: Assran et al. 2019, arXiv 1811.10792. Local SGD: Stich
2019, arXiv 1805.09767.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._types import Array, PyTree
from gcjax._validation import check_choice, check_flag, check_integer
from gcjax.gossip._graphs import Graph, adjacency, is_undirected
from gcjax.gossip._simulate.clocks import World, check_world, meetings, message_bits
from gcjax.gossip._simulate.events import event_simulation
from gcjax.gossip._simulate.nodes import Simulation, Trainer, make_trainer
from gcjax.gossip._simulate.rounds import round_simulation

REDUCE = ("local_sgd", "allreduce")
DEFAULT_GRAPHS = {
    "swarm": "complete",
    "ad_psgd": "complete",
    "d_psgd": "ring",
    "sgp": "exponential",
    **dict.fromkeys(REDUCE, "complete"),
}


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
      metrics: what `evaluate` returned for the mean model, leaves stacked along a leading axis.
      params: the mean model at the end.
      steps: int64[nodes], gradient steps of each node at the end.
    """

    events: np.ndarray
    gradients: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray
    resent: np.ndarray
    consensus_distance: np.ndarray
    metrics: PyTree
    params: PyTree
    steps: np.ndarray


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
    geometric: bool = False,
    blocking: bool = False,
    bits: int | None = None,
    graph: Graph | None = None,
    batch_size: int | None = None,
    world: World | None = None,
    moments: int = 20,
    progress: Callable[[int, int], None] | None = None,
) -> Curves:
    """Trains `nodes` models, one per node, and records accuracy, traffic and simulated time.

    `algorithm` is one of:

    - "swarm", SwarmSGD. When node i has finished its local steps (a Poisson clock), it meets a random neighbour j.
      Non-blocking, with live models X, communication copies Y and G_i the local updates of i since its last meeting,
      Y_i and X_i become (Y_i + Y_j) / 2 + G_i, and Y_j becomes (Y_i + Y_j) / 2: nobody waits, and j meets the average
      when its own clock rings. Blocking, i waits for j to finish its local steps, and both go on from the mean of the
      two.
    - "ad_psgd", AD-PSGD: non-blocking too, with an exchange after every step and in full precision.
    - "d_psgd": in every round each node averages with all its neighbours, by Metropolis weights.
    - "sgp": in every round each node pushes half of its model and weight to its neighbours in turn.
    - "local_sgd": local steps, then the mean of all models.
    - "allreduce": large-batch SGD, the mean gradient of all nodes and one optimiser.

    The last four run in rounds that wait for the slowest node. In their favour, their steps take the mean time, without
    the randomness of the clocks. No algorithm overlaps the exchange with the steps. All-reduces take the time that
    `gcjax.Link` gives; D-PSGD sends to its neighbours one after the other; pairs exchange in both directions at once.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`.
      params: where all nodes start, floating point.
      data: a pytree whose leaves begin with (nodes, samples): each node's own samples.
      tx: an optax optimiser. Each node has its own state, which is never exchanged.
      nodes: 1 or more. A single node takes steps and sends nothing.
      steps: gradient steps, mean over the nodes. Nodes with clocks make more of them the faster they are.
      evaluate: params -> a pytree of numbers; called with the mean model.
      key: random key of batches, clocks, partners and rounding. A node's k-th batch is the same in all algorithms.
      algorithm: see above.
      local_steps: gradient steps between two exchanges of a node; 1 for "ad_psgd" and "allreduce".
      geometric: "swarm": their number is geometric with that mean instead.
      blocking: "swarm": the blocking variant.
      bits: "swarm": models travel through the lattice quantiser with that many bits per entry, 4 to 16; None in full
        precision. The margin is twice the largest recent difference that the sender saw. A message that cannot be
        decoded is sent again in full, which takes no simulated time.
      graph: a name or a graph, as for the transforms; by default the complete graph, D-PSGD's ring and SGP's
        exponential graph. None for "local_sgd" and "allreduce".
      batch_size: samples of a batch, drawn with replacement; None for all samples of the node.
      world: `World`: link, speeds, delay, dropped messages. A round of "d_psgd" loses single exchanges; in "sgp" the
        sender keeps a push that fails; all-reduces send lost messages again, at 1 / (1 - drop) of the bits and time.
      moments: how often to evaluate after the start.
      progress: called as `progress(done, units)` after each evaluation, in events or rounds.

    Returns:
      `Curves`.

    Raises:
      ValueError, TypeError: an argument out of range; data that does not fit; a graph that is not connected.

    >>> import gcjax, jax, jax.numpy as jnp, optax
    >>> data = jnp.arange(8.0).reshape(4, 2)  # 4 nodes with 2 samples each
    >>> loss = lambda x, batch: jnp.mean((x - batch) ** 2)
    >>> world = gcjax.gossip.World(step_seconds=0.02, drop=0.1)
    >>> options = {"nodes": 4, "steps": 300, "evaluate": lambda x: x, "key": jax.random.key(0), "world": world}
    >>> curves = gcjax.gossip.simulate(loss, jnp.zeros(()), data, optax.sgd(0.02), **options)
    >>> print(abs(curves.metrics[-1] - 3.5) < 0.3, curves.bits[-1] == 64 * curves.events[-1] / 4)
    True True
    """
    world = World() if world is None else world
    check_integer("nodes", nodes, 1)
    check_integer("steps", steps, 1)
    check_integer("moments", moments, 1)
    check_world(world, nodes)
    _check_algorithm(algorithm, local_steps, geometric, blocking, bits, graph)
    data = jax.tree.map(jnp.asarray, data)
    trainer = make_trainer(loss_fn, params, tx, data, nodes, batch_size, key)
    used: Graph = DEFAULT_GRAPHS[algorithm] if graph is None else graph
    if algorithm not in ("sgp", *REDUCE) and not is_undirected(adjacency(used, nodes)):
        raise ValueError(f"{algorithm!r} averages both ways: the graph must be undirected, got {graph!r}")
    if algorithm in ("swarm", "ad_psgd"):
        events = meetings(
            world,
            used,
            nodes,
            steps * nodes,
            local_steps=local_steps,
            geometric=geometric,
            blocking=blocking,
            bits=message_bits(len(trainer.start), bits),
            rng=np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32))),
        )
        simulation = event_simulation(trainer, events, nodes, delay=world.delay, blocking=blocking, bits=bits)
    else:
        simulation = round_simulation(trainer, world, nodes, steps, algorithm, used, local_steps)
    return _run(simulation, trainer, data, evaluate, moments, progress)


def _check_algorithm(
    algorithm: str, local_steps: int, geometric: bool, blocking: bool, bits: int | None, graph: Graph | None
) -> None:
    check_choice("algorithm", algorithm, tuple(DEFAULT_GRAPHS))
    check_integer("local_steps", local_steps, 1)
    check_flag("geometric", geometric)
    check_flag("blocking", blocking)
    if bits is not None:
        check_integer("bits", bits, 4, 16)
    if algorithm != "swarm" and (geometric or blocking or bits is not None):
        raise ValueError(f"geometric, blocking and bits are options of algorithm='swarm', got {algorithm!r}")
    if algorithm in ("ad_psgd", "allreduce") and local_steps != 1:
        other = "swarm" if algorithm == "ad_psgd" else "local_sgd"
        raise ValueError(f"{algorithm!r} exchanges after every step; for local_steps={local_steps} use {other!r}")
    if algorithm in REDUCE and graph is not None:
        raise ValueError(f"{algorithm!r} is an all-reduce between all nodes: leave graph out, got {graph!r}")


def _run(
    simulation: Simulation,
    trainer: Trainer,
    data: PyTree,
    evaluate: Callable[[PyTree], PyTree],
    moments: int,
    progress: Callable[[int, int], None] | None,
) -> Curves:
    """Run a simulation, and evaluate it after equal shares of the gradient steps."""
    gradients = simulation.gradients
    units = len(gradients) - 1
    shares = gradients[-1] * np.arange(moments + 1) / moments
    marks = np.unique(np.searchsorted(gradients, shares * (1 - 1e-12)).clip(0, units))
    advance = jax.jit(simulation.advance, donate_argnums=0)

    @jax.jit
    def measure(state):
        mean, distance, resent = simulation.summarise(state)
        return evaluate(trainer.unravel(mean)), distance, resent, mean

    state, found, last = simulation.state, [], 0
    for mark in map(int, marks):
        if mark > last:
            state = advance(state, data, simulation.plan, last, mark)
        *seen, mean = measure(state)
        found.append(jax.device_get(seen))
        last = mark
        if progress is not None:
            progress(mark, units)
    metrics, distance, resent = jax.tree.map(lambda *values: np.stack(values), *found)
    full = message_bits(len(trainer.start), None) / len(jax.tree.leaves(data)[0])
    return Curves(
        events=marks,
        gradients=gradients[marks],
        seconds=simulation.seconds[marks],
        bits=simulation.bits[marks] + resent * full,
        resent=resent.astype(np.int64),
        consensus_distance=distance.astype(np.float64),
        metrics=metrics,
        params=trainer.unravel(mean),
        steps=np.asarray(simulation.node_steps(state), np.int64),
    )
