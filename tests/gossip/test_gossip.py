"""Gossip on a mesh, against loops over the workers in numpy; what moves, read from the compiled programs."""

import doctest
import functools
import math
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax import gossip
from gcjax._core.per_worker import PerWorker
from gcjax.gossip._graphs import mixing_matrix
from gcjax.gossip._lattice import scale_for
from gcjax.gossip._matchings import matchings, rounds

KEY = jax.random.key(7)
SHAPES = {"a": (40,), "b": (3, 5)}  # in a bucket of 64 + 15 entries
BUCKET = 79
STAR = [(0, 1), (0, 2), (0, 3), (0, 4)]
ONE_WAY = np.roll(np.eye(5, dtype=bool), 1, axis=1)
ONE_WAY[0, 2] = ONE_WAY[1, 4] = True  # a directed ring with shortcuts
DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Workers:
    """Steps of a gossip transform on a mesh; params and updates are dicts of numpy arrays (workers, *shape)."""

    def __init__(self, tx, workers):
        self.workers = workers
        state = tx.init({k: jnp.zeros(shape) for k, shape in SHAPES.items()})
        self.start = gcjax.place(state, mesh_of(workers))
        specs = (P("data"), P("data"), gcjax.state_specs(state))

        def step(params, updates, state):
            own = jax.tree.map(lambda x: x[0], (params, updates))
            new, state = tx.update(own[1], state, own[0])
            return jax.tree.map(lambda x: x[None], optax.apply_updates(own[0], new)), state

        self._step = jax.jit(
            jax.shard_map(step, mesh=mesh_of(workers), in_specs=specs, out_specs=(P("data"), specs[2]))
        )
        self.restart()

    def restart(self):
        self.state = self.start
        return self

    def step(self, params, updates=None):
        updates = jax.tree.map(np.zeros_like, params) if updates is None else updates
        params, self.state = jax.block_until_ready(self._step(params, updates, self.state))
        return jax.tree.map(np.asarray, params)

    def info(self):
        return gossip.info(self.state)

    def moved(self):
        """Collectives of the compiled program: kind, dtype, elements, and the computation they are in."""
        zeros = stacks(self.workers, lambda size: np.zeros(size))
        text, found, computation = self._step.lower(zeros, zeros, self.state).compile().as_text(), [], ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                computation = line.split()[0]
            if match := re.search(r"= (.*) (all-\w+|reduce-scatter|collective-\w+)(-start)?\(", line):
                (dtype, dims) = re.fullmatch(r"(\w+)\[([0-9,]*)\]\S*", match[1]).groups()
                elements = math.prod(int(d) for d in dims.split(",") if d)
                found.append(SimpleNamespace(kind=match[2], what=(dtype, elements), place=computation))
        return found


