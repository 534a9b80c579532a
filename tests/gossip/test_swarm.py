"""`swarm_average` against loops over the workers in NumPy, and what moves, read from the compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gossip_workers import BUCKET, KEY, SHAPES, Workers, assert_same, dyadic, normal, partner_of, totals
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax import gossip


@functools.cache
def swarm(workers, bits=None, local_steps=1):
    return Workers(gossip.swarm_average(local_steps, bits, key=KEY, axis_name="data"), workers)


@pytest.mark.parametrize("workers", [8, 5])
def test_pairs_end_at_their_mean_in_every_second_update(workers):
    run = swarm(workers, local_steps=2).restart()
    params, took_part, sat_out = dyadic(workers), np.zeros(workers, int), set()
    for step in range(12):
        updates = dyadic(workers, step)
        expected = {k: params[k] + updates[k] for k in SHAPES}
        partner = partner_of(workers, step // 2) if step % 2 else np.arange(workers)
        sat_out |= set(np.flatnonzero(partner == np.arange(workers))) if step % 2 else set()
        averaged = {k: (x + x[partner]) / 2 for k, x in expected.items()}
        params = run.step(params, updates)
        assert_same(params, averaged)
        assert_same(totals(params), totals(expected))
        took_part += partner != np.arange(workers)
        np.testing.assert_array_equal(run.info().bits_last, 32 * BUCKET * (partner != np.arange(workers)))
        params = {k: np.round(x * 64) / 64 for k, x in params.items()}  # otherwise they would need ever more digits
    assert len(sat_out) > 1 if workers % 2 else not sat_out
    info = run.info()
    np.testing.assert_array_equal(info.exchanges, took_part)
    np.testing.assert_array_equal(info.bits, 32 * BUCKET * took_part)
    assert (info.step, info.failures) == (12, 0)


def test_an_exchange_moves_one_model():
    moved = swarm(8, local_steps=2).collectives()
    assert len(moved) == 7  # a branch for each matching
    assert {c.kind for c in moved} == {"collective-permute"}
    assert {(c.dtype, c.elements) for c in moved} == {("f32", BUCKET)}
    assert len({c.computation for c in moved} - {""}) == 7  # nothing moves in the updates between


def test_lattice_exchange_moves_bits_and_one_agreement():
    run = swarm(8, bits=8).restart()
    moved = run.collectives()
    words = 1 + 8 * 3
    packed = [c for c in moved if (c.dtype, c.elements) == ("u32", words)]
    whole = [c for c in moved if (c.dtype, c.elements) == ("f32", BUCKET)]
    agreements = [c for c in moved if c.kind == "all-reduce"]
    assert len(packed) == len(whole) == 7
    # A margin per leaf, once with the flag.
    assert sorted((c.dtype, c.elements) for c in agreements) == [("f32", 2), ("f32", 3)]
    assert len(moved) == 16
    agreement = {c.elements: c.computation for c in agreements}
    assert agreement[3] == ""
    assert agreement[2] != "ENTRY"  # only on failure
    assert "" not in {c.computation for c in packed + whole}
    params = normal(8)
    bits = []
    for _ in range(3):
        params = run.step(params)
        bits.append(run.info().bits_last)
    # A ring all-reduce of m words sends 14 m / 8 of them.
    np.testing.assert_array_equal(bits[0], 32 * (words + 6 + BUCKET + 4))
    np.testing.assert_array_equal(bits[1:], np.full((2, 8), 32 * (words + 6)))
    np.testing.assert_array_equal(run.info().bits, sum(bits))


def test_lattice_error_depends_on_distance_not_on_size():
    run = swarm(8, bits=8).restart()
    params = normal(8, mean=1000.0, size=0.01)
    before = totals(params)
    first = run.step(params)  # in full precision, because no distance is known
    partner = partner_of(8, 0)
    assert_same(first, {k: (x + x[partner]) / 2 for k, x in params.items()}, atol=1e-4)
    assert run.info().failures == 0
    params, worst = first, 0.0
    for number in range(1, 10):
        partner = partner_of(8, number)
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


def test_lattice_changes_of_a_pair_are_exact_opposites():
    run = swarm(8, bits=8).restart()
    params = run.step(dyadic(8))
    for number in range(1, 6):
        new = run.step(params)
        partner = partner_of(8, number)
        for k, x in params.items():
            change = new[k].astype(np.float64) - x
            np.testing.assert_array_equal(change, -change[partner])
            assert change.any()
        params = {k: np.round(x * 64) / 64 for k, x in new.items()}
    assert run.info().failures == 0


def test_lattice_scales_follow_each_leaf():
    run = swarm(8, bits=8).restart()
    params = normal(8)
    params["b"] *= 1e-4
    params = run.step(params)
    new, partner = run.step(params), partner_of(8, 1)
    for k, x in params.items():
        error = np.abs(new[k] - (x + x[partner]) / 2).max()
        assert 0 < error < 8 * np.abs(x).max() / 126
    assert run.info().failures == 0


def test_lattice_keeps_equal_models_to_the_bit():
    run = swarm(8, bits=8).restart()
    run.step(normal(8))  # makes the scale coarse
    params = {k: np.broadcast_to(x[:1], x.shape) for k, x in normal(8, 1).items()}
    assert_same(run.step(params), params)


def test_lattice_rounding_is_unbiased():
    steps, workers, scale = 400, 2, 1.0  # of 4 bits: the smallest power of two with 6.5 scales >= 4
    tx = gossip.swarm_average(1, 4, key=KEY, axis_name="data")
    params = normal(workers)
    start = tx.init({k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()})
    start = start._replace(method=(np.full(2, 4.0, np.float32),))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(workers),
        in_specs=(P("data"), P(), gcjax.state_specs(start)),
        out_specs=P("data"),
    )
    def draws(params, numbers, start):
        own = jax.tree.map(lambda x: x[0], params)
        zeros = jax.tree.map(jnp.zeros_like, own)
        _, changes = jax.lax.scan(lambda _, k: (0, tx.update(zeros, start._replace(step=k), own)[0]), 0, numbers)
        return jax.tree.map(lambda x: x[None], changes)

    changes = jax.block_until_ready(draws(params, np.arange(1, steps + 1), gcjax.distribute(start, mesh_of(workers))))
    for k, x in params.items():
        expected = (x[::-1].astype(np.float64) - x) / 2
        error = np.asarray(changes[k], np.float64).mean(1) - expected
        assert np.abs(error).max() < 5 * scale / 4 / steps**0.5  # a rounded difference has at most half a scale, halved
        assert np.abs(np.asarray(changes[k][:, 0]) - expected).max() > 0.05 * scale


def test_models_too_far_apart_are_averaged_in_full():
    run = swarm(8, bits=8).restart()
    params = run.step(run.step(normal(8, size=0.01)))
    assert run.info().failures == 0
    for failures, (worker, k, jump) in enumerate([(3, "a", 1.0), (6, "b", -1e4)], start=1):
        params = jax.tree.map(np.copy, params)
        params[k][worker].flat[7] += np.float32(jump)
        partner = partner_of(8, run.info().step)
        expected = {k: (x + x[partner]) / 2 for k, x in params.items()}
        params = run.step(params)
        assert_same(params, expected, rtol=1e-6, atol=1e-7)
        assert run.info().failures == failures
        assert (run.info().bits_last > 32 * BUCKET).all()
        for _ in range(2):  # the scale has grown with the distance
            params = run.step(params)
            assert run.info().failures == failures


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_reach_only_the_partner(bad):
    run = swarm(8, bits=8).restart()
    params = run.step(run.step(normal(8)))
    before = run.state.method
    good, params = params, jax.tree.map(np.copy, params)
    params["a"][2, 5] = bad
    partner = partner_of(8, 2)
    got = run.step(params)
    assert {w for w in range(8) if not np.isfinite(got["a"][w]).all()} == {2, partner[2]}
    assert run.info().failures == 1
    assert all(  # the margins decay as ever
        np.isfinite(r).all() and (np.asarray(r) >= 0.79 * np.asarray(b)).all()
        for r, b in zip(run.state.method, before, strict=True)
    )
    run.step(good)
    assert run.info().failures == 1
