"""`local_sgd` against loops in NumPy, what moves, and recipes."""

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
)
from harness import mesh_of, residuals
from selection import cases

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


@cases("compressor", [None, gcjax.top_k_compress(1.0, axis_name="data")], default=1)
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


def test_a_mesh_of_one_worker_takes_the_outer_step():
    tx = optax.chain(optax.sgd(1.0), gossip.local_sgd(2, outer=optax.sgd(0.5), axis_name="data"))
    step = gcjax.make_train_step(lambda params, x: jnp.mean(x * (params["a"] + params["b"])), tx, mesh_of(1))
    state = step.init({"a": jnp.zeros(()), "b": jnp.zeros(())})
    for _ in range(4):
        state, _ = step(state, jnp.ones(2))
    assert gossip.mean_params(state.params) == {"a": -2.0, "b": -2.0}  # twice half of the way


@pytest.fixture(scope="module")
def compressed():
    """An exchange with a compressor in every fourth update: the step, and what 12 updates leave after each."""
    compressor = gcjax.sparse_loco_compress(14, chunk=4, decay=1.0, bits=4, average="workers", axis_name="data")
    run, params, steps = (
        Workers(gossip.local_sgd(4, compressor=compressor, axis_name="data"), 4),
        stacks(4, np.zeros),
        [],
    )
    for number in range(12):
        params = run.step(params, dyadic(4, number))
        steps.append((params, run.state, run.info()))
    return run, steps


def test_what_is_equal_on_all_workers_has_the_same_bits(compressed):
    _, steps = compressed
    for _, state, _ in steps:
        for x in jax.tree.leaves((state.method.anchor, state.method.outer)):
            first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
            assert len(others) == 3
            for other in others:
                np.testing.assert_array_equal(other.view(np.uint32), first.view(np.uint32))
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(state.method.anchor))


def test_what_is_sent_arrives_and_what_is_not_is_kept(compressed):
    _, steps = compressed
    wanted = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    before = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    for number in (3, 7, 11):
        (params, state, _), updates = steps[number], dyadic(4, number)
        models = {k: steps[number - 1][0][k] + updates[k] for k in SHAPES}
        wanted = {k: wanted[k] + (before[k] - models[k]).mean(0) for k in SHAPES}
        left = [
            np.mean(leaves, axis=0) for leaves in zip(*residuals(state.method.compressor, 4, [40, 15]), strict=True)
        ]
        for k, x in zip(SHAPES, left, strict=True):
            anchor = np.asarray(state.method.anchor[k], np.float64)
            np.testing.assert_allclose(params[k], np.broadcast_to(anchor, params[k].shape), atol=5e-6)  # of 16
            np.testing.assert_allclose(x.reshape(SHAPES[k]) - anchor, wanted[k], atol=1e-5)
            assert np.abs(anchor).max() > 0.1
            assert np.abs(x).max() > 0.1
            before[k] = anchor


def test_resumed_training_has_the_same_bits(compressed):
    run, steps = compressed
    for stop in (5, 9):  # with residuals
        again, (params, state, _) = run.restart(), steps[stop]
        saved = jax.tree.map(np.asarray, state)
        again.state = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), saved, run.start)
        for number in range(stop + 1, 12):
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
    "DiLoCo, 4 bits": (
        optax.adamw,
        {
            "outer": DILOCO,
            "compressor": gcjax.qsgd_compress(4, key=jax.random.key(0), transport="two_phase", axis_name="data"),
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
    assert gossip.consensus_distance(state.params).relative < 1e-6
    best = np.linalg.lstsq(np.pad(batch[0], ((0, 0), (0, 1)), constant_values=1), batch[1], rcond=None)[1].sum()
    best /= batch[1].size
    assert float(loss_fn(gossip.mean_params(state.params), batch)) < 1.1 * best


def test_a_compressor_over_a_part_of_the_axes_raises():
    mesh, compressor = jax.make_mesh((2, 2), ("x", "y")), gcjax.top_k_compress(0.5, axis_name="x")
    tx = gossip.local_sgd(1, compressor=compressor, axis_name=("x", "y"))
    step = gcjax.make_train_step(lambda w, x: jnp.mean(x * w), tx, mesh, axis_name=("x", "y"))
    with pytest.raises(ValueError, match=r"the compressor's mean differs along \['y'\].* inner_axis_name"):
        step.lower(step.init(jnp.zeros(())), jnp.ones(4))
