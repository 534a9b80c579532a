"""Graphs of workers: who may exchange with whom, and with what weights. NumPy only.

A graph is a name, `random_regular(degree)`, a list of undirected edges [(i, j), ...], or a bool array (n, n) whose
entry [i, j] says that i sends to j; such an array need not be symmetric. No node is its own neighbour.

Names: "complete"; "ring"; "torus", the most nearly square one with n nodes, a ring where n is prime; "hypercube", n a
power of two, neighbours differ in one bit; "exponential", directed, i sends to i + 1, i + 2, i + 4, ... modulo n
(Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", 2019, arXiv 1811.10792).
"""

from collections.abc import Callable, Sequence

import numpy as np

from gcjax._validation import check_choice, check_integer

NAMES = ("complete", "ring", "torus", "hypercube", "exponential")

Edges = Sequence[tuple[int, int]] | np.ndarray
Graph = str | Callable[[int], np.ndarray] | Edges


def check_graph(graph: Graph) -> None:
    """Check what does not depend on the number of workers. Raises as `adjacency` does."""
    if isinstance(graph, str):
        check_choice("graph", graph, NAMES)
    elif not callable(graph):
        array = _as_array(graph)
        adjacency(graph, len(array) if array.dtype == bool else int(array.max(initial=0)) + 1)


def adjacency(graph: Graph, n: int) -> np.ndarray:
    """bool[n, n], entry [i, j] whether i sends to j.

    Raises:
      ValueError: an unknown name; a hypercube whose n is not a power of two; nodes out of range; a node that is its own
        neighbour; an array of another number of nodes than n; a graph that is not (strongly) connected.
      TypeError: not a graph.
    """
    check_integer("workers", n, 1)
    if isinstance(graph, str):
        check_choice("graph", graph, NAMES)
        linked = _named(graph, n)
    else:
        linked = _from_edges(graph(n) if callable(graph) else graph, n)
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
    >>> [round(gcjax.gossip.spectral_gap(graph, 16), 2) for graph in ("ring", "torus", "complete")]
    [0.05, 0.4, 1.0]
    """
    return float(1 - np.linalg.norm(mixing_matrix(graph, n) - 1 / n, 2))


def random_regular(degree: int, seed: int = 0) -> Callable[[int], np.ndarray]:
    """A random connected graph in which every node has `degree` neighbours. Equal seeds give equal graphs.

    Random free ends are joined one pair after another; when none fit, the draw starts again (Steger and Wormald 1999).

    Returns:
      A function of the number of nodes, bool[n, n]. It raises ValueError where there is no such graph.

    >>> import gcjax
    >>> gcjax.gossip.random_regular(3)(8).sum(axis=1)
    array([3, 3, 3, 3, 3, 3, 3, 3])
    """
    check_integer("degree", degree, 1)
    check_integer("seed", seed, 0)

    def draw(n: int) -> np.ndarray:
        if degree >= n or n * degree % 2 or (degree == 1 and n > 2):
            raise ValueError(
                f"no connected graph of {n} nodes has {degree} neighbours each; degree must be below the number of "
                "nodes, their product even, and degree 1 joins two nodes only"
            )
        rng = np.random.default_rng(seed)
        while True:
            linked = _join_ends(n, degree, rng)
            if linked is not None and reachable(linked).all():
                return linked

    return draw


def _named(name: str, n: int) -> np.ndarray:
    linked, everyone = np.zeros((n, n), bool), np.arange(n)
    if name == "complete":
        linked[:] = True
    elif name == "exponential":
        for shift in shifts(n):
            linked[everyone, (everyone + shift) % n] = True
    elif name == "hypercube":
        if n & (n - 1):
            raise ValueError(f"a hypercube has a power of two of nodes, got {n} workers; use 'torus' or 'complete'")
        for b in range(n.bit_length() - 1):
            linked[everyone, everyone ^ (1 << b)] = True
    else:
        rows, columns = sides(n) if name == "torus" else (1, n)
        row, column = np.divmod(everyone, columns)
        for other in ((row + 1) % rows * columns + column, row * columns + (column + 1) % columns):
            linked[everyone, other] = linked[other, everyone] = True
    np.fill_diagonal(linked, False)
    return linked


def sides(n: int) -> tuple[int, int]:
    """Rows and columns of the most nearly square torus of n nodes."""
    rows = next(r for r in range(int(n**0.5), 0, -1) if n % r == 0)
    return rows, n // rows


def shifts(n: int) -> list[int]:
    """Distances from sender to receiver in the exponential graph of n nodes."""
    return [1 << b for b in range((n - 1).bit_length())]


def _as_array(graph: Edges) -> np.ndarray:
    try:
        array = np.asarray(graph)
    except ValueError:
        array = np.zeros(())
    square = array.dtype == bool and array.ndim == 2 and array.shape[0] == array.shape[1]
    pairs = array.dtype.kind in "iu" and array.ndim == 2 and array.shape[1] == 2
    if not (square or pairs):
        raise TypeError(
            f"graph must be one of {', '.join(NAMES)}, random_regular(degree), pairs of node numbers or a square array "
            f"of bool, got {graph!r}"
        )
    return array


def _from_edges(graph: Edges, n: int) -> np.ndarray:
    array = _as_array(graph)
    if array.dtype == bool:
        if len(array) != n:
            raise ValueError(f"the graph has {len(array)} nodes, but there are {n} workers")
        linked = array.copy()
    else:
        if array.min(initial=0) < 0 or array.max(initial=0) >= n:
            raise ValueError(f"nodes must be numbered from 0 to {n - 1}, got {array.min()} to {array.max()}")
        linked = np.zeros((n, n), bool)
        linked[array[:, 0], array[:, 1]] = linked[array[:, 1], array[:, 0]] = True
    if linked.diagonal().any():
        raise ValueError(f"node {int(linked.diagonal().argmax())} is its own neighbour; leave such edges out")
    return linked


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


def _join_ends(n: int, degree: int, rng: np.random.Generator) -> np.ndarray | None:
    """One attempt at a regular graph. None when the remaining ends do not fit."""
    linked, ends = np.eye(n, dtype=bool), np.repeat(np.arange(n), degree)
    while ends.size:
        order = rng.permutation(ends.size)
        left = []
        for a, b in zip(ends[order[::2]], ends[order[1::2]], strict=True):
            if linked[a, b]:
                left += [a, b]
            else:
                linked[a, b] = linked[b, a] = True
        free = np.unique(left).astype(int)
        if linked[np.ix_(free, free)].all() and free.size:
            return None
        ends = np.array(left, int)
    return linked & ~np.eye(n, dtype=bool)
