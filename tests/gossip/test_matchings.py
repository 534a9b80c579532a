"""Rounds and matchings against their definitions."""

import numpy as np
import pytest
from graph_cases import DIRECTED, HYPERCUBE, TORUS, UNDIRECTED, edges

from gcjax.gossip._graphs import adjacency
from gcjax.gossip._matchings import matchings, rounds

# The bridge is in few maximal matchings.
DOUBLE_STAR = edges((0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6))
STAR_OF_70 = edges(*[(0, i) for i in range(1, 70)])  # each matching is one edge, so it takes 69
BROOM = edges(*[(0, i) for i in range(1, 70)], (69, 70))  # a matching has one edge of the star, and another


@pytest.mark.parametrize(("graph", "n"), [*UNDIRECTED, *DIRECTED])
def test_rounds_use_every_edge_once(graph, n):
    taken, linked = np.zeros((n, n), int), adjacency(graph, n)
    for to in rounds(graph, n):
        senders = np.flatnonzero(to != np.arange(n))
        assert len(set(to[senders])) == len(senders) > 0
        taken[senders, to[senders]] += 1
        if (linked == linked.T).all() and not (isinstance(graph, str) and graph == "exponential"):
            np.testing.assert_array_equal(to[to], np.arange(n))
    np.testing.assert_array_equal(taken, linked)


@pytest.mark.parametrize(
    ("graph", "n", "count"),
    [("complete", 8, 7), ("ring", 8, 2), ("ring", 5, 3), ("exponential", 8, 3), (HYPERCUBE, 8, 3), (TORUS, 9, 5)],
)
def test_regular_graphs_need_few_rounds(graph, n, count):
    assert len(rounds(graph, n)) == count


@pytest.mark.parametrize(
    ("graph", "n"), [*UNDIRECTED, ("exponential", 3), (DOUBLE_STAR, 7), (STAR_OF_70, 70), (BROOM, 71)]
)
def test_matchings_are_maximal_involutions_along_edges(graph, n):
    linked, everyone, seen = adjacency(graph, n), np.arange(n), np.zeros((n, n), bool)
    for partner in matchings(graph, n):
        np.testing.assert_array_equal(partner[partner], everyone)
        paired = partner != everyone
        assert linked[everyone[paired], partner[paired]].all()
        assert not linked[np.ix_(~paired, ~paired)].any()
        seen[everyone, partner] = True
    check_connected = np.linalg.matrix_power((seen | np.eye(n, dtype=bool)).astype(float), n)
    assert (check_connected > 0).all()


@pytest.mark.parametrize(("graph", "n"), [("complete", 5), ("ring", 5)])
def test_each_of_an_odd_number_sits_out_equally_often(graph, n):
    alone = matchings(graph, n) == np.arange(n)
    assert (alone.sum(1) == 1).all()
    assert (alone.sum(0) == 1).all()


def test_tournament_mixes_like_all_perfect_matchings():
    n = 6
    step = np.mean([(np.eye(n) + np.eye(n)[partner]) / 2 for partner in matchings("complete", n)], axis=0)
    np.testing.assert_allclose(step, np.eye(n) / 2 + (1 - np.eye(n)) / (2 * (n - 1)))


def test_64_matchings_of_many_workers_mix_nearly_as_well():
    family = matchings("complete", 100)
    assert len(np.unique(family, axis=0)) == len(family) == 64
    step = np.mean([(np.eye(100) + np.eye(100)[partner]) / 2 for partner in family], axis=0)
    assert 1 - np.linalg.norm(step - 0.01, 2) > 0.4  # 0.505 with all