def stacks(workers, draw):
    return {k: draw((workers, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def dyadic(workers, seed=0):
    """Numbers whose sums and halves float32 holds exactly."""
    rng = np.random.default_rng(seed)
    return stacks(workers, lambda size: rng.integers(-512, 513, size) / 64)


def normal(workers, seed=0, mean=0.0, size=1.0):
    rng = np.random.default_rng(seed)
    return stacks(workers, lambda shape: mean + size * rng.normal(size=shape))


def totals(params):
    return {k: x.astype(np.float64).sum(0) for k, x in params.items()}


def same(got, expected, **tolerance):
    for k in SHAPES:
        np.testing.assert_allclose(got[k], expected[k], **{"rtol": 0, "atol": 0, **tolerance})


def partner_of(graph, workers, number):
    family = matchings(graph, workers)
    return family[int(jax.random.randint(jax.random.fold_in(KEY, number), (), 0, len(family)))]


@functools.cache
def swarm(workers, bits=None, local_steps=1, graph="complete"):
    return Workers(gossip.swarm_average(local_steps, bits, graph, key=KEY, axis_name="data"), workers)


@pytest.mark.parametrize("workers", [8, 5])
def test_every_second_update_leaves_pairs_at_their_mean_and_the_mean_of_all_as_it_was_to_the_bit(workers):
    run = swarm(workers, local_steps=2).restart()
    params, took_part, sat_out = dyadic(workers), np.zeros(workers, int), set()
    for step in range(12):
        updates = dyadic(workers, step)
        expected = {k: params[k] + updates[k] for k in SHAPES}
        partner = partner_of("complete", workers, step // 2) if step % 2 else np.arange(workers)
        sat_out |= set(np.flatnonzero(partner == np.arange(workers))) if step % 2 else set()
        averaged = {k: (x + x[partner]) / 2 for k, x in expected.items()}
        params = run.step(params, updates)
        same(params, averaged)
        same(totals(params), totals(expected))
        took_part += partner != np.arange(workers)
        np.testing.assert_array_equal(run.info().bits_last, 32 * BUCKET * (partner != np.arange(workers)))
        params = {k: np.round(x * 64) / 64 for k, x in params.items()}  # or they would need ever more digits
    assert len(sat_out) > 1 if workers % 2 else not sat_out
    info = run.info()
    np.testing.assert_array_equal(info.exchanges, took_part)
    np.testing.assert_array_equal(info.bits, 32 * BUCKET * took_part)
    assert (info.step, info.failures) == (12, 0)
    assert run._step._cache_size() == 1


def test_an_exchange_moves_one_model_and_the_updates_between_nothing():
    moved = swarm(8, local_steps=2).moved()
    assert len(moved) == 7  # a branch for each matching
    assert {c.kind for c in moved} == {"collective-permute"}
    assert {c.what for c in moved} == {("f32", BUCKET)}
    assert len({c.place for c in moved} - {"ENTRY"}) == 7


def test_on_the_lattice_an_exchange_moves_bits_and_one_small_agreement_and_the_model_only_on_failure():
    run = swarm(8, bits=8).restart()
    moved = run.moved()
    words = 1 + 8 * 32
    packed = [c for c in moved if c.what == ("u32", words)]
    whole = [c for c in moved if c.what == ("f32", BUCKET)]
    agreements = [c for c in moved if c.kind == "all-reduce"]
    assert len(packed) == len(whole) == 7
    assert sorted(c.what for c in agreements) == [("f32", 2), ("f32", 3)]  # with a leaf's reach each, one with the flag
    assert len(moved) == 16
    agreement = {c.what[1]: c.place for c in agreements}
    assert agreement[3] == "ENTRY"
    assert agreement[2] != "ENTRY"
    assert "ENTRY" not in {c.place for c in packed + whole}
    params = normal(8)
    bits = []
    for _ in range(3):
        params = run.step(params)
        bits.append(run.info().bits_last)
    # A ring all-reduce of m words sends 14 m / 8 of them.
    np.testing.assert_array_equal(bits[0], 32 * (words + 6 + BUCKET + 4))
    np.testing.assert_array_equal(bits[1:], np.full((2, 8), 32 * (words + 6)))
    np.testing.assert_array_equal(run.info().bits, sum(bits))


def test_on_the_lattice_the_mean_is_kept_and_the_error_goes_with_the_distance_not_with_the_size():
    run = swarm(8, bits=8).restart()
    params = normal(8, mean=1000.0, size=0.01)
    before = totals(params)
    first = run.step(params)  # in full precision, no distance being known
    partner = partner_of("complete", 8, 0)
    same(first, {k: (x + x[partner]) / 2 for k, x in params.items()}, atol=1e-4)
    assert run.info().failures == 0
    params, worst = first, 0.0
    for number in range(1, 10):
        partner = partner_of("complete", 8, number)
        far = max(np.abs(x - x[partner]).max() for x in params.values())
        new = run.step(params)
        error = max(
            np.abs(new[k].astype(np.float64) - (x + x[partner].astype(np.float64)) / 2).max() for k, x in params.items()
        )
        assert error <= 0.01 * 5 * 4 * 2 / 126 + 1e-4
        worst = max(worst, error / max(far, 1e-3))
        params = new
    assert worst > 0
    assert run.info().failures == 0
    for k, total in totals(params).items():
        assert np.abs(total - before[k]).max() < 1e-3  # of 8000, in float32


def test_on_the_lattice_what_one_gains_the_other_loses_to_the_bit():
    run = swarm(8, bits=4).restart()
    params = dyadic(8)
    params = run.step(params)
    for number in range(1, 6):
        new = run.step(params)
        partner = partner_of("complete", 8, number)
        for k, x in params.items():
            change = new[k].astype(np.float64) - x
            np.testing.assert_array_equal(change, -change[partner])
            assert change.any()
        params = {k: np.round(x * 64) / 64 for k, x in new.items()}
    assert run.info().failures == 0


def test_on_the_lattice_every_leaf_has_a_scale_for_its_own_distances():
    run = swarm(8, bits=8).restart()
    params = normal(8)
    params["b"] *= 1e-4
    params = run.step(params)
    new, partner = run.step(params), partner_of("complete", 8, 1)
    for k, x in params.items():
        error = np.abs(new[k] - (x + x[partner]) / 2).max()
        assert 0 < error < 8 * np.abs(x).max() / 126
    assert run.info().failures == 0


def test_on_the_lattice_models_that_agree_stay_as_they_are_to_the_bit():
    run = swarm(8, bits=8).restart()
    run.step(normal(8))  # the scale is for such distances
    params = {k: np.broadcast_to(x[:1], x.shape) for k, x in normal(8, 1).items()}
    same(run.step(params), params)  # both round alike


def test_on_the_lattice_the_mean_of_many_roundings_is_the_mean_of_the_pair():
    steps, workers = 400, 2
    tx = gossip.swarm_average(1, 4, key=KEY, axis_name="data")
    params = normal(workers)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh_of(workers), in_specs=(P("data"), P()), out_specs=P("data"))
    def draws(params, numbers):
        own = jax.tree.map(lambda x: x[0], params)
        start = gossip.GossipState(jnp.int32(0), tx.init(own).traffic, (jnp.full(2, 4.0),))

        def once(_, number):
            state = jax.tree.map(lambda x: x, start._replace(step=number + 1))
            zeros = jax.tree.map(jnp.zeros_like, own)
            return 0, tx.update(zeros, state, own)[0]

        return jax.tree.map(lambda x: x[None], jax.lax.scan(once, 0, numbers)[1])

    changes = jax.block_until_ready(draws(params, jnp.arange(steps)))
    scale = float(scale_for(jnp.float32(4.0), 4))
    for k, x in params.items():
        expected = (x[::-1].astype(np.float64) - x) / 2
        error = np.asarray(changes[k], np.float64).mean(1) - expected
        assert np.abs(error).max() < 5 * scale / 4 / steps**0.5  # a rounded difference has at most half a scale, halved
        assert np.abs(np.asarray(changes[k][:, 0]) - expected).max() > 0.05 * scale


def test_a_model_too_far_away_is_noticed_by_all_and_averaged_in_full_precision():
    run = swarm(8, bits=8).restart()
    params = run.step(run.step(normal(8, size=0.01)))
    assert run.info().failures == 0
    for failures, (worker, k, jump) in enumerate([(3, "a", 1.0), (6, "b", -1e4)], start=1):
        params = jax.tree.map(np.copy, params)
        params[k][worker].flat[7] += np.float32(jump)
        partner = partner_of("complete", 8, run.info().step)
        expected = {k: (x + x[partner]) / 2 for k, x in params.items()}
        params = run.step(params)
        same(params, expected, rtol=1e-6, atol=1e-7)
        assert run.info().failures == failures
        assert (run.info().bits_last > 32 * BUCKET).all()
        for _ in range(2):  # the scale has grown with it
            params = run.step(params)
            assert run.info().failures == failures


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_partner_and_nobody_else_and_leaves_the_scales_alone(bad):
    run = swarm(8, bits=8).restart()
    params = run.step(run.step(normal(8)))
    before = run.state.method
    good, params = params, jax.tree.map(np.copy, params)
    params["a"][2, 5] = bad
    partner = partner_of("complete", 8, 2)
    got = run.step(params)
    assert {w for w in range(8) if not np.isfinite(got["a"][w]).all()} == {2, partner[2]}
    assert run.info().failures == 1
    assert all(
        np.isfinite(r).all() and (np.asarray(r) >= 0.79 * np.asarray(b)).all()
        for r, b in zip(run.state.method, before, strict=True)
    )
    run.step(good)
    assert run.info().failures == 1


@pytest.mark.parametrize(("graph", "workers"), [("ring", 5), (STAR, 5), ("complete", 3), ("exponential", 6)])
def test_d_psgd_is_a_product_with_the_mixing_matrix_plus_the_local_update(graph, workers):
    run = Workers(gossip.d_psgd(graph, axis_name="data"), workers)
    weights, params = mixing_matrix(graph, workers), normal(workers, 1)
    for step in range(3):
        updates = normal(workers, 2 + step)
        expected = {k: np.tensordot(weights, x.astype(np.float64), 1) + updates[k] for k, x in params.items()}
        total = totals({k: x + updates[k].astype(np.float64) for k, x in params.items()})
        params = run.step(params, updates)
        same(params, expected, atol=2e-6)
        same(totals(params), total, atol=1e-5)
    moved, info = run.moved(), run.info()
    if graph == "complete":
        assert [(c.kind, c.what) for c in moved] == [("all-reduce", ("f32", BUCKET))]
        np.testing.assert_array_equal(info.bits, 3 * 32 * np.full(3, -(-4 * BUCKET // 3)))
        return
    assert {(c.kind, c.what) for c in moved} == {("collective-permute", ("f32", BUCKET))}
    assert len(moved) == len(rounds(graph, workers))
    degree = ((weights > 0).sum(0) - 1) * 3
    np.testing.assert_array_equal(info.bits, 32 * BUCKET * degree)


def test_push_sum_keeps_the_sum_of_weights_and_finds_the_mean_on_a_graph_that_is_not_regular():
    run = Workers(gossip.sgp(ONE_WAY, axis_name="data"), 5)
    plan = rounds(ONE_WAY, 5)
    z = normal(5, 3)
    x, w = {k: v.astype(np.float64) for k, v in z.items()}, np.ones(5)
    for step in range(2 * len(plan)):
        updates = normal(5, 10 + step)
        to = plan[step % len(plan)]
        x = {k: v + updates[k] for k, v in x.items()}
        pushed, weights = {k: np.zeros_like(v) for k, v in x.items()}, np.zeros(5)
        for i in range(5):
            share = 1.0 if to[i] == i else 0.5
            for j in {i, int(to[i])}:
                weights[j] += share * w[i]
                for k in x:
                    pushed[k][j] += share * x[k][i]
        x, w = pushed, weights
        z = run.step(z, updates)
        same(z, {k: v / w.reshape(-1, *[1] * (v.ndim - 1)) for k, v in x.items()}, atol=1e-5)
        info = run.info()
        np.testing.assert_allclose(info.weights, w, rtol=1e-6)
        assert info.weights.sum() == pytest.approx(5, rel=1e-6)
        np.testing.assert_array_equal(info.bits_last, 32 * (BUCKET + 1) * (to != np.arange(5)))
    assert np.ptp(w) > 0.3
    mean = {k: np.tensordot(w, v.astype(np.float64), 1) / 5 for k, v in z.items()}
    same(gossip.mean_params(z, info.weights), mean, atol=1e-6)
    for _ in range(80):
        z = run.step(z)
    same(z, {k: np.broadcast_to(v, z[k].shape) for k, v in mean.items()}, atol=1e-5)


def test_on_the_exponential_graph_three_pushes_average_eight_workers_to_the_bit():
    run = Workers(gossip.sgp(axis_name="data"), 8)
    start = params = dyadic(8)
    for _ in range(3):
        params = run.step(params)
    same(params, {k: np.broadcast_to(x.mean(0, dtype=np.float64), x.shape) for k, x in start.items()})
    np.testing.assert_array_equal(run.info().weights, 1)
    moved = run.moved()
    assert {(c.kind, c.what) for c in moved} == {("collective-permute", ("f32", BUCKET + 1))}
    assert len({c.place for c in moved} - {"ENTRY"}) == 3


def test_local_sgd_averages_all_models_once_in_three_updates():
    run = Workers(gossip.local_sgd(3, axis_name="data"), 4)
    params = dyadic(4)
    for step in range(6):
        updates = dyadic(4, 1 + step)
        expected = {k: x + updates[k] for k, x in params.items()}
        if step % 3 == 2:
            expected = {k: np.broadcast_to(x.mean(0), x.shape) for k, x in expected.items()}
        params = run.step(params, updates)
        same(params, expected)
    (all_reduce,) = run.moved()
    assert (all_reduce.kind, all_reduce.what) == ("all-reduce", ("f32", BUCKET))
    assert all_reduce.place != "ENTRY"
    np.testing.assert_array_equal(run.info().bits, 2 * 32 * np.full(4, -(-6 * BUCKET // 4)))


@pytest.mark.parametrize(
    "compressor", [None, pytest.param(gcjax.top_k_compress(1.0, axis_name="data"), marks=pytest.mark.full)]
)
def test_the_outer_step_is_nesterovs_on_the_mean_of_what_was_learned_since_the_last(compressor):
    run = Workers(gossip.local_sgd(2, outer=DILOCO, compressor=compressor, axis_name="data"), 4)
    anchor = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    momentum = anchor
    params = stacks(4, np.zeros)
    for step in range(6):
        updates = normal(4, step)
        expected = {k: x.astype(np.float64) + updates[k] for k, x in params.items()}
        if step % 2:
            grad = {k: anchor[k] - x.mean(0) for k, x in expected.items()}
            momentum = {k: 0.9 * m + grad[k] for k, m in momentum.items()}
            anchor = {k: a - 0.7 * (grad[k] + 0.9 * momentum[k]) for k, a in anchor.items()}
            expected = {k: np.broadcast_to(a, params[k].shape) for k, a in anchor.items()}
        params = run.step(params, updates)
        same(params, expected, atol=2e-5)
    each = 6 * BUCKET if compressor is None else gcjax.info(run.state).wire_bytes
    np.testing.assert_array_equal(run.info().bits, 3 * 32 * np.full(4, np.ceil(each / 4)))
    assert "ENTRY" not in {c.place for c in run.moved()}


def heterogeneous(workers=8, samples=12, size=5):
    """Every worker its own least squares; returns the data and the solution of all of them together."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(workers, samples, size))
    y = np.einsum("wsi,wi->ws", x, 1 + rng.normal(size=(workers, size)))  # each its own solution
    solution = np.linalg.lstsq(x.reshape(-1, size), y.reshape(-1), rcond=None)[0]
    return x.astype(np.float32), y.astype(np.float32), solution


METHODS = {
    "d_psgd ring": lambda: gossip.d_psgd("ring", axis_name="data"),
    "swarm 8 bits": lambda: gossip.swarm_average(2, 8, key=KEY, axis_name="data"),
    "d_psgd torus": lambda: gossip.d_psgd("torus", axis_name="data"),
    "d_psgd complete": lambda: gossip.d_psgd("complete", axis_name="data"),
    "swarm": lambda: gossip.swarm_average(2, key=KEY, axis_name="data"),
    "swarm ring": lambda: gossip.swarm_average(1, None, "ring", key=KEY, axis_name="data"),
    "swarm torus 4 bits": lambda: gossip.swarm_average(1, 4, "torus", key=KEY, axis_name="data"),
    "sgp": lambda: gossip.sgp(axis_name="data"),
    "local_sgd": lambda: gossip.local_sgd(4, axis_name="data"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if i > 1 else []) for i, name in enumerate(METHODS)]
)
def test_workers_with_different_data_agree_on_the_solution_of_all_data(name):
    x, y, solution = heterogeneous()
    tx = optax.chain(optax.sgd(lambda count: 0.1 / (1 + count / 20)), METHODS[name]())
    state = tx.init(jnp.zeros(5))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_of(8), in_specs=(P("data"), P("data"), gcjax.state_specs(state)), out_specs=P("data")
    )
    def train(x, y, state):
        def step(carry, _):
            params, state = carry
            grad = jax.grad(lambda w: jnp.mean((x[0] @ w - y[0]) ** 2) / 2)(params)
            updates, state = tx.update(grad, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = jax.lax.pcast(jnp.zeros(5), "data", to="varying")
        return jax.lax.scan(step, (start, state), length=2000)[0][0][None]

    params = np.asarray(jax.block_until_ready(train(x, y, gcjax.place(state, mesh_of(8)))))
    alone = np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    assert np.linalg.norm(alone - solution, axis=1).min() > 1  # without exchange they would end far apart
    assert np.abs(params - solution).max() < 0.01


def loss_fn(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2


def test_the_step_keeps_params_and_momentum_per_worker_and_compiles_once():
    x, y, _ = heterogeneous()
    tx = optax.chain(optax.sgd(0.02, momentum=0.5), gossip.swarm_average(2, key=KEY, axis_name="data"))
    step = gossip.make_train_step(loss_fn, tx, mesh_of(8))
    params = {"w": jnp.zeros(5)}
    state = step.init(params)
    w, momentum = np.zeros((8, 5)), np.zeros((8, 5))
    for i in range(6):
        state, metrics = step(state, (x.reshape(-1, 5), y.reshape(-1)))
        grad = np.einsum("wsi,ws->wi", x, np.einsum("wsi,wi->ws", x, w) - y) / x.shape[1]
        momentum = 0.5 * momentum + grad
        w = w - 0.02 * momentum
        if i % 2:
            w = (w + w[partner_of("complete", 8, i // 2)]) / 2
        np.testing.assert_allclose(state.params.stacked()["w"], w, atol=1e-5)
    assert metrics.loss.shape == (8,)
    assert step._jitted._cache_size() == 1
    assert not np.asarray(params["w"]).any()  # not donated
    np.testing.assert_allclose(state.opt_state[0][0].trace["w"].packed.stacked(), momentum, atol=1e-5)
    np.testing.assert_allclose(gossip.mean_params(state.params)["w"], w.mean(0), atol=1e-6)
    distance = np.sqrt(((w - w.mean(0)) ** 2).sum(1).mean())
    spread = gossip.consensus_distance(state.params)
    assert spread.distance == pytest.approx(distance, rel=1e-4)
    assert spread.relative == pytest.approx(distance / np.linalg.norm(w.mean(0)), rel=1e-4)


def test_a_step_without_a_gossip_transform_or_with_one_over_other_axes_raises():
    for tx, message in (
        (optax.sgd(0.1), "has 0 gossip transforms"),
        (optax.chain(optax.sgd(0.1), gossip.d_psgd()), r"along \('data',\), but the gossip transform names \(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gossip.make_train_step(loss_fn, tx, mesh_of(2)).init({"w": jnp.zeros(5)})
    with pytest.raises(ValueError, match="axis_name='model' must name axes of the mesh"):
        gossip.make_train_step(loss_fn, gossip.d_psgd(axis_name="model"), mesh_of(2), axis_name="model")


def test_params_are_placed_once_for_each_worker():
    params = gossip.worker_params({"w": jnp.arange(6.0).reshape(2, 3), "s": jnp.float32(2)}, mesh_of(4), "data")
    np.testing.assert_array_equal(params["w"], np.tile(np.arange(6.0).reshape(2, 3), (4, 1, 1)))
    assert params["s"].shape == (4,)
    assert params["w"].sharding.spec == P("data")
    assert gossip.consensus_distance(params) == (0.0, 0.0)


def test_words_are_counted_beyond_32_bits():
    state = gossip.d_psgd().init(jnp.zeros(2))
    traffic = state.traffic.unpack()
    for _ in range(3):
        traffic = traffic.after(np.uint32(3_000_000_000), True, False)
    info = gossip.info(state._replace(traffic=PerWorker.pack(traffic, ())))
    assert info.bits.tolist() == [32 * 9_000_000_000]
    assert info.bits_last.tolist() == [32 * 3_000_000_000]


ALL = {
    "swarm": lambda axis: gossip.swarm_average(1, key=KEY, axis_name=axis),
    "swarm 8 bits": lambda axis: gossip.swarm_average(1, 8, key=KEY, axis_name=axis),
    "d_psgd": lambda axis: gossip.d_psgd(axis_name=axis),
    "d_psgd complete": lambda axis: gossip.d_psgd("complete", axis_name=axis),
    "sgp": lambda axis: gossip.sgp(axis_name=axis),
    "local_sgd": lambda axis: gossip.local_sgd(1, axis_name=axis),
}


@pytest.mark.parametrize("name", ALL)
def test_a_single_worker_keeps_its_own_update(name):
    tx = ALL[name](None)
    params = {"w": jnp.float32([1.0, -2.0]), "s": jnp.float32(3.0)}
    updates = {"w": jnp.float32([0.5, 0.25]), "s": jnp.float32(-1.0)}
    got, state = tx.update(updates, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, got, updates)
    assert gossip.info(state)[:3] == (1, [0], 0)
    assert gossip.info(state).bits.tolist() == [0]
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_a_mesh_of_one_worker_does_as_well(name):
    run = Workers(ALL[name]("data"), 1)
    params, updates = dyadic(1), dyadic(1, 1)
    same(run.step(params, updates), {k: x + updates[k] for k, x in params.items()})
    assert run.info().bits.tolist() == [0]


def test_leaves_come_back_in_their_own_dtypes():
    tx = gossip.local_sgd(1, outer=DILOCO)
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2)}
    got, _ = tx.update(params, tx.init(params), params)
    assert (got["h"].dtype, got["f"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.full
def test_the_doctest_runs():
    result = doctest.testmod(sys.modules["gcjax.gossip._swarm"])
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.full
def test_in_pmap_and_over_two_axes_it_is_the_same():
    tx = gossip.swarm_average(1, 8, key=KEY, axis_name="data")
    params, run = dyadic(8), swarm(8, bits=8).restart()
    single = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}
    state = jax.tree.map(lambda x: jnp.stack([x] * 8), tx.init(single))
    mapped = jax.pmap(lambda p, s: tx.update(jax.tree.map(jnp.zeros_like, p), s, p), axis_name="data")
    mesh = jax.make_mesh((2, 4), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2)
    both = gossip.swarm_average(1, 8, key=KEY, axis_name=("x", "y"))
    over = P(("x", "y"))
    specs = gcjax.state_specs(both.init(single))
    state_both = gcjax.place(both.init(single), mesh)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(over, specs), out_specs=(over, specs))
    def step(params, state):
        own = jax.tree.map(lambda x: x[0], params)
        updates, state = both.update(jax.tree.map(jnp.zeros_like, own), state, own)
        return jax.tree.map(lambda x: x[None], updates), state

    for _ in range(3):
        updates, state = jax.block_until_ready(mapped(params, state))
        updates_both, state_both = jax.block_until_ready(step(params, state_both))
        new = run.step(params)
        same(jax.tree.map(np.asarray, updates), jax.tree.map(np.asarray, updates_both))
        same({k: x + updates[k] for k, x in params.items()}, new)
        params = new
    for got in (gossip.info(state), gossip.info(state_both)):
        jax.tree.map(np.testing.assert_array_equal, got, run.info())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gossip.swarm_average(0, key=KEY), ValueError, "local_steps must be at least 1, got 0"),
        (lambda: gossip.swarm_average(2.0, key=KEY), TypeError, "local_steps must be an int"),
        (lambda: gossip.swarm_average(bits=3, key=KEY), ValueError, "bits must be from 4 to 16, got 3"),
        (lambda: gossip.swarm_average(bits=32, key=KEY), ValueError, "bits must be from 4 to 16, got 32"),
        (lambda: gossip.swarm_average(key=0), TypeError, "key must be a key made by jax.random.key"),
        (lambda: gossip.swarm_average(), TypeError, "key"),
        (lambda: gossip.swarm_average(graph="mesh", key=KEY), ValueError, "graph must be one of.*'mesh'"),
        (lambda: gossip.swarm_average(graph=[(0, 1), (2, 3)], key=KEY), ValueError, "not connected"),
        (lambda: gossip.swarm_average(key=KEY, axis_name=3), TypeError, "axis_name must be"),
        (lambda: gossip.d_psgd("mesh"), ValueError, "graph must be one of"),
        (lambda: gossip.sgp(np.eye(3)), TypeError, "graph must be one of"),
        (lambda: gossip.local_sgd(0), ValueError, "local_steps must be at least 1, got 0"),
        (lambda: gossip.local_sgd(2, compressor=optax.sgd(1.0)).init(jnp.zeros(2)), TypeError, "transform of gcjax"),
        (lambda: gossip.random_regular(0), ValueError, "degree must be at least 1"),
        (lambda: gossip.d_psgd().init(jnp.zeros(2, int)), TypeError, "dtype int32"),
        (lambda: gossip.info(optax.sgd(1.0).init(jnp.zeros(2))), ValueError, "has 0 gossip transforms"),
    ],
)
def test_bad_options_raise_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_use_of_update_raises():
    tx = gossip.swarm_average(key=KEY)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="call update\\(updates, state, params\\)"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="they must agree"):
        tx.update(params, state, {"v": jnp.ones(3)})
    with pytest.raises(ValueError, match="not bound"):
        gossip.d_psgd(axis_name="data").update(params, gossip.d_psgd(axis_name="data").init(params), params)
    placed = gcjax.place(gossip.d_psgd(axis_name="data").init(params), mesh_of(2))
    with pytest.raises(ValueError, match="state of 2 workers at once"):
        tx.update(params, placed, params)


def on_mesh(tx, workers, params_spec):
    """Traces an update with parameters that differ between workers, or are one for all."""
    params = {"w": jnp.ones((workers, 3))}
    state = tx.init({"w": jnp.ones(3)})
    specs = (params_spec, gcjax.state_specs(state))
    run = jax.shard_map(lambda p, s: tx.update(p, s, p), mesh=mesh_of(workers), in_specs=specs, out_specs=specs)
    jax.eval_shape(run, params, gcjax.place(state, mesh_of(workers)))


def test_params_that_are_one_for_all_workers_raise():
    with pytest.raises(ValueError, match=r"\['w'\] is the same for all workers along \['data'\].*make_train_step"):
        on_mesh(gossip.d_psgd(axis_name="data"), 4, P())


@pytest.mark.parametrize(
    ("graph", "message"),
    [([(0, 1), (1, 2)], "not connected"), ("hypercube", "power of two"), (gossip.random_regular(3), "no connected")],
)
def test_graphs_that_do_not_fit_the_mesh_raise(graph, message):
    for tx in (gossip.swarm_average(graph=graph, key=KEY, axis_name="data"), gossip.d_psgd(graph, axis_name="data")):
        with pytest.raises(ValueError, match=message):
            on_mesh(tx, 5, P("data"))


def test_pairs_on_a_directed_graph_raise():
    with pytest.raises(ValueError, match="must be undirected, got 'exponential'"):
        on_mesh(gossip.swarm_average(graph="exponential", key=KEY, axis_name="data"), 4, P("data"))
