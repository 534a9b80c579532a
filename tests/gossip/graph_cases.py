"""Graphs that the tests of graphs and of matchings share."""

import numpy as np

from gcjax.gossip import random_regular

STAR = [(0, 1), (0, 2), (0, 3), (0, 4)]
LOLLIPOP = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5)]
UNDIRECTED = [
    *[("complete", n) for n in (1, 2, 5, 8)],
    *[("ring", n) for n in (1, 2, 3, 5, 8)],
    *[("torus", n) for n in (1, 6, 7, 9, 16)],
    *[("hypercube", n) for n in (1, 2, 8)],
    (random_regular(3, seed=1), 10),
    (random_regular(4), 9),
    (STAR, 5),
    (LOLLIPOP, 6),
]


def one_way(n):
    """A directed ring with one shortcut: not regular."""
    linked = np.roll(np.eye(n, dtype=bool), 1, axis=1)
    linked[0, n // 2] = True
    return linked


DIRECTED = [("exponential", 3), ("exponential", 6), ("exponential", 8), (one_way(7), 7)]
