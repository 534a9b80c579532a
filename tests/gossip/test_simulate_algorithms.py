"""Units of the simulator, rounds and meetings, against loops in NumPy and against the transform."""

import functools

import jax
import numpy as np
import optax
import pytest
from gossip_workers import partner_of
from harness import mesh_of
from simulated_nodes import (
    KEY,
    MOMENTUM,
    NODES,
    RATE,
    SIZE,
    STEPS,
    Loops,
    Units,
    gradient,
    least_squares,
    loss_fn,
)

import gcjax
from gcjax import gossip
from gcjax.gossip._graphs import mixing_matrix
from gcjax.gossip._matchings import rounds
from gcjax.gossip._simulate.algorithms import algorithm_of
from gcjax.gossip._simulate.nodes import make_trainer

ROUNDS, MEETINGS, LARGE = 6, 40, 2000


def meetings(count, seed):
    """int32[2, count], pairs of different nodes."""
    rng = np.random.default_rng(seed)
    return np.array([rng.choice(NODES, 2, replace=False) for _ in range(count)], np.int32).T


def test_allreduce_takes_the_mean_gradient():
    data, units = least_squares(), Units("allreduce", local_steps=1)
    x, speed = np.zeros(SIZE), np.zeros(SIZE)
    for r in range(ROUNDS):
        speed = MOMENTUM * speed + sum(gradient(data, i, x) for i in range(NODES)) / NODES
        x = x - RATE * speed
        np.testing.assert_allclose(units.run(data, None, r).models, x, rtol=0, atol=1e-5)


def test_local_sgd_averages_models():
    data, units = least_squares(), Units("local_sgd")
    loops = Loops(data, np.zeros((NODES, SIZE)))
    for r in range(ROUNDS):
        loops.live = np.tile(np.mean([loops.train(i) for i in range(NODES)], 0), (NODES, 1))
        np.testing.assert_allclose(units.run(data, None, r).models, loops.live[0], rtol=0, atol=1e-5)


def test_d_psgd_averages_with_neighbours():
    data, units, plan = least_squares(), Units("d_psgd"), np.float32(mixing_matrix("ring", NODES))
    loops = Loops(data, np.zeros((NODES, SIZE)))
    for r in range(ROUNDS):
        x = loops.live
        loops.live = np.array(
            [(x[i - 1] + x[i] + x[(i + 1) % NODES]) / 3 + loops.train(i) - x[i] for i in range(NODES)]
        )
        np.testing.assert_allclose(units.run(data, plan, r).models, loops.live, rtol=0, atol=1e-5)


def test_sgp_pushes_halves_and_keeps_the_sum_of_weights():
    linked = np.roll(np.eye(NODES, dtype=bool), 1, axis=1)
    linked[0, 3] = True  # a directed ring with a shortcut: the weights become unequal
    data, units, plan = least_squares(), Units("sgp"), rounds(linked, NODES)
    loops, x, weight = Loops(data, np.zeros((NODES, SIZE))), np.zeros((NODES, SIZE)), np.ones(NODES)
    for r in range(ROUNDS):
        loops.live = x / weight[:, None]
        x = x + [loops.train(i) - loops.live[i] for i in range(NODES)]
        new, new_weight = np.zeros_like(x), np.zeros(NODES)
        for i, to in enumerate(plan[r % len(plan)]):
            for receiver in (i, to):
                new[receiver] += x[i] / 2
                new_weight[receiver] += weight[i] / 2
        x, weight = new, new_weight
        state = units.run(data, plan, r)
        np.testing.assert_allclose(state.models, x, rtol=0, atol=1e-5)
        np.testing.assert_allclose(state.weight, weight, rtol=0, atol=1e-6)
        assert abs(float(state.weight.sum()) - NODES) < 1e-5
    assert np.ptp(weight) > 0.1


@pytest.mark.parametrize("blocking", [False, True])
def test_meetings_do_what_loops_do(blocking):
    data, plan = least_squares(), meetings(MEETINGS, 1)
    start = np.random.default_rng(2).normal(size=(NODES, SIZE)).astype(np.float32)
    units, loops = Units("swarm", start, blocking), Loops(data, start)
    for e, (i, j) in enumerate(plan.T):
        state = units.run(data, plan, e)
        (loops.meet_blocking if blocking else loops.meet_non_blocking)(i, j)
        seen = loops.live if blocking else np.concatenate([loops.live, loops.copy])
        np.testing.assert_allclose(state.models, seen, rtol=0, atol=2e-5, err_msg=f"meeting {e}")
    trained = plan if blocking else plan[0]
    np.testing.assert_array_equal(state.done, STEPS * np.bincount(trained.ravel(), minlength=NODES))
    np.testing.assert_allclose(state.opt_state[0].trace, loops.speed, rtol=0, atol=2e-4)


