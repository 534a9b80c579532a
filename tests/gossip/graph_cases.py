"""Graphs that several tests share."""

import numpy as np


def edges(*pairs):
    """The array of an undirected graph."""
    linked = np.zeros((np.max(pairs) + 1,) * 2, bool)
    for i, j in pairs:
        linked[i, j] = linked[j, i] = True
    return linked


def one_way(n):
    """A directed ring with one shortcut: not regular."""
    linked = np.roll(np.eye(n, dtype=bool), 1, axis=1)
    linked[0, n // 2] = True
    return linked


STAR = edges((0, 1), (0, 2), (0, 3), (0, 4))
LOLLIPOP = edges((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5))
HYPERCUBE = edges(*[(i, i ^ bit) for i in range(8) for bit in (1, 2, 4)])
TORUS = edges(*[(i, j) for i in range(9) for j in ((i + 3) % 9, i // 3 * 3 + (i + 1) % 3)])
UNDIRECTED = [
    *[("complete", n) for n in (2, 5, 8)],
    *[("ring", n) for n in (2, 3, 5, 8)],
    *[(graph, len(graph)) for graph in (STAR, LOLLIPOP, HYPERCUBE, TORUS)],
]
DIRECTED = [("exponential", 3), ("exponential", 6), ("exponential", 8), (one_way(7), 7)]
