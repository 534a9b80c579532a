"""The simulator's clocks, bits and seconds, counted by hand."""

import numpy as np
import pytest
from simulated_nodes import LINK, NODES, SIZE, simulate

import gcjax
from gcjax._comm.simulated import Transfer
from gcjax.gossip._simulate.schedule import lockstep, pairs

MODEL = 32 * SIZE
PAIR = 0.001 + MODEL / 1e6  # seconds of an exchange of two


def draw(link, step_seconds, steps, message=0, blocking=False):
    rng = np.random.default_rng(0)
    return pairs("complete", link, np.array(step_seconds), steps, 2, message=message, blocking=blocking, rng=rng)


def test_clocks_are_poisson_and_as_fast_as_their_nodes():
    seconds = 64 * [0.01]
    seconds[5] = 0.05
    events = draw(gcjax.Link(1e12, 0.0), seconds, 1000)
    (node, partner), ends = events.plan, events.seconds[1:]
    counts = np.bincount(node, minlength=64)
    fifth = np.delete(counts, 5).mean() / 5
    assert abs(counts[5] - fifth) < 5 * fifth**0.5
    gaps = np.concatenate([np.diff(ends[node == i]) for i in range(64) if i != 5])
    # An exponential law's mean and deviation are equal; 5 standard errors.
    assert abs(gaps.mean() - 0.02) < 5 * 0.02 / len(gaps) ** 0.5
    assert abs(gaps.std() - 0.02) < 5 * 0.02 * (2 / len(gaps)) ** 0.5 * 2
    assert np.all(np.diff(ends) >= 0)
    assert not (node == partner).any()
    chosen = np.bincount(partner, minlength=64)
    assert np.abs(chosen - len(node) / 64).max() < 5 * (len(node) / 64) ** 0.5
    assert 1000 <= events.gradients[-1] < 1000 + 2 / 64 + 1e-9


def test_a_straggler_delays_blocking_pairs_only():
    even, slow = 16 * [0.01], [0.2, *15 * [0.01]]
    rates = {}
    for blocking in (False, True):
        drawn = [draw(LINK, seconds, 250, 320, blocking) for seconds in (even, slow)]
        fast, held_up = (np.delete(np.bincount(e.plan[0], minlength=16), 0).mean() / e.seconds[-1] for e in drawn)
        rates[blocking] = held_up / fast
    assert abs(rates[False] - 1) < 0.05
    assert rates[True] < 0.5
    waited = draw(LINK, even, 250, 320, blocking=True)
    for k in range(16):  # a node starts its local steps again after each meeting
        gaps = np.diff(waited.seconds[1:][(waited.plan == k).any(0)])
        assert gaps.min() > 0.00132 - 1e-9
        assert gaps.mean() > 0.02


def test_rounds_wait_for_the_slowest():
    each = 0.01 + LINK.seconds(Transfer("all_reduce", 4 * SIZE), NODES)
    slow = (0.05, *[0.01] * 5)
    assert np.isclose(simulate(algorithm="allreduce", link=LINK).seconds[-1], 40 * each)
    curves = simulate(algorithm="allreduce", link=LINK, step_seconds=slow)
    assert np.isclose(curves.seconds[-1], 40 * (each + 0.04))
    assert np.allclose(curves.bits, 2 * (NODES - 1) / NODES * MODEL * curves.gradients)


@pytest.mark.parametrize(
    ("algorithm", "graph", "local_steps", "messages", "exchanges"),
    [
        ("d_psgd", "ring", 1, 2, 2),
        ("d_psgd", "complete", 1, 5, 5),
        ("sgp", "exponential", 1, 1 + 1 / SIZE, 1),
        ("allreduce", "complete", 1, 2 * (NODES - 1) / NODES, 3),
        ("local_sgd", "complete", 2, (NODES - 1) / NODES, 1.5),
    ],
)
def test_bits_and_seconds_of_rounds(algorithm, graph, local_steps, messages, exchanges):
    found = lockstep(algorithm, graph, LINK, np.full(NODES, 0.01), 40, local_steps, message=MODEL)
    assert np.allclose(found.bits, messages * MODEL * found.gradients)
    assert np.allclose(found.seconds, (0.01 + exchanges * PAIR) * found.gradients)


def test_bits_of_pairs():
    curves = simulate(link=LINK)
    assert np.array_equal(curves.bits, 2 * MODEL * curves.events / NODES)
    assert curves.gradients.tolist() == [0.0, 20.0, 40.0]
    # A checksum, a scale and 8 masks of 32 bits for a message; 96 bits more for each that is sent again in full.
    curves = simulate(bits=8)
    assert curves.resent[-1] > 0
    assert np.allclose(curves.bits, (2 * (64 + 256) * curves.events + MODEL * curves.resent) / NODES)
