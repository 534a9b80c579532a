"""`gossip.simulate`: convergence, random draws, curves and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from graph_cases import TORUS, edges
from selection import cases
from simulated_nodes import KEY, SIZE, least_squares, simulate

import gcjax
from gcjax.gossip._simulate.nodes import make_trainer


def is_usual(algorithm, options):
    usual_graph = "complete" if algorithm == "swarm" else TORUS
    return algorithm == "sgp" or options.get("graph") is usual_graph or "step_seconds" in options


@cases(
    ("algorithm", "options"),
    [
        ("swarm", {"graph": "ring"}),
        ("swarm", {"graph": TORUS, "blocking": True, "local_steps": 2}),
        ("swarm", {"graph": "complete", "bits": 8, "local_steps": 2}),
        ("swarm", {"step_seconds": (0.02, *[0.01] * 8)}),
        ("d_psgd", {"graph": "ring"}),
        ("d_psgd", {"graph": TORUS}),
        ("sgp", {}),
        ("local_sgd", {"local_steps": 4}),
        ("allreduce", {}),
    ],
    default=is_usual,
)
def test_nodes_agree_on_the_solution_of_all_data(algorithm, options):
    nodes = 9
    a, b = least_squares(nodes)
    best = np.linalg.lstsq(a.reshape(-1, SIZE).astype(np.float64), b.ravel(), rcond=None)[0]
    count = 2000 if algorithm == "swarm" else 1000
    tx = optax.sgd(lambda k: 0.2 / (1 + k / 20))  # falls as 1 / k: nodes with fewer steps make larger ones
    curves = simulate(data=(a, b), nodes=nodes, steps=count, algorithm=algorithm, tx=tx, **options)
    apart = np.linalg.norm(b - a @ best, axis=1).min()
    assert apart > 0.3  # no node's own solution is that of all
    distances = np.linalg.norm(curves.metrics - best, axis=1)
    assert distances[0] > 1
    assert distances[-1] < 0.04, distances
    assert curves.consensus_distance[-1] < 0.05


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


def test_equal_keys_give_equal_curves():
    options = {"batch_size": 4}
    first, again = simulate(**options), simulate(**options)
    other = simulate(**options, key=jax.random.key(6))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(first.params, other.params)
    assert not np.array_equal(first.seconds, other.seconds)


def test_batches_come_from_the_nodes_own_samples():
    data = (np.repeat(np.arange(4.0), 50).reshape(4, 50) + np.linspace(0, 0.9, 50)).astype(np.float32)
    settings = {"nodes": 4, "local_steps": 1, "bits": None, "batch_size": 400, "key": KEY}
    trainer = make_trainer(loss_fn=None, params=data[0], tx=None, data=data, **settings)
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
    ("options", "error", "message"),
    [
        ({"nodes": 1}, ValueError, "nodes must be at least 2"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"algorithm": "gossip"}, ValueError, "algorithm must be one of 'swarm'"),
        ({"local_steps": 0}, ValueError, "local_steps must be at least 1, got 0"),
        ({"bits": 3}, ValueError, "bits must be from 4 to 16, got 3"),
        ({"algorithm": "d_psgd", "bits": 8}, ValueError, "options of algorithm='swarm'"),
        ({"algorithm": "allreduce", "local_steps": 2}, ValueError, "use 'local_sgd'"),
        ({"algorithm": "local_sgd", "graph": "ring"}, ValueError, "leave graph out"),
        ({"graph": edges((0, 1), (2, 3), (4, 5))}, ValueError, "not connected"),
        ({"graph": "exponential"}, ValueError, "must be undirected"),
        ({"graph": "exponential", "algorithm": "d_psgd"}, ValueError, "must be undirected"),
        ({"data": np.zeros((4, 5))}, ValueError, r"must begin with \(6 nodes, samples\), got shapes \[\(4, 5\)\]"),
        ({"data": (np.zeros((6, 5)), np.zeros((6, 4)))}, ValueError, r"got shapes \[\(6, 5\), \(6, 4\)\]"),
        ({"data": np.zeros((6, 0))}, ValueError, r"got shapes \[\(6, 0\)\]"),
        ({"data": np.zeros(6)}, ValueError, r"got shapes \[\(6,\)\]"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"step_seconds": (1.0, 2.0)}, ValueError, r"6 of them, one per node, got shape \(2,\)"),
        ({"step_seconds": 0.0}, ValueError, r"step_seconds must be in \(0, inf\)"),
        ({"link": "1Gbot"}, ValueError, "link must be a speed such as"),
        ({"link": gcjax.Link(1e9, 1e-3, efficiency=0.0)}, ValueError, r"link.efficiency must be in \(0, 1\]"),
        ({"link": gcjax.Link(1e9, -1.0)}, ValueError, "link.latency must be in"),
        ({"link": None}, TypeError, "link must be a speed such as .* got None"),
        ({"key": 0}, TypeError, "key must be a key made by"),
        ({"params": np.zeros(3, int)}, TypeError, r"params leaf .* must be floating point, got int32"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        simulate(**options)
