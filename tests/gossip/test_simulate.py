"""`gossip.simulate`: convergence, single nodes, random draws, curves and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from selection import cases
from simulated_nodes import KEY, RATE, SIZE, gradient, least_squares, simulate

import gcjax
from gcjax import gossip
from gcjax.gossip._simulate.nodes import make_trainer


@cases(
    ("algorithm", "options"),
    [
        ("swarm", {"graph": "complete", "bits": 8, "local_steps": 2}),
        ("swarm", {"graph": "ring"}),
        ("swarm", {"graph": "torus", "blocking": True, "local_steps": 2, "geometric": True}),
        ("swarm", {"world": gossip.World(step_seconds=(0.02, *[0.01] * 8), delay=0.01, drop=0.1)}),
        ("ad_psgd", {"graph": "torus"}),
        ("d_psgd", {"graph": "ring"}),
        ("d_psgd", {"graph": "torus", "world": gossip.World(drop=0.2)}),
        ("sgp", {"world": gossip.World(drop=0.2)}),
        ("local_sgd", {"local_steps": 4}),
        ("allreduce", {}),
    ],
    default=1,
)
def test_nodes_agree_on_the_solution_of_all_data(algorithm, options):
    nodes = 9
    a, b = least_squares(nodes)
    best = np.linalg.lstsq(a.reshape(-1, SIZE).astype(np.float64), b.ravel(), rcond=None)[0]
    count = 4000 if algorithm in ("swarm", "ad_psgd") else 1000
    tx = optax.sgd(lambda k: 0.2 / (1 + k / 20))  # falls as 1 / k: nodes with fewer steps make larger ones
    curves = simulate(data=(a, b), nodes=nodes, steps=count, algorithm=algorithm, tx=tx, **options)
    apart = np.linalg.norm(b - a @ best, axis=1).min()
    assert apart > 0.3  # no node's own solution is that of all
    distances = np.linalg.norm(curves.metrics - best, axis=1)
    assert distances[0] > 1
    assert distances[-1] < 0.04, distances
    assert curves.consensus_distance[-1] < 0.05


def test_failed_exchanges_change_nothing_and_cost_bits():
    always, never = simulate(nodes=2), simulate(nodes=2, world=gossip.World(drop=1 - 1e-12))
    data = least_squares(2)
    alone = [np.zeros(SIZE), np.zeros(SIZE)]
    for i, steps in enumerate(never.steps):
        for _ in range(steps):
            alone[i] = alone[i] - RATE * gradient(data, i, alone[i])
    np.testing.assert_allclose(never.params, np.mean(alone, 0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(never.consensus_distance[-1], np.linalg.norm(alone[0] - alone[1]) / 2, rtol=1e-4)
    assert never.bits[-1] == 64 * SIZE * never.events[-1] / 2
    assert always.consensus_distance[-1] < 0.2 * never.consensus_distance[-1]


@cases(
    "algorithm",
    ["swarm", "allreduce", "local_sgd", "d_psgd", "sgp"],
    default=lambda algorithm: algorithm in ("swarm", "allreduce"),
)
def test_models_in_bfloat16_are_trained(algorithm):
    start = np.ones(SIZE, jnp.bfloat16)
    curves = simulate(algorithm=algorithm, params=start, tx=optax.sgd(0.1))
    assert curves.params.dtype == jnp.bfloat16
    assert np.abs(np.float32(curves.params) - 1).max() > 0.05


def test_models_that_hardly_move_need_no_second_message():
    curves = simulate(nodes=4, params=np.ones(SIZE, np.float32), tx=optax.sgd(1e-6), bits=16)
    assert curves.resent[-1] == 0


@cases(
    "algorithm",
    ["swarm", "d_psgd", "sgp", "ad_psgd", "local_sgd", "allreduce"],
    default=lambda algorithm: algorithm in ("swarm", "d_psgd", "sgp"),
)
def test_a_single_node_takes_plain_steps_and_sends_nothing(algorithm):
    data, x = least_squares(1), np.zeros(SIZE)
    for _ in range(10):
        x = x - RATE * gradient(data, 0, x)
    curves = simulate(nodes=1, steps=10, algorithm=algorithm)
    np.testing.assert_allclose(curves.params, x, rtol=0, atol=1e-5)
    assert curves.bits[-1] == 0
    assert curves.steps.tolist() == [10]


def test_equal_keys_give_equal_curves():
    options = {"batch_size": 4, "world": gossip.World(drop=0.1, delay=0.01)}
    first, again = simulate(**options), simulate(**options)
    other = simulate(**options, key=jax.random.key(6))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(first.params, other.params)
    assert not np.array_equal(first.seconds, other.seconds)


def test_batches_come_from_the_nodes_own_samples():
    data = (np.repeat(np.arange(4.0), 50).reshape(4, 50) + np.linspace(0, 0.9, 50)).astype(np.float32)
    trainer = make_trainer(loss_fn=None, params=data[0], tx=None, data=data, nodes=4, batch_size=400, key=KEY)
    batches = jax.vmap(jax.vmap(trainer.batch, (None, None, 0)), (None, 0, None))
    found = np.asarray(jax.jit(batches)(data, np.arange(4), np.arange(2)))
    assert (found.astype(int) == np.arange(4)[:, None, None]).all()
    chosen = np.round((found - np.arange(4)[:, None, None]) * 49 / 0.9).astype(int)
    assert len({tuple(draw) for draw in chosen.reshape(8, -1)}) == 8
    assert np.abs(np.bincount(chosen.ravel(), minlength=50) - 64).max() < 5 * 8


def test_progress_is_reported_and_metrics_may_be_a_tree():
    reports = []
    curves = simulate(
        evaluate=lambda x: {"norm": jnp.linalg.norm(x)}, moments=4, progress=lambda *at: reports.append(at)
    )
    assert reports == [(int(e), int(curves.events[-1])) for e in curves.events]
    assert len(reports) == 5
    assert curves.metrics["norm"].shape == (5,)
    assert np.isclose(curves.metrics["norm"][-1], np.linalg.norm(curves.params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"algorithm": "gossip"}, "algorithm must be one of 'swarm'"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"bits": 3}, "bits must be from 4 to 16, got 3"),
        ({"algorithm": "d_psgd", "bits": 8}, "options of algorithm='swarm'"),
        ({"algorithm": "ad_psgd", "local_steps": 2}, "use 'swarm'"),
        ({"algorithm": "allreduce", "local_steps": 2}, "use 'local_sgd'"),
        ({"algorithm": "local_sgd", "graph": "ring"}, "leave graph out"),
        ({"graph": [(0, 1), (2, 3), (4, 5)]}, "not connected"),
        ({"graph": "exponential"}, "must be undirected"),
        ({"graph": "exponential", "algorithm": "d_psgd"}, "must be undirected"),
        ({"data": np.zeros((4, 5))}, r"has shape \(4, 5\); it must begin with \(6 nodes, samples\)"),
        ({"data": (np.zeros((6, 5)), np.zeros((6, 4)))}, r"same number of samples per node, got \[4, 5\]"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"world": gossip.World(step_seconds=(1.0, 2.0))}, r"6 of them, one per node, got shape \(2,\)"),
        ({"world": gossip.World(step_seconds=0.0)}, r"step_seconds must be in \(0, inf\)"),
        ({"world": gossip.World(drop=1.0)}, r"drop must be in \[0, 1\)"),
        ({"world": gossip.World(delay=-1.0)}, "delay must be in"),
        ({"world": gossip.World(gcjax.Link(1e9, 1e-3, efficiency=0.0))}, r"efficiency must be in \(0, 1\]"),
    ],
)
def test_bad_values_raise(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": {"drop": 0.1}}, r"world must be a gcjax\.gossip\.World, got \{'drop': 0\.1\}"),
        ({"world": gossip.World("1Gbit")}, r"link must be a gcjax\.Link, got '1Gbit'"),
        ({"key": 0}, "key must be a key made by"),
        ({"params": np.zeros(3, int)}, r"params leaf .* must be floating point, got int32"),
    ],
)
def test_bad_types_raise(options, message):
    with pytest.raises(TypeError, match=message):
        simulate(**options)
