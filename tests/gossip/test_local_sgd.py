"""`local_sgd` against loops in NumPy, what moves, and recipes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_workers import (
    BUCKET,
    DILOCO,
    SHAPES,
    Workers,
    assert_same,
    dyadic,
    least_squares,
    mean_of_all,
    normal,
    stacks,
    totals,
)
from harness import mesh_of, residuals

import gcjax
from gcjax import gossip


def test_all_models_are_averaged_in_every_third_update():
    run = Workers(gossip.local_sgd(3, axis_name="data"), 4)
    params = dyadic(4)
    for step in range(6):
        updates = dyadic(4, 1 + step)
        expected = {k: x + updates[k] for k, x in params.items()}
        if step % 3 == 2:
            expected = mean_of_all(expected)
        params = run.step(params, updates)
        assert_same(params, expected)
    (all_reduce,) = run.collectives()
    assert (all_reduce.kind, (all_reduce.dtype, all_reduce.elements)) == ("all-reduce", ("f32", BUCKET))
    assert all_reduce.computation
    np.testing.assert_array_equal(run.info().bits, 2 * 32 * np.full(4, -(-6 * BUCKET // 4)))


@pytest.mark.parametrize(
    "compressor", [None, pytest.param(gcjax.top_k_compress(1.0, axis_name="data"), marks=pytest.mark.full)]
)
def test_outer_step_is_nesterov_on_the_mean_change(compressor):
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
        assert_same(params, expected, atol=2e-5)
    each = 6 * BUCKET if compressor is None else gcjax.info(run.state).compressor.wire_bytes
    np.testing.assert_array_equal(run.info().bits, 3 * 32 * np.full(4, np.ceil(each / 4)))
    assert "" not in {c.computation for c in run.collectives()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_keep_their_dtypes(dtype):
    tx = optax.chain(optax.sgd(0.1), gossip.local_sgd(1, outer=DILOCO))
    params = {"f": jnp.ones(2), "h": jnp.ones(3, jnp.bfloat16)}
    state, updates = jax.eval_shape(tx.init, params), params | {"h": jnp.ones(3, dtype)}
    for _ in range(2):
        got, state = jax.eval_shape(tx.update, updates, state, params)
    assert [x.dtype for x in got.values()] == ["float32", dtype]


@pytest.mark.parametrize("options", [{"outer": DILOCO}, {"compressor": gcjax.sparse_loco_compress(axis_name="data")}])
def test_a_bfloat16_model_takes_steps_that_only_add_up(options):
    """One worker of four moves, each time by less than its share of a unit in the last place of the mean."""
    tx = optax.chain(optax.sgd(2.0**-7), gossip.local_sgd(1, **options, axis_name="data"))
    step = gcjax.make_train_step(lambda params, x: -jnp.mean(x) * params["a"].sum(), tx, mesh_of(4))
    state = step.init({"a": jnp.ones(8, jnp.bfloat16)})
    for _ in range(24):
        state, _ = step(state, jnp.array([1.0, 0.0, 0.0, 0.0]))
    assert gossip.mean_params(state.params)["a"].astype(np.float32).min() > 1.02


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_that_learns_nothing_stays_as_it_is(dtype):
    params = jnp.array([1.0, 1.001, 3e-5, 5e-6, 6e-8, 0.0], dtype)  # down to the smallest float16
    tx = gossip.local_sgd(1, outer=optax.sgd(1.0))
    state = tx.init(params)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(jnp.zeros_like(params), state, params)
        np.testing.assert_array_equal(updates.astype(np.float32), 0)


@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"fragments": 2}])
def test_a_mesh_of_one_worker_takes_the_outer_step(options):
    tx = optax.chain(optax.sgd(1.0), gossip.local_sgd(2, outer=optax.sgd(0.5), axis_name="data", mixing=1.0, **options))
    step = gcjax.make_train_step(lambda params, x: jnp.mean(x * (params["a"] + params["b"])), tx, mesh_of(1))
    state = step.init({"a": jnp.zeros(()), "b": jnp.zeros(())})
    for _ in range(4):
        state, _ = step(state, jnp.ones(2))
    got = gossip.mean_params(state.params)
    if not options:
        assert got == {"a": -2.0, "b": -2.0}  # twice half of the way
    assert all(jnp.isfinite(x) for x in got.values())


def test_with_a_delay_half_of_a_workers_own_way_is_kept():
    def end(**options):
        run, params = Workers(gossip.local_sgd(4, delay=2, **options, axis_name="data"), 4), stacks(4, np.zeros)
        for number in range(7):
            params = run.step(params, dyadic(4, number))
        return params

    assert_same(end(), end(mixing=0.5))
    assert all(np.abs(end()[k] - end(mixing=1.0)[k]).max() > 0.1 for k in SHAPES)


OWN_PARTS = {"a": 0, "b": 1}
SIZE_OF = {k: math.prod(shape) for k, shape in SHAPES.items()}


def test_fragments_are_sent_in_turn_and_mixed_in_later():
    """Four updates from one exchange of a fragment to its next: "a" after 2, 6, 10, "b" after 4, 8, 12."""
    tx = gossip.local_sgd(4, outer=DILOCO, fragments=OWN_PARTS, delay=1, mixing=0.25, axis_name="data")
    run, workers = Workers(tx, 4), 4
    anchor = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    momentum, arrived, params = anchor, {}, stacks(workers, np.zeros)
    for number in range(1, 13):
        updates = normal(workers, number)
        expected = {k: x.astype(np.float64) + updates[k] for k, x in params.items()}
        for k, first in (("a", 2), ("b", 4)):
            if number > first and (number - first) % 4 == 1:
                momentum = momentum | {k: 0.9 * momentum[k] + arrived[k]}
                anchor = anchor | {k: anchor[k] - 0.7 * (arrived[k] + 0.9 * momentum[k])}
                expected[k] = 0.75 * expected[k] + 0.25 * anchor[k]
            if (number - first) % 4 == 0:
                arrived[k] = anchor[k] - expected[k].mean(0)
        params = run.step(params, updates)
        assert_same(params, expected, atol=2e-5)
        sent = {0: "b", 2: "a"}.get(number % 4)
        words = -(-6 * SIZE_OF[sent] // 4) if sent else 0
        assert run.info().bits_last.tolist() == [32 * words] * workers
    assert run.info().exchanges.tolist() == [6] * workers
    found = run.collectives()
    assert sorted((c.dtype, c.elements) for c in found) == [("f32", 15), ("f32", 40)]
    assert len({c.computation for c in found} - {""}) == 2


def test_mixing_keeps_the_sum_of_all_models():
    run, params = Workers(gossip.local_sgd(2, fragments=2, mixing=0.5, axis_name="data"), 4), dyadic(4)
    for number in range(4):
        updates = dyadic(4, 1 + number)
        expected = {k: totals(params)[k] + totals(updates)[k] for k in SHAPES}
        new = run.step(params, updates)
        moved = [k for k in SHAPES if np.abs(new[k] - params[k] - updates[k]).max() > 0.1]
        assert moved == [["a", "b"][number % 2]]
        params = new
        assert_same(totals(params), expected, atol=1e-5)


@pytest.fixture(scope="module")
def streaming():
    """Fragments, a delay and a compressor: the step and what 14 updates leave after each."""
    compressor = gcjax.sparse_loco_compress(5, chunk=4, decay=1.0, bits=None, average="workers", axis_name="data")
    tx = gossip.local_sgd(4, compressor=compressor, fragments=2, delay=3, mixing=1.0, axis_name="data")
    run, params, steps = Workers(tx, 4), stacks(4, np.zeros), []
    for number in range(14):
        params = run.step(params, dyadic(4, number))
        steps.append((params, run.state, run.info()))
    return run, steps


def test_what_is_equal_on_all_workers_has_the_same_bits(streaming):
    _, steps = streaming
    for _, state, _ in steps:
        for part in state.method:
            for x in jax.tree.leaves((part.anchor, part.outer, part.arrived)):
                first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
                assert len(others) == 3
                for other in others:
                    np.testing.assert_array_equal(other.view(np.uint32), first.view(np.uint32))
    assert all(np.abs(x).max() > 0.1 for part in state.method for x in jax.tree.leaves(part.anchor))


def test_what_is_sent_arrives_and_what_is_not_is_kept(streaming):
    _, steps = streaming
    for number, (name, size) in enumerate(SIZE_OF.items()):
        wanted, came = np.zeros(size), np.zeros(size)
        for update in range(2 * (number + 1), 14, 4):
            params, state, _ = steps[update - 1]
            part = state.method[number]
            np.testing.assert_allclose(part.anchor[name], -came.reshape(SHAPES[name]), atol=1e-6)
            wanted += (np.asarray(part.anchor[name], np.float64) - params[name]).mean(0).ravel()
            came += np.asarray(part.arrived[0][0], np.float64).ravel()
            left = np.mean([leaf for (leaf,) in residuals(part.compressor, 4, [size])], axis=0)
            np.testing.assert_allclose(came + left, wanted, atol=1e-5)
        assert np.abs(came).max() > 1
        assert np.abs(left).max() > 0.1


def test_bytes_of_fragments_are_those_of_the_compiled_collectives(streaming):
    run, steps = streaming
    moved = {}
    for c in run.collectives():
        assert c.computation
        moved[c.computation] = moved.get(c.computation, 0) + c.ring_bytes
    words = {math.ceil(each / 4) for each in moved.values()}
    assert len(words) == 2
    last = [set((info.bits_last / 32).tolist()) for _, _, info in steps]
    assert all(len(each) == 1 for each in last)
    assert set().union(*last) == words | {0}
    assert [bool(max(each)) for each in last] == [number % 2 == 0 for number in range(1, 15)]


def test_resumed_training_has_the_same_bits(streaming):
    run, steps = streaming
    for stop in (5, 9):  # while something waits, and with residuals of both fragments
        again, (params, state, _) = run.restart(), steps[stop]
        saved = jax.tree.map(np.asarray, state)
        again.state = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), saved, run.start)
        for number in range(stop + 1, 14):
            params = again.step(params, dyadic(4, number))
            assert_same(params, steps[number][0])


RECIPES = {
    "MuLoCo": (
        optax.contrib.muon,
        {
            "outer": optax.sgd(0.7, momentum=0.6, nesterov=True),
            "compressor": gcjax.sparse_loco_compress(4096, bits=4, axis_name="data"),
        },
    ),
    "SparseLoCo": (optax.adamw, {"compressor": gcjax.sparse_loco_compress(8, axis_name="data")}),
    "Streaming DiLoCo, 4 bits": (
        optax.adamw,
        {
            "outer": DILOCO,
            "compressor": gcjax.qsgd_compress(4, key=jax.random.key(0), transport="two_phase", axis_name="data"),
            "fragments": 2,
            "delay": 3,
            "mixing": 0.5,
        },
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_and_workers_end_together(recipe):
    x, y, _ = least_squares()
    matrix = {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3)}
    targets = np.stack([y, -y, 2 * y], axis=2)
    inner, options = RECIPES[recipe]
    rate = optax.cosine_decay_schedule(0.1, 200)
    tx = optax.chain(inner(rate), gossip.local_sgd(10, **options, axis_name="data"))

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    step = gcjax.make_train_step(loss_fn, tx, mesh_of(8))
    batch = (x.reshape(-1, 5), targets.reshape(-1, 3))
    state = step.init(matrix)
    for _ in range(200):
        state, _ = step(state, batch)
    apart = 0.1 if "mixing" in options else 1e-6
    assert gossip.consensus_distance(state.params).relative < apart
    best = np.linalg.lstsq(np.pad(batch[0], ((0, 0), (0, 1)), constant_values=1), batch[1], rcond=None)[1].sum()
    best /= batch[1].size
    assert float(loss_fn(gossip.mean_params(state.params), batch)) < 1.1 * best


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fragments": 0}, ValueError, "fragments must be from 1 to 3, got 0"),
        ({"fragments": 4}, ValueError, "fragments must be from 1 to 3, got 4"),
        ({"fragments": 2.0}, TypeError, "fragments must be an int, or a tree.*got 2.0"),
        ({"fragments": None}, TypeError, "fragments must be an int, or a tree.*got None"),
        ({"fragments": {"a": 0, "b": 2}}, ValueError, r"fragments must number the parts.*got \[0, 2\]"),
        ({"fragments": {"a": 0, "b": 3}}, ValueError, "fragments must be from 0 to 2, got 3"),
        ({"fragments": {"a": 0, "c": 1}}, ValueError, "fragments must be a prefix of the tree of parameters"),
        ({"fragments": 3}, ValueError, "fragments must be at most the number of leaves, which is 2, got 3"),
        ({"delay": 3}, ValueError, "delay must be from 0 to 2, got 3"),
        ({"delay": 1.0}, TypeError, "delay must be an int, got 1.0"),
        ({"mixing": 0.0}, ValueError, r"mixing must be in \(0, 1\], got 0.0"),
        ({"fragments": {"c": 0}}, ValueError, "fragments must be a prefix of the tree of parameters"),
        ({"compressor": optax.sgd(1.0)}, TypeError, "compressor must be a transform of gcjax"),
        ({"compressor": gcjax.top_k_compress}, TypeError, "compressor must be an optax .* got <function top_k"),
        ({"outer": 0.7}, TypeError, r"outer must be an optax transform, such as .*, got 0.7"),
        ({"compressor": gcjax.top_k_compress(0.1), "mixing": 0.5}, ValueError, "mixing=0.5 leaves .* Give mixing=1"),
        ({"compressor": gcjax.ef_sign_compress(), "delay": 1}, ValueError, "mixing=0.5 leaves .* Give mixing=1"),
        (
            {"compressor": gcjax.top_k_compress(0.1), "axis_name": "data"},
            ValueError,
            r"axis_name=\('data',\), the compressor None; give both the same",
        ),
        (
            {"compressor": gcjax.top_k_compress(0.1, axis_name="model"), "axis_name": "data"},
            ValueError,
            r"axis_name=\('data',\), the compressor \('model',\); give both the same",
        ),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gossip.local_sgd(3, **options).init({"a": jnp.zeros(3), "b": jnp.zeros(4)})


def test_a_compressor_over_a_part_of_the_axes_raises():
    mesh, compressor = jax.make_mesh((2, 2), ("x", "y")), gcjax.top_k_compress(0.5, axis_name="x")
    tx = gossip.local_sgd(1, compressor=compressor, axis_name=("x", "y"))
    step = gcjax.make_train_step(lambda w, x: jnp.mean(x * w), tx, mesh, axis_name=("x", "y"))
    with pytest.raises(ValueError, match=r"the compressor's mean differs along \['y'\].* inner_axis_name"):
        step.lower(step.init(jnp.zeros(())), jnp.ones(4))


def test_leaves_are_shared_out_evenly():
    params = {"a": jnp.zeros(5), "b": jnp.zeros((2, 3)), "c": jnp.zeros(2), "d": jnp.zeros(()), "e": jnp.zeros(4)}
    state = gossip.local_sgd(8, outer=DILOCO, fragments=3).init(params)
    sizes = [{k: x.size for k, x in part.anchor.items() if hasattr(x, "size")} for part in state.method]
    assert sizes == [{"b": 6}, {"a": 5, "d": 1}, {"c": 2, "e": 4}]
