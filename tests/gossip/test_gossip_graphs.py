"""Graphs, weights, rounds and matchings, against definitions written out."""

import itertools

import jax
import numpy as np
import pytest

from gcjax.gossip import random_regular, spectral_gap
from gcjax.gossip._graphs import adjacency, check, edges, mixing_matrix, neighbours
from gcjax.gossip._matchings import matchings, random_matching, rounds

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


def pairs_of(graph, n):
    return {tuple(e) for e in edges(graph, n).tolist()}


def test_the_named_graphs_have_the_edges_of_their_definitions():
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


def test_neighbours_are_listed_and_padded_with_the_node():
    table, degree = neighbours(STAR, 5)
    assert table.tolist() == [[1, 2, 3, 4]] + [[0, i, i, i] for i in (1, 2, 3, 4)]
    assert degree.tolist() == [4, 1, 1, 1, 1]


@pytest.mark.parametrize(("graph", "n"), [*UNDIRECTED, *DIRECTED[:3]])
def test_weights_are_not_negative_and_rows_and_columns_sum_to_one(graph, n):
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


def test_spectral_gaps_are_the_known_ones():
    assert spectral_gap("complete", 9) == pytest.approx(1)
    assert spectral_gap("ring", 1) == pytest.approx(1)
    for n in (8, 20):
        assert spectral_gap("ring", n) == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / n)))
    for d in (1, 3, 5):
        assert spectral_gap("hypercube", 2**d) == pytest.approx(min(2 / (d + 1), 1))
    assert spectral_gap("exponential", 8) == pytest.approx(0.5)


@pytest.mark.parametrize(("degree", "n"), [(2, 7), (3, 12), (6, 20), (1, 2)])
def test_random_regular_graphs_are_regular_connected_and_repeatable(degree, n):
    linked = adjacency(random_regular(degree, seed=2), n)
    assert (linked.sum(0) == degree).all()
    np.testing.assert_array_equal(linked, linked.T)
    np.testing.assert_array_equal(linked, adjacency(random_regular(degree, seed=2), n))
    if n > 7:
        assert (linked != adjacency(random_regular(degree, seed=3), n)).any()


@pytest.mark.parametrize(("graph", "n"), [*UNDIRECTED, *DIRECTED])
def test_rounds_take_every_edge_once_and_nobody_receives_twice(graph, n):
    taken = np.zeros((n, n), int)
    for to in rounds(graph, n):
        senders = np.flatnonzero(to != np.arange(n))
        assert len(set(to[senders])) == len(senders) > 0
        taken[senders, to[senders]] += 1
        if not isinstance(graph, np.ndarray) and graph != "exponential":
            np.testing.assert_array_equal(to[to], np.arange(n))
    np.testing.assert_array_equal(taken, adjacency(graph, n))


def test_rounds_are_as_few_as_can_be_for_named_graphs():
    few = {
        ("complete", 8): 7,
        ("ring", 8): 2,
        ("ring", 5): 3,
        ("torus", 16): 4,
        ("hypercube", 8): 3,
        ("exponential", 8): 3,
    }
    assert {case: len(rounds(*case)) for case in few} == few


@pytest.mark.parametrize(("graph", "n"), UNDIRECTED)
def test_matchings_are_involutions_along_edges_to_which_none_can_be_added(graph, n):
    linked, everyone, seen = adjacency(graph, n), np.arange(n), np.zeros((n, n), bool)
    for partner in matchings(graph, n):
        np.testing.assert_array_equal(partner[partner], everyone)
        paired = partner != everyone
        assert linked[everyone[paired], partner[paired]].all()
        assert not linked[np.ix_(~paired, ~paired)].any()
        seen[everyone, partner] = True
    check_connected = np.linalg.matrix_power((seen | np.eye(n, dtype=bool)).astype(float), n)
    assert (check_connected > 0).all()


@pytest.mark.parametrize(("graph", "n"), [("complete", 5), ("ring", 5), ("torus", 7)])
def test_of_an_odd_number_each_sits_out_equally_often(graph, n):
    alone = matchings(graph, n) == np.arange(n)
    assert (alone.sum(1) == 1).all()
    assert (alone.sum(0) == 1).all()


def test_a_tournament_does_in_expectation_what_all_perfect_matchings_do():
    n = 6
    step = np.mean([(np.eye(n) + np.eye(n)[partner]) / 2 for partner in matchings("complete", n)], axis=0)
    np.testing.assert_allclose(step, np.eye(n) / 2 + (1 - np.eye(n)) / (2 * (n - 1)))


def test_of_many_workers_64_matchings_are_taken_that_still_mix_as_well_as_nearly_all():
    family = matchings("complete", 100)
    assert len(np.unique(family, axis=0)) == len(family) == 64
    step = np.mean([(np.eye(100) + np.eye(100)[partner]) / 2 for partner in family], axis=0)
    assert 1 - np.linalg.norm(step - 0.01, 2) > 0.4  # 0.505 with all


@pytest.mark.parametrize(
    ("graph", "n"),
    [
        ("complete", 5),
        (LOLLIPOP, 6),
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("complete", 1), ("complete", 6), ("ring", 7), (STAR, 5)]
        ],
    ],
)
def test_random_matchings_are_maximal_involutions_along_edges_also_in_a_scan(graph, n):
    draw, linked, everyone = random_matching(graph, n), adjacency(graph, n), np.arange(n)
    keys = jax.random.split(jax.random.key(0), 60)
    drawn = np.asarray(jax.jit(lambda keys: jax.lax.scan(lambda c, key: (c, draw(key)), 0, keys)[1])(keys))
    for partner in drawn:
        np.testing.assert_array_equal(partner[partner], everyone)
        paired = partner != everyone
        assert linked[everyone[paired], partner[paired]].all()
        assert not linked[np.ix_(~paired, ~paired)].any()
    if n > 1:
        assert len(np.unique(drawn, axis=0)) > 2
        assert (drawn != everyone).any(0).all()


def test_random_matchings_of_the_complete_graph_are_equally_likely():
    drawn = np.asarray(jax.jit(jax.vmap(random_matching("complete", 4)))(jax.random.split(jax.random.key(1), 3000)))
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(found) == 3
    assert np.abs(counts - 1000).max() < 5 * (3000 * 2 / 9) ** 0.5


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
        (one_way(5), 4, ValueError, "of 5 nodes, but there are 4 workers"),
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
def test_what_is_no_connected_graph_raises(graph, n, error, message):
    with pytest.raises(error, match=message):
        adjacency(graph, n)


@pytest.mark.parametrize("graph", ["rng", [(0, 1), (2, 3)], np.eye(4, dtype=bool), np.eye(3), None])
def test_what_is_wrong_with_any_number_of_workers_is_told_before_it_is_known(graph):
    with pytest.raises((ValueError, TypeError)):
        check(graph)


def test_directed_graphs_raise_where_pairs_or_weights_need_both_ways():
    for call in (matchings, random_matching):
        with pytest.raises(ValueError, match=r"must be undirected, got 'exponential'"):
            call("exponential", 4)
    with pytest.raises(ValueError, match="directed and not regular"):
        mixing_matrix(one_way(5), 5)
