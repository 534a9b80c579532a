"""When simulated nodes meet, and how many bits they send. NumPy only."""

import heapq
from typing import Any, NamedTuple

import numpy as np

from gcjax._comm.link import Link
from gcjax._comm.simulated import Transfer, ring_bytes
from gcjax._kernels.buckets import vector_bucket
from gcjax.gossip._graphs import Graph, adjacency, mixing_matrix
from gcjax.gossip._matchings import rounds


class Schedule(NamedTuple):
    """The units of a simulation: meetings of two nodes in the order in which they end, or rounds of all nodes.

    Attributes:
      plan: the units on the device: int32[2, units], the node that begins and its partner; D-PSGD's mixing matrix,
        float32[n, n]; SGP's receivers in its rounds, int32[k, n]; None for all-reduces.
      gradients: float64[units + 1], gradient steps before each unit and after the last, mean over the nodes.
      seconds: float64[units + 1], simulated time likewise.
      bits: float64[units + 1], bits sent likewise, mean over the nodes, without messages sent again.
    """

    plan: Any
    gradients: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray


def message_bits(size: int, bits: int | None) -> int:
    """Bits of a model on the wire: in full, or the lattice's words with padding and checksum, and a scale."""
    return 32 * size if bits is None else 32 * (2 + bits * vector_bucket(size).words)


def pairs(
    graph: Graph,
    link: Link,
    step_seconds: np.ndarray,
    steps: int,
    local_steps: int,
    *,
    message: int,
    blocking: bool,
    rng: np.random.Generator,
) -> Schedule:
    """Draw meetings until the nodes have made `steps` gradient steps on average.

    The clock of node i is a Poisson process of mean interval local_steps * step_seconds[i]. When it rings, the node has
    finished its local steps and chooses a neighbour. An exchange of `message` bits each way then takes the time of the
    link, during which the node's clock stands still. If blocking, the node first waits until the partner's clock rings
    too, and both clocks stand still.
    """
    nodes = len(step_seconds)
    neighbours = [np.flatnonzero(row) for row in adjacency(graph, nodes)]
    exchange = link.seconds(Transfer("all_reduce", message // 8), 2)

    def interval(i):
        return step_seconds[i] * local_steps * rng.exponential()

    rings = [interval(i) for i in range(nodes)]
    queue = [(t, i) for i, t in enumerate(rings)]
    heapq.heapify(queue)
    met: list[tuple[float, int, int]] = []
    each = local_steps * (1 + blocking)
    while len(met) * each < steps * nodes:
        t, i = heapq.heappop(queue)
        if t != rings[i]:
            continue  # the node has met another since
        j = int(rng.choice(neighbours[i]))
        busy = (i, j) if blocking else (i,)
        end = max(rings[k] for k in busy) + exchange
        met.append((end, i, j))
        for k in busy:
            rings[k] = end + interval(k)
            heapq.heappush(queue, (rings[k], k))
    # Sorting keeps each node's own meetings in order: each ends later than the one before.
    ends, node, partner = np.array(sorted(met, key=lambda event: event[0])).T
    count = np.arange(len(met) + 1)
    return Schedule(
        plan=np.array([node, partner], np.int32),
        gradients=each * count / nodes,
        seconds=np.concatenate([[0.0], ends]),
        bits=2 * message * count / nodes,
    )


def lockstep(
    algorithm: str, graph: Graph, link: Link, step_seconds: np.ndarray, steps: int, local_steps: int, *, message: int
) -> Schedule:
    """Rounds, each of which waits for the slowest node, until every node has made `steps` gradient steps."""
    nodes, count = len(step_seconds), -(-steps // local_steps)
    transfer = Transfer("all_reduce", message // 8)
    pair, plan = link.seconds(transfer, 2), None
    if algorithm == "d_psgd":
        plan, linked = np.asarray(mixing_matrix(graph, nodes), np.float32), adjacency(graph, nodes)
        seconds, bits = np.full(count, linked.sum(1).max() * pair), np.full(count, message * linked.sum() / nodes)
    elif algorithm == "sgp":
        plan = rounds(graph, nodes)
        pushes = np.resize((plan != np.arange(nodes)).mean(1), count)
        seconds, bits = np.full(count, pair), (message + 32) * pushes  # the weight takes a word
    else:
        seconds, bits = np.full(count, link.seconds(transfer, nodes)), np.full(count, 8 * ring_bytes(transfer, nodes))
    waited = seconds + local_steps * step_seconds.max()
    gradients = np.full(count, float(local_steps))
    return Schedule(plan, *(np.concatenate([[0.0], np.cumsum(x)]) for x in (gradients, waited, bits)))
