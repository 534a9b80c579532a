"""Rounds of exchanges on a graph: edges in disjoint rounds, and matchings of pairs. NumPy only."""

import numpy as np

from gcjax.gossip._graphs import Graph, adjacency, is_undirected, reachable, shifts

MOST_MATCHINGS = 64  # each is a branch of the compiled program


def rounds(graph: Graph, n: int) -> np.ndarray:
    """int32[k, n]: in round r node i sends to [r, i], or to nobody if that is i. Every edge is in exactly one round.

    Nobody receives from two nodes in one round. In an undirected graph each round is a matching, so an involution,
    unless the graph is "exponential" of three nodes.
    """
    linked = adjacency(graph, n)
    if isinstance(graph, str) and graph == "exponential":
        return np.array([(np.arange(n) + shift) % n for shift in shifts(n)], np.int32).reshape(-1, n)
    if linked.sum() == n * (n - 1):
        return _tournament(n)
    return _coloured(linked)


def matchings(graph: Graph, n: int) -> np.ndarray:
    """int32[k, n]: matchings `partner` (an involution; partner[i] == i sits out) of an undirected graph.

    An SPMD program draws one of them with equal chances, because a permutation of devices must be known at compile
    time. Every matching is maximal, and together they connect the graph. k is at most 64, unless 64 of them do not
    connect the graph: a star of n nodes needs n - 1. For the complete graph they are a round-robin tournament, for an
    even ring its two halves. If one worker must sit out, it is not always the same one.

    Averaging over a random matching is a projection W. The expected fall of the squared distance from the mean,
    1 - E[W'W] = 1 - E[W], depends only on how often each edge is drawn.

    Raises:
      ValueError: a directed graph.
    """
    linked = adjacency(graph, n)
    if not is_undirected(linked):
        raise ValueError(f"pairs of workers average both ways: the graph must be undirected, got {graph!r}")
    if isinstance(graph, str) and graph == "ring" and n % 2 and n <= MOST_MATCHINGS:
        step = np.arange(n)
        partner = np.where(step == 0, 0, np.where(step % 2, step + 1, step - 1))  # 0 sits out
        return np.array([(np.roll(partner, by) + by) % n for by in range(n)], np.int32)
    family = rounds(linked, n)
    if not all(_is_maximal(linked, partner) for partner in family):
        return _balanced(linked)
    some = family[np.random.default_rng(0).permutation(len(family))[:MOST_MATCHINGS]]
    return some if len(family) > MOST_MATCHINGS and _connects(some) else family


def _tournament(n: int) -> np.ndarray:
    """Round robin: n - 1 rounds, or n rounds in each of which one sits out. The last stays in place, the rest turn."""
    turn = np.arange(n - 1 + n % 2)
    table = np.tile(np.arange(n, dtype=np.int32), (len(turn), 1))
    table[:, : len(turn)] = (2 * turn[:, None] - turn) % len(turn)
    if n % 2 == 0:
        table[turn, turn], table[:, -1] = n - 1, turn
    return table


def _coloured(linked: np.ndarray) -> np.ndarray:
    """Greedy: every edge goes to the first round in which both of its ends are free."""
    n = len(linked)
    undirected = is_undirected(linked)
    table: list[np.ndarray] = []
    for i, j in np.argwhere(np.triu(linked) if undirected else linked):
        for to in table:
            if to[i] == i and not np.any(to[np.arange(n) != j] == j):
                break
        else:
            to = np.arange(n, dtype=np.int32)
            table.append(to)
        to[i] = j
        if undirected:
            to[j] = i
    return np.array(table, np.int32).reshape(-1, n)


def _is_maximal(linked: np.ndarray, partner: np.ndarray) -> bool:
    alone = partner == np.arange(len(partner))
    return not linked[np.ix_(alone, alone)].any()


def _balanced(linked: np.ndarray) -> np.ndarray:
    """Maximal matchings that prefer edges never used, then nodes that sat out often and edges used seldom."""
    n, rng, ends = len(linked), np.random.default_rng(0), np.argwhere(np.triu(linked))
    used, sat_out = np.zeros(len(ends)), np.zeros(n)
    family: list[np.ndarray] = []
    least = min(2 * linked.sum(1).max(), MOST_MATCHINGS)
    while len(family) < least or not _connects(np.array(family)):
        partner = np.arange(n, dtype=np.int32)
        for e in np.lexsort((used - sat_out[ends].sum(1) + rng.random(len(ends)), used > 0)):
            i, j = ends[e]
            if partner[i] == i and partner[j] == j:
                partner[i], partner[j] = j, i
                used[e] += 1
        sat_out += partner == np.arange(n)
        family.append(partner)
    return np.array(family)


def _connects(family: np.ndarray) -> bool:
    linked = np.zeros((family.shape[1],) * 2, bool)
    for partner in family:
        linked[np.arange(len(partner)), partner] = True
    return bool(reachable(linked).all())
