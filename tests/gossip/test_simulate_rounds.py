"""Simulated rounds against loops in NumPy."""

import jax
import numpy as np
import pytest
from simulated_nodes import KEY, MOMENTUM, NODES, RATE, SIZE, Loops, gradient, least_squares, trainer

from gcjax import gossip
from gcjax.gossip._simulate.rounds import round_simulation

ROUNDS = 6


class Rounds:
    """A simulation of least squares, one round at a time."""

    def __init__(self, algorithm, graph, steps, drop=0.0):
        world = gossip.World(drop=drop)
        simulation = round_simulation(trainer(), world, NODES, ROUNDS * steps, algorithm, graph, steps)
        self.state, self._plan, self._advance = simulation.state, simulation.plan, jax.jit(simulation.advance)
        self._round = 0

    def run(self, data):
        self.state = self._advance(self.state, data, self._plan, self._round, self._round + 1)
        self._round += 1
        return self.state


def fails(r, shape, drop):
    """Which exchanges of round r fail, as the simulator draws it."""
    return np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, 1 << 30), r), shape)) < drop


def test_allreduce_takes_the_mean_gradient():
    data, rounds = least_squares(), Rounds("allreduce", "complete", 1)
    x, speed = np.zeros(SIZE), np.zeros(SIZE)
    for _ in range(ROUNDS):
        speed = MOMENTUM * speed + sum(gradient(data, i, x) for i in range(NODES)) / NODES
        x = x - RATE * speed
        np.testing.assert_allclose(rounds.run(data).models, x, rtol=0, atol=1e-5)


def test_local_sgd_averages_models():
    data, rounds = least_squares(), Rounds("local_sgd", "complete", 2)
    loops = Loops(data, np.zeros((NODES, SIZE)))
    for _ in range(ROUNDS):
        loops.live = np.tile(np.mean([loops.train(i, 2) for i in range(NODES)], 0), (NODES, 1))
        np.testing.assert_allclose(rounds.run(data).models, loops.live[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_d_psgd_averages_with_neighbours(drop):
    data, rounds = least_squares(), Rounds("d_psgd", "ring", 2, drop)
    loops, kept = Loops(data, np.zeros((NODES, SIZE))), 0
    for r in range(ROUNDS):
        failed = fails(r, (NODES, NODES), drop)
        x, new = loops.live, np.zeros((NODES, SIZE))
        for i in range(NODES):
            new[i] = x[i] / 3 + loops.train(i, 2) - x[i]
            for j in ((i - 1) % NODES, (i + 1) % NODES):
                source = i if failed[min(i, j), max(i, j)] else j
                kept += source == i
                new[i] += x[source] / 3
        loops.live = new
        np.testing.assert_allclose(rounds.run(data).models, new, rtol=0, atol=1e-5)
    assert bool(kept) == bool(drop)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_sgp_pushes_halves(drop):
    data, rounds = least_squares(), Rounds("sgp", "exponential", 2, drop)
    loops, x, weight, kept = Loops(data, np.zeros((NODES, SIZE))), np.zeros((NODES, SIZE)), np.ones(NODES), 0
    for r in range(ROUNDS):
        failed = fails(r, (NODES,), drop)
        loops.live = x / weight[:, None]
        x = x + [loops.train(i, 2) - loops.live[i] for i in range(NODES)]
        new, new_weight = np.zeros_like(x), np.zeros(NODES)
        for i in range(NODES):
            to = i if failed[i] else (i + 2 ** (r % 3)) % NODES
            kept += to == i
            for receiver in (i, to):
                new[receiver] += x[i] / 2
                new_weight[receiver] += weight[i] / 2
        x, weight = new, new_weight
        state = rounds.run(data)
        np.testing.assert_allclose(state.models, x, rtol=0, atol=1e-5)
        np.testing.assert_allclose(state.weight, weight, rtol=0, atol=1e-6)
        assert abs(float(state.weight.sum()) - NODES) < 1e-5
    assert bool(kept) == bool(drop) == (np.ptp(weight) > 0.1)
