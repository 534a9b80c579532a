"""When simulated nodes meet: their speeds, the link between them, and the events that follow. NumPy only."""

import heapq
from typing import NamedTuple

import numpy as np

from gcjax._comm.simulated import Transfer
from gcjax._kernels.buckets import vector_bucket
from gcjax._planner.network import Link
from gcjax._validation import check_number
from gcjax.gossip._graphs import Graph, adjacency


class World(NamedTuple):
    """The nodes' surroundings in a simulation.

    Attributes:
      link: every node's own link to all others.
      step_seconds: mean seconds of one gradient step: a number, or one for every node. A straggler has a large one.
      delay: seconds that a message needs beyond the link's. If nodes do not wait for each other, only what a node
        changes in its partner's copy is late; it reads that copy at once.
      drop: probability that an exchange of two nodes fails, both ways. Both then keep what they have.
    """

    link: Link = Link(1e9, 50e-6)
    step_seconds: float | tuple[float, ...] = 0.01
    delay: float = 0.0
    drop: float = 0.0


class Events(NamedTuple):
    """Meetings of two nodes, e of them, in the order in which they end.

    Attributes:
      node: int32[e], the node that began.
      partner: int32[e], the node that it chose; the node itself if it has no neighbour.
      steps: int32[e, 2], gradient steps that node and partner finish with it; the partner's are 0 if non-blocking.
      meets: bool[e], whether they exchange models.
      seconds: float64[e], when the meeting ends.
    """

    node: np.ndarray
    partner: np.ndarray
    steps: np.ndarray
    meets: np.ndarray
    seconds: np.ndarray


def check_world(world: World, nodes: int) -> np.ndarray:
    """The nodes' seconds of a step, float64[nodes]. Raises ValueError or TypeError for values out of range."""
    if not isinstance(world, World):
        raise TypeError(f"world must be a gcjax.gossip.World, got {world!r}")
    if not isinstance(world.link, Link):
        raise TypeError(f"link must be a gcjax.Link, got {world.link!r}")
    check_number("bits_per_second", world.link.bits_per_second, 0)
    check_number("efficiency", world.link.efficiency, 0, 1)
    check_number("latency", world.link.latency, 0, low_included=True)
    check_number("delay", world.delay, 0, low_included=True)
    check_number("drop", world.drop, 0, 1, low_included=True, high_included=False)
    seconds = np.asarray(world.step_seconds, np.float64)
    if seconds.shape not in ((), (nodes,)):
        raise ValueError(f"step_seconds must be a number or {nodes} of them, one per node, got shape {seconds.shape}")
    for value in seconds.ravel():
        check_number("step_seconds", value, 0)
    return np.broadcast_to(seconds, (nodes,))


def message_bits(size: int, bits: int | None) -> int:
    """Bits of a model on the wire: in full, or the lattice's words with padding and checksum, and a scale."""
    return 32 * size if bits is None else 32 * (2 + bits * vector_bucket(size).words)


def exchange_seconds(world: World, bits: int, nodes: int) -> float:
    """Seconds until `nodes` nodes have the mean of their messages, the delay of every message included."""
    link = world.link._replace(latency=world.link.latency + world.delay)
    return link.seconds(Transfer("all_reduce", bits // 8), nodes)


def meetings(
    world: World,
    graph: Graph,
    nodes: int,
    gradients: int,
    *,
    local_steps: int,
    geometric: bool,
    blocking: bool,
    bits: int,
    rng: np.random.Generator,
) -> Events:
    """Draw meetings until all nodes together have made `gradients` gradient steps.

    The clock of node i is a Poisson process of mean interval local_steps * step_seconds[i]. When it rings, the node has
    finished its local steps and chooses a neighbour. An exchange of `bits` each way then takes the time of the link,
    during which the node's clock stands still. If blocking, the node first waits until the partner's clock rings too,
    and both clocks stand still.
    """
    neighbours = [np.flatnonzero(row) for row in adjacency(graph, nodes)]
    mean = check_world(world, nodes)
    exchange = exchange_seconds(world if blocking else world._replace(delay=0.0), bits, 2)

    def work(i):
        """Local steps of one interval, and its seconds."""
        if geometric:  # the sum of k exponential times has a gamma distribution
            steps = rng.geometric(1 / local_steps)
            return steps, mean[i] * rng.gamma(steps)
        return local_steps, mean[i] * local_steps * rng.exponential()

    steps, rings = map(list, zip(*map(work, range(nodes)), strict=True))
    queue = [(t, i) for i, t in enumerate(rings)]
    heapq.heapify(queue)
    found = []
    while gradients > 0:
        t, i = heapq.heappop(queue)
        if t != rings[i]:
            continue  # the node has met another since
        j = int(rng.choice(neighbours[i])) if len(neighbours[i]) else i
        together = blocking and i != j
        end = (max(t, rings[j]) if together else t) + (exchange if i != j else 0.0)
        meets = i != j and (world.drop == 0 or rng.random() >= world.drop)
        found.append((i, j, steps[i], steps[j] if together else 0, meets, end))
        gradients -= found[-1][2] + found[-1][3]
        for k in (i, j) if together else (i,):
            steps[k], seconds = work(k)
            rings[k] = end + seconds
            heapq.heappush(queue, (rings[k], k))
    # Sorting keeps each node's own meetings in order: each ends later than the one before.
    table = np.array(sorted(found, key=lambda event: event[-1]))
    node, partner, first, second = table[:, :4].T.astype(np.int32)
    return Events(node, partner, np.stack([first, second], 1), table[:, 4] != 0, table[:, 5])
