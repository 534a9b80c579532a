"""Graphs of workers: who may exchange with whom, and with what weights. NumPy only.

A graph is a name, or a NumPy array bool[n, n] whose entry [i, j] says that i sends to j. It need not be symmetric. No
node is its own neighbour.

Names: "complete"; "ring"; "exponential", directed, i sends to i + 1, i + 2, i + 4, ... modulo n (Assran, Loizou,
Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", 2019, arXiv 1811.10792).
"""

import numpy as np

from gcjax._validation import check_choice, check_integer

NAMES = ("complete", "ring", "exponential")
Graph = str | np.ndarray


def check_graph(graph: Graph) -> None:
    """Check what does not depend on the number of workers. Raises as `adjacency` does."""
    if isinstance(graph, str):
        check_choice("graph", graph, NAMES)
    else:
        adjacency(graph, len(graph) if isinstance(graph, np.ndarray) and graph.ndim else 1)


def adjacency(graph: Graph, n: int) -> np.ndarray:
    """bool[n, n], entry [i, j] whether i sends to j.

    Raises:
      ValueError: an unknown name; a node that is its own neighbour; an array of another number of nodes than n; a graph
        that is not (strongly) connected.
      TypeError: not a graph.
    """
    check_integer("workers", n, 1)
    if isinstance(graph, str):
        check_choice("graph", graph, NAMES)
        linked, everyone = np.zeros((n, n), bool), np.arange(n)
        for shift in {"complete": range(1, n), "ring": (1, n - 1), "exponential": shifts(n)}[graph]:
            linked[everyone, (everyone + shift) % n] = True
        np.fill_diagonal(linked, False)
    elif not isinstance(graph, np.ndarray) or graph.dtype != bool or graph.ndim != 2 or len(set(graph.shape)) > 1:
        raise TypeError(f"graph must be one of {', '.join(NAMES)} or a square NumPy array of bool, got {graph!r}")
    elif len(graph) != n:
        raise ValueError(f"the graph has {len(graph)} nodes, but there are {n} workers")
    elif graph.diagonal().any():
        raise ValueError(f"node {int(graph.diagonal().argmax())} is its own neighbour; leave such edges out")
    else:
        linked = graph
    unreached = np.flatnonzero(~(reachable(linked) & reachable(linked.T)))
    if unreached.size:
        raise ValueError(
            f"the graph of {n} workers is not connected: 0 and {unreached[0]} cannot reach each other, so their "
            "models would never agree. Add edges"
        )
    return linked


def mixing_matrix(graph: Graph, n: int) -> np.ndarray:
    """float64[n, n] of non-negative weights; rows and columns sum to 1. x_i becomes sum_j W[i, j] x_j.

    Undirected graphs get symmetric Metropolis weights 1 / (1 + max(degree_i, degree_j)), so 1/3 each on a ring.
    Directed graphs must be regular and get equal weights.

    Raises:
      ValueError: a directed graph that is not regular; it has no such weights here (`sgp` needs none).
    """
    linked = adjacency(graph, n)
    degree = linked.sum(1)
    if not is_undirected(linked) and not (np.all(degree == degree[0]) and np.all(linked.sum(0) == degree[0])):
        raise ValueError(
            "the graph is directed and not regular, so no mixing weights make rows and columns sum to 1 here; "
            "use an undirected or a regular graph, or gcjax.gossip.sgp"
        )
    weights = linked.T / (1 + np.maximum(degree[:, None], degree[None, :]))
    return weights + np.diag(1 - weights.sum(1))


def spectral_gap(graph: Graph, n: int) -> float:
    """1 - s, where s bounds the factor by which `mixing_matrix` multiplies the distance from the mean.

    It is 1 for the complete graph and about 13 / n**2 for a ring. The number of rounds until agreement is proportional
    to its inverse.

    >>> import gcjax
    >>> [round(gcjax.gossip.spectral_gap(graph, 16), 2) for graph in ("ring", "exponential", "complete")]
    [0.05, 0.4, 1.0]
    """
    return float(1 - np.linalg.norm(mixing_matrix(graph, n) - 1 / n, 2))


def shifts(n: int) -> list[int]:
    """Distances from sender to receiver in the exponential graph of n nodes."""
    return [1 << b for b in range((n - 1).bit_length())]


def is_undirected(linked: np.ndarray) -> bool:
    """Whether every edge of an adjacency matrix goes both ways."""
    return bool((linked == linked.T).all())


def reachable(linked: np.ndarray) -> np.ndarray:
    """bool[n], the nodes that node 0 can reach."""
    reached = np.arange(len(linked)) == 0
    while True:
        further = reached | linked[reached].any(0)
        if (further == reached).all():
            return reached
        reached = further