def test_blocking_pairs_do_what_the_transform_does():
    data, key = least_squares(), jax.random.key(2)
    average = gossip.swarm_average(local_steps=STEPS, key=key, axis_name="data")
    step = gcjax.make_train_step(loss_fn, optax.chain(optax.sgd(RATE, momentum=MOMENTUM), average), mesh_of(NODES))
    state = step.init(np.zeros(SIZE, np.float32))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    met = []
    for r in range(4):
        for _ in range(STEPS):
            state, _ = step(state, batch)
        met += [(i, j) for i, j in enumerate(partner_of(NODES, r, key)) if i < j]
    assert len(set(met)) > 3
    units, plan = Units("swarm", blocking=True), np.array(met, np.int32).T
    for e in range(len(met)):
        found = units.run(data, plan, e).models
    np.testing.assert_allclose(found, state.params.stacked(), rtol=0, atol=2e-6)
    assert np.ptp(found, axis=0).max() > 0.01


@functools.cache
def on_lattice(blocking):
    """The first state, and a meeting with 8 bits of models of `LARGE` entries that do not train."""
    nothing = np.zeros((NODES, 1), np.float32)
    arguments = (np.zeros(LARGE, np.float32), optax.sgd(0.0), nothing, NODES, 1, 8, None, KEY)
    state, unit = algorithm_of(make_trainer(lambda x, batch: x.sum(), *arguments), NODES, "swarm", blocking)
    unit = jax.jit(unit)

    def meet(models, plan, e, **fields):
        models = np.concatenate([models[-NODES:]] if blocking else [models[-NODES:]] * 2)
        new = unit(state._replace(models=models, **fields), nothing, plan, e)
        return np.asarray(new.models)[-NODES:], np.asarray(new.distance), int(new.resent)

    return meet


@pytest.mark.parametrize("blocking", [False, True])
def test_lattice_meetings_keep_the_mean(blocking):
    meet, plan = on_lattice(blocking), meetings(12, 3)
    start = np.random.default_rng(0).normal(size=(NODES, LARGE)).astype(np.float32)
    models, distance = start, np.zeros(NODES, np.float32)
    for e in range(12):
        models, distance, _ = meet(models, plan, e, distance=distance)
        np.testing.assert_allclose(models.sum(0, np.float64), start.sum(0, np.float64), rtol=0, atol=2e-6)
    assert not np.allclose(models, start, atol=0.1)


@pytest.mark.parametrize("blocking", [False, True])
def test_lattice_error_is_within_its_bound(blocking):
    meet, plan, rng = on_lattice(blocking), meetings(12, 3), np.random.default_rng(1)
    pair = plan[:, 0]
    start, distance = rng.normal(size=(NODES, LARGE)), np.zeros(NODES, np.float32)
    start[pair] = rng.normal(size=LARGE) + np.array([[0.0], [0.1]]) * rng.uniform(-1, 1, LARGE)
    start = start.astype(np.float32)
    distance[pair] = 0.1, 0.05
    models, distances, resent = meet(start, plan, 0, distance=distance)
    assert resent == 0
    scales = [2.0 ** np.ceil(np.log2(2 * d / 126.5)) for d in (0.1, 0.05)]  # 8 bits decode within 126.5 scales
    error = np.abs(models[pair] - start[pair].mean(0))
    assert 0 < error.max() <= sum(scales) / 2 < 0.002
    seen = np.abs(start[pair[0]] - start[pair[1]]).max()
    assert np.all(np.abs(distances[pair] - max(seen, 0.09)) <= max(scales))
    # Far beyond the margin nothing wrong gets through, both models are sent in full, and the margin grows.
    start[pair[1]] *= 50
    models, distances, resent = meet(start, plan, 0, distance=distance)
    assert resent == 2
    np.testing.assert_allclose(models[pair], np.tile(start[pair].mean(0), (2, 1)), rtol=1e-6)
    assert distances[pair].min() > 50
