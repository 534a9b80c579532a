"""The simulator's clocks, bits and seconds, counted by hand."""

import numpy as np
import pytest
from simulated_nodes import LINK, NODES, SIZE, simulate, trainer

import gcjax
from gcjax import gossip
from gcjax._comm.simulated import Transfer
from gcjax.gossip._simulate.clocks import meetings
from gcjax.gossip._simulate.rounds import round_simulation


def draw(world, nodes=64, gradients=20_000, **options):
    given = {"local_steps": 2, "geometric": False, "blocking": False, "bits": 0, "rng": np.random.default_rng(0)}
    return meetings(world, "complete", nodes, gradients, **(given | options))


@pytest.mark.parametrize("geometric", [False, True])
def test_clocks_are_poisson_and_as_fast_as_their_nodes(geometric):
    seconds = 64 * [0.01]
    seconds[5] = 0.05
    world = gossip.World(gcjax.Link(1e12, 0.0), tuple(seconds))
    events = draw(world, gradients=60_000, geometric=geometric)
    counts = np.bincount(events.node, minlength=64)
    fifth = np.delete(counts, 5).mean() / 5
    assert abs(counts[5] - fifth) < 5 * fifth**0.5
    gaps = np.concatenate([np.diff(events.seconds[events.node == i]) for i in range(64) if i != 5])
    # An exponential law's mean and deviation are equal; 5 standard errors.
    assert abs(gaps.mean() - 0.02) < 5 * 0.02 / len(gaps) ** 0.5
    assert abs(gaps.std() - 0.02) < 5 * 0.02 * (2 / len(gaps)) ** 0.5 * 2
    assert np.all(np.diff(events.seconds) >= 0)
    assert not (events.node == events.partner).any()
    chosen = np.bincount(events.partner, minlength=64)
    assert np.abs(chosen - len(events.node) / 64).max() < 5 * (len(events.node) / 64) ** 0.5
    own = events.steps[:, 0]
    assert own.sum() + events.steps[:, 1].sum() >= 60_000 > own[:-64].sum()
    if geometric:
        assert abs(own.mean() - 2) < 0.1
        assert abs((own == 1).mean() - 0.5) < 0.03
    else:
        assert (own == 2).all()


def test_a_straggler_delays_blocking_pairs_only():
    even, slow = gossip.World(LINK), gossip.World(LINK, (0.2, *[0.01] * 15))
    rates = {}
    for blocking in (False, True):
        drawn = [draw(world, 16, 4000, bits=320, blocking=blocking) for world in (even, slow)]
        fast, held_up = (np.delete(np.bincount(e.node, minlength=16), 0).mean() / e.seconds[-1] for e in drawn)
        rates[blocking] = held_up / fast
    assert abs(rates[False] - 1) < 0.05
    assert rates[True] < 0.5
    waited = draw(even, 16, 4000, bits=320, blocking=True)
    for k in range(16):  # a node starts its local steps again after each meeting
        gaps = np.diff(waited.seconds[(waited.node == k) | (waited.partner == k)])
        assert gaps.min() > 0.00132 - 1e-9
        assert gaps.mean() > 0.02


def test_exchanges_fail_with_probability_drop():
    events = draw(gossip.World(drop=0.3))
    assert abs(events.meets.mean() - 0.7) < 5 * (0.21 / len(events.meets)) ** 0.5


def rounds(world, algorithm="allreduce", graph="complete", local_steps=1):
    return round_simulation(trainer(), world, NODES, 40, algorithm, graph, local_steps)


def test_rounds_wait_for_the_slowest():
    each = 0.01 + LINK.seconds(Transfer("all_reduce", 4 * SIZE), NODES)
    assert np.isclose(rounds(gossip.World(LINK)).seconds[-1], 40 * each)
    slow = gossip.World(LINK, (0.05, *[0.01] * 5))
    assert np.isclose(rounds(slow).seconds[-1], 40 * (each + 0.04))
    curves = simulate(algorithm="allreduce", world=slow)
    assert np.isclose(curves.seconds[-1], 40 * (each + 0.04))
    assert np.allclose(curves.bits, 2 * (NODES - 1) / NODES * 32 * SIZE * curves.gradients)
    assert curves.steps.tolist() == [40] * NODES


@pytest.mark.parametrize(
    ("options", "messages", "exchanges"),
    [
        ({"algorithm": "d_psgd", "graph": "ring"}, 2, 2),
        ({"algorithm": "d_psgd", "graph": "complete"}, 5, 5),
        ({"algorithm": "sgp", "graph": "exponential"}, 1 + 1 / SIZE, 1),
        ({"algorithm": "allreduce"}, 2 * (NODES - 1) / NODES, 3),
        ({"algorithm": "local_sgd", "local_steps": 2}, (NODES - 1) / NODES, 1.5),
    ],
)
def test_bits_and_seconds_of_rounds(options, messages, exchanges):
    model = 32 * SIZE
    pair = 0.003 + model / 1e6
    simulation = rounds(gossip.World(LINK, delay=0.002), **options)
    assert np.allclose(simulation.bits, messages * model * simulation.gradients)
    assert np.allclose(simulation.seconds, (0.01 + exchanges * pair) * simulation.gradients)


def test_lost_all_reduces_are_sent_again():
    world = gossip.World(LINK, delay=0.002)
    lossy = rounds(world._replace(drop=0.5))
    assert np.isclose(lossy.bits[-1], 2 * rounds(world).bits[-1])
    assert np.isclose(lossy.seconds[-1], 40 * (0.01 + 6 * (0.003 + 32 * SIZE / 1e6)))


def test_bits_of_pairs():
    curves = simulate(world=gossip.World(LINK, delay=0.002))
    assert np.array_equal(curves.bits, 2 * 32 * SIZE * curves.events / NODES)
    assert curves.gradients.tolist() == [0.0, 20.0, 40.0]
    # A checksum, a scale and 8 masks of 32 bits for a message; 96 bits more for each that is sent again in full.
    curves = simulate(bits=8)
    assert curves.resent[-1] > 0
    assert np.allclose(curves.bits, (2 * (64 + 256) * curves.events + 32 * SIZE * curves.resent) / NODES)
