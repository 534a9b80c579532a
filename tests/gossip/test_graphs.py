"""Graphs and their weights against definitions written out."""

import itertools

import numpy as np
import pytest
from graph_cases import DIRECTED, STAR, UNDIRECTED, one_way

from gcjax.gossip import random_regular, spectral_gap
from gcjax.gossip._graphs import adjacency, check_graph, mixing_matrix


def pairs_of(graph, n):
    """The edges; undirected ones once, with the smaller node first."""
    linked = adjacency(graph, n)
    return {tuple(e) for e in np.argwhere(np.triu(linked) if (linked == linked.T).all() else linked).tolist()}


def test_named_graphs_have_the_defined_edges():
    assert pairs_of("ring", 5) == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert pairs_of("complete", 6) == set(itertools.combinations(range(6), 2))
    assert pairs_of("hypercube", 8) == {(i, j) for i, j in itertools.combinations(range(8), 2) if i ^ j in (1, 2, 4)}
    torus = set()
    for row, column in itertools.product(range(3), range(4)):
        for other in ((row + 1) % 3 * 4 + column, row * 4 + (column + 1) % 4):
            torus.add(tuple(sorted((row * 4 + column, other))))
    assert pairs_of("torus", 12) == torus
    assert pairs_of("torus", 7) == pairs_of("ring", 7)
    assert pairs_of("exponential", 6) == {(i, (i + shift) % 6) for i in range(6) for shift in (1, 2, 4)}
    assert pairs_of(STAR, 5) == set(STAR)
    assert pairs_of(one_way(4), 4) == {(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)}


@pytest.mark.parametrize(("graph", "n"), [*UNDIRECTED, *DIRECTED[:3]])
def test_weights_are_doubly_stochastic(graph, n):
    weights = mixing_matrix(graph, n)
    assert weights.min() >= 0
    np.testing.assert_allclose([weights.sum(0), weights.sum(1)], 1, atol=1e-12)
    np.testing.assert_array_equal((weights > 0) & ~np.eye(n, dtype=bool), adjacency(graph, n).T)
    if graph != "exponential":
        np.testing.assert_array_equal(weights, weights.T)


def test_irregular_graphs_have_metropolis_weights():
    expected = np.diag([0.2, 0.8, 0.8, 0.8, 0.8])
    expected[0, 1:] = expected[1:, 0] = 0.2
    np.testing.assert_allclose(mixing_matrix(STAR, 5), expected)
    assert np.allclose(mixing_matrix("ring", 5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])


def test_spectral_gaps_match_formulas():
    assert spectral_gap("complete", 9) == pytest.approx(1)
    assert spectral_gap("ring", 1) == pytest.approx(1)
    for n in (8, 20):
        assert spectral_gap("ring", n) == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / n)))
    for d in (1, 3, 5):
        assert spectral_gap("hypercube", 2**d) == pytest.approx(min(2 / (d + 1), 1))
    assert spectral_gap("exponential", 8) == pytest.approx(0.5)


@pytest.mark.parametrize(("degree", "n"), [(2, 7), (3, 12), (6, 20), (1, 2)])
def test_random_regular_graphs_are_regular_and_repeatable(degree, n):
    linked = adjacency(random_regular(degree, seed=2), n)
    assert (linked.sum(0) == degree).all()
    np.testing.assert_array_equal(linked, linked.T)
    np.testing.assert_array_equal(linked, adjacency(random_regular(degree, seed=2), n))
    if n > 7:
        assert (linked != adjacency(random_regular(degree, seed=3), n)).any()


@pytest.mark.parametrize(
    ("graph", "n", "error", "message"),
    [
        ("rng", 4, ValueError, "graph must be one of 'complete'.*got 'rng'"),
        ("hypercube", 6, ValueError, "power of two of nodes, got 6 workers"),
        ([(0, 1), (2, 3)], 4, ValueError, "4 workers is not connected: 0 and 2 cannot"),
        ([(0, 1), (1, 2)], 4, ValueError, "0 and 3 cannot reach each other"),
        (np.triu(np.ones((3, 3), bool), 1), 3, ValueError, "not connected"),
        ([(0, 1), (1, 1)], 2, ValueError, "node 1 is its own neighbour"),
        ([(0, 1), (1, 5)], 3, ValueError, "from 0 to 2, got 0 to 5"),
        ([(-1, 0)], 2, ValueError, "got -1 to 0"),
        (one_way(5), 4, ValueError, "has 5 nodes, but there are 4 workers"),
        (np.eye(3), 3, TypeError, "graph must be one of complete, ring"),
        ([(0, 1, 2)], 3, TypeError, "pairs of node numbers"),
        ([(0, 1), (2,)], 3, TypeError, "pairs of node numbers"),
        (None, 3, TypeError, "got None"),
        (random_regular(3), 5, ValueError, "no connected graph of 5 nodes has 3 neighbours"),
        (random_regular(4), 4, ValueError, "no connected graph of 4"),
        (random_regular(1), 4, ValueError, "no connected graph of 4"),
        ("ring", 0, ValueError, "workers must be at least 1, got 0"),
    ],
)
def test_bad_graphs_raise(graph, n, error, message):
    with pytest.raises(error, match=message):
        adjacency(graph, n)


@pytest.mark.parametrize("graph", ["rng", [(0, 1), (2, 3)], np.eye(4, dtype=bool), np.eye(3), None])
def test_bad_graphs_raise_before_size_is_known(graph):
    with pytest.raises((ValueError, TypeError)):
        check_graph(graph)


def test_weights_of_an_irregular_directed_graph_raise():
    with pytest.raises(ValueError, match="directed and not regular"):
        mixing_matrix(one_way(5), 5)
