"""Graphs and their weights against definitions written out."""

import itertools

import numpy as np
import pytest
from graph_cases import DIRECTED, HYPERCUBE, STAR, UNDIRECTED, edges, one_way

from gcjax.gossip import spectral_gap
from gcjax.gossip._graphs import adjacency, mixing_matrix


def pairs_of(graph, n):
    """The edges; undirected ones once, with the smaller node first."""
    linked = adjacency(graph, n)
    return {tuple(e) for e in np.argwhere(np.triu(linked) if (linked == linked.T).all() else linked).tolist()}


def test_graphs_have_the_defined_edges():
    assert pairs_of("ring", 5) == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert pairs_of("complete", 6) == set(itertools.combinations(range(6), 2))
    assert pairs_of("exponential", 6) == {(i, (i + shift) % 6) for i in range(6) for shift in (1, 2, 4)}
    assert pairs_of(STAR, 5) == {(0, 1), (0, 2), (0, 3), (0, 4)}
    assert pairs_of(one_way(4), 4) == {(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)}


@pytest.mark.parametrize(("graph", "n"), [*UNDIRECTED, *DIRECTED[:3]])
def test_weights_are_doubly_stochastic(graph, n):
    weights = mixing_matrix(graph, n)
    assert weights.min() >= 0
    np.testing.assert_allclose([weights.sum(0), weights.sum(1)], 1, atol=1e-12)
    np.testing.assert_array_equal((weights > 0) & ~np.eye(n, dtype=bool), adjacency(graph, n).T)
    if not isinstance(graph, str) or graph != "exponential":
        np.testing.assert_array_equal(weights, weights.T)


def test_irregular_graphs_have_metropolis_weights():
    expected = np.diag([0.2, 0.8, 0.8, 0.8, 0.8])
    expected[0, 1:] = expected[1:, 0] = 0.2
    np.testing.assert_allclose(mixing_matrix(STAR, 5), expected)
    assert np.allclose(mixing_matrix("ring", 5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])


def test_spectral_gaps_match_formulas():
    assert spectral_gap("complete", 9) == pytest.approx(1)
    for n in (8, 20):
        assert spectral_gap("ring", n) == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / n)))
    assert spectral_gap(HYPERCUBE, 8) == pytest.approx(2 / 4)
    assert spectral_gap("exponential", 8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("graph", "n", "error", "message"),
    [
        ("rng", 4, ValueError, "graph must be one of 'complete'.*got 'rng'"),
        (edges((0, 1), (2, 3)), 4, ValueError, "4 workers is not connected: 0 and 2 cannot"),
        (np.triu(np.ones((3, 3), bool), 1), 3, ValueError, "not connected"),
        (edges((0, 1), (1, 1)), 2, ValueError, "node 1 is its own neighbour"),
        (one_way(5), 4, ValueError, "has 5 nodes, but there are 4 workers"),
        (np.eye(3), 3, TypeError, "graph must be one of complete, ring"),
        (np.eye(3, 4, dtype=bool), 3, TypeError, "a square NumPy array of bool"),
        (np.True_, 3, TypeError, "a square NumPy array of bool"),
        ([(0, 1), (1, 2)], 3, TypeError, "a square NumPy array of bool"),
        (None, 3, TypeError, "got None"),
        ("ring", 0, ValueError, "workers must be at least 1, got 0"),
    ],
)
def test_bad_graphs_raise(graph, n, error, message):
    with pytest.raises(error, match=message):
        adjacency(graph, n)


def test_weights_of_an_irregular_directed_graph_raise():
    with pytest.raises(ValueError, match="directed and not regular"):
        mixing_matrix(one_way(5), 5)
