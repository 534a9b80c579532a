"""`gcjax.make_train_step` with gossip, and the functions for parameters that differ between workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_workers import KEY, least_squares, loss_fn, partner_of
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from loops import by_step

import gcjax
from gcjax import gossip


def test_params_and_momentum_are_per_worker():
    x, y, _ = least_squares()
    tx = optax.chain(optax.sgd(0.02, momentum=0.5), gossip.swarm_average(2, key=KEY, axis_name="data"))
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(8))
    params = {"w": jnp.zeros(5)}
    state = step.init(params)
    w, momentum = np.zeros((8, 5)), np.zeros((8, 5))
    for i in range(6):
        state, metrics = step(state, (x.reshape(-1, 5), y.reshape(-1)))
        grad = np.einsum("wsi,ws->wi", x, np.einsum("wsi,wi->ws", x, w) - y) / x.shape[1]
        momentum = 0.5 * momentum + grad
        w = w - 0.02 * momentum
        if i % 2:
            w = (w + w[partner_of(8, i // 2)]) / 2
        np.testing.assert_allclose(state.params.stacked()["w"], w, atol=1e-5)
    assert metrics.loss.shape == (8,)
    assert step._jitted._cache_size() == 1
    assert not np.asarray(params["w"]).any()  # not donated
    trace = state.opt_state[0][0].trace["w"]
    np.testing.assert_allclose(trace.packed.stacked(), momentum, atol=1e-5)
    np.testing.assert_allclose(gossip.mean_params(state.params)["w"], w.mean(0), atol=1e-6)
    distance = np.sqrt(((w - w.mean(0)) ** 2).sum(1).mean())
    found = gossip.consensus_distance(state.params)
    assert found.distance == pytest.approx(distance, rel=1e-4)
    assert found.relative == pytest.approx(distance / np.linalg.norm(w.mean(0)), rel=1e-4)


def test_a_transform_that_asks_for_the_loss_gets_each_workers_own():
    def times_value(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda x: x * value, updates), state

    by_loss = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), times_value)
    x, y, _ = least_squares()
    tx = optax.chain(optax.sgd(0.02), by_loss, gossip.swarm_average(2, key=KEY, axis_name="data"))
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(8))
    state, metrics = step(step.init({"w": jnp.zeros(5)}), (x.reshape(-1, 5), y.reshape(-1)))
    grad = np.einsum("wsi,ws->wi", x, -y) / x.shape[1]
    expected = -0.02 * grad * np.asarray(metrics.loss)[:, None]
    np.testing.assert_allclose(state.params.stacked()["w"], expected, atol=1e-5)


def test_chains_in_which_gossip_cannot_work_raise():
    average = gossip.local_sgd(2, compressor=gcjax.top_k_compress(0.1, axis_name="data"), axis_name="data")
    for tx, message in (
        (optax.chain(average, average), "has 2 gossip transforms"),
        (optax.chain(optax.sgd(0.1), gossip.d_psgd()), r"along \('data',\), but the gossip transform names \(\)"),
        (optax.chain(average, optax.sgd(0.1)), "another transform follows .* Put the gossip transform last"),
        (optax.masked(optax.chain(optax.chain(optax.sgd(0.1), average), optax.clip(1.0)), True), "another transform"),
        (
            optax.apply_if_finite(optax.chain(optax.sgd(0.1), average), 3),
            "apply_if_finite .* around the gossip.* alone",
        ),
        (optax.chain(gcjax.top_k_compress(0.1, axis_name="data"), average), "a compressor over .* beside the gossip"),
        (optax.MultiSteps(optax.chain(optax.sgd(0.1), average), 2), "MultiSteps stands around the gossip.* alone"),
    ):
        with pytest.raises(ValueError, match=message):
            gcjax.make_train_step(loss_fn, tx, mesh_of(2)).init({"w": jnp.zeros(5)})


def test_worker_params_are_one_copy_per_worker():
    params = gossip.worker_params({"w": np.arange(6.0).reshape(2, 3), "s": np.float32(2)}, mesh_of(4), "data")
    np.testing.assert_array_equal(params["w"], np.tile(np.arange(6.0).reshape(2, 3), (4, 1, 1)))
    assert params["s"].shape == (4,)
    assert params["w"].sharding.spec == P("data")
    assert gossip.consensus_distance(params) == (0.0, 0.0)
    with pytest.raises(ValueError, match=r"weights has shape \(3,\), but the parameters are those of 4 workers"):
        gossip.mean_params(params, np.ones(3))


def test_an_empty_leaf_on_an_explicit_mesh_has_a_mean():
    mesh = jax.make_mesh((2,), ("data",))
    tx = optax.chain(optax.sgd(0.1), gossip.local_sgd(1, axis_name="data"))
    step = gcjax.make_train_step(lambda params, x: jnp.mean(x) * params["a"].sum(), tx, mesh)
    state, _ = step(step.init({"a": jnp.ones(3), "empty": jnp.zeros((0, 4))}), jnp.ones(2))
    assert gossip.mean_params(state.params)["empty"].shape == (0, 4)
    assert gossip.consensus_distance(state.params) == (0.0, 0.0)


def test_a_device_that_holds_more_than_int32_counts_is_named():
    tx = gossip.local_sgd(1)
    model = [jax.ShapeDtypeStruct((1 << 28,), jnp.float32)] * 8
    with pytest.raises(ValueError, match="holds 2,147,483,648 parameters, and gcjax counts to 2,147,483,647; shard"):
        jax.eval_shape(tx.update, model, jax.eval_shape(tx.init, model), model)


DILOCO = {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)}
TRANSFORMS = {
    "swarm_average": lambda axis: gossip.swarm_average(2, 8, key=KEY, axis_name=axis),
    "d_psgd": lambda axis: gossip.d_psgd(axis_name=axis),
    "sgp": lambda axis: gossip.sgp(axis_name=axis),
    "local_sgd": lambda axis: gossip.local_sgd(2, **DILOCO, axis_name=axis),
}


def batches_of(count=5):
    x, y, _ = least_squares()
    x, y = x.reshape(-1, 5), y.reshape(-1)
    return [(np.roll(x, i, axis=0), np.roll(y, i, axis=0)) for i in range(count)]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_worker_of_several_chips_takes_the_steps_of_one_with_the_joint_batch(name):
    cities = jax.make_mesh((4, 2), ("city", "chip"))
    mesh = jax.make_mesh((4,), ("city",), devices=jax.devices()[:4])
    given = (loss_fn, optax.chain(optax.adam(0.02), TRANSFORMS[name]("city")), {"w": jnp.ones(5)}, batches_of())
    state, found = by_step(*given, cities, axis_name=("city", "chip"), accumulate=2)
    expected, wanted = by_step(*given, mesh, axis_name="city")
    np.testing.assert_allclose(state.params.stacked()["w"], expected.params.stacked()["w"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found[-1].loss.reshape(4, 2).mean(1), wanted[-1].loss, rtol=1e-4)
    np.testing.assert_allclose(found[-1].grad_norm, wanted[-1].grad_norm, rtol=1e-4)
    np.testing.assert_array_equal(gcjax.info(state.opt_state).bits, gcjax.info(expected.opt_state).bits)
    copies = np.stack([shard.data for shard in state.params.value["w"].addressable_shards]).reshape(4, 2, 5)
    np.testing.assert_array_equal(copies[:, 0], copies[:, 1])


def test_frozen_parameters_and_auxiliary_output_work_with_gossip():
    def loss(params, batch, key):
        return loss_fn(params, batch) + params["b"] * jax.random.normal(key), {"n": jnp.sum(params["b"])}

    tx = optax.chain(optax.adam(0.02), gossip.local_sgd(2, **DILOCO, axis_name="data"))
    start, options = {"w": jnp.zeros(5), "b": jnp.float32(2)}, {"trainable": {"w": True, "b": False}, "accumulate": 2}
    state, metrics = by_step(loss, tx, start, batches_of(), mesh_of(8), key=KEY, has_aux=True, **options)
    np.testing.assert_array_equal(state.params.stacked()["b"], np.full(8, 2))
    np.testing.assert_array_equal(metrics[-1].aux["n"], np.full(8, 2))
    assert (state.params.stacked()["w"] != 0).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_worker_with_a_bad_gradient_skips_its_own_update_and_still_exchanges(name):
    def models(bad):
        tx = optax.chain(optax.adam(0.02), TRANSFORMS[name]("data"))
        step = gcjax.make_train_step(loss_fn, tx, mesh_of(4))
        state, all_metrics = step.init({"w": jnp.ones(5)}), []
        for i, (x, y) in enumerate(batches_of()):
            if bad and i == 2:
                x = x.copy()
                x[0, 0] = np.nan  # of worker 0
            state, metrics = step(state, (x, y))
            all_metrics.append(np.asarray(metrics.skipped).tolist())
            if i == 2:
                moments = state.opt_state[0][0]
                counts = np.asarray(moments.count.packed.stacked()).tolist()
        return state, all_metrics, counts

    state, skipped, counts = models(bad=True)
    assert skipped == [[0] * 4, [0] * 4, [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert counts == [2, 3, 3, 3]
    assert np.isfinite(state.params.stacked()["w"]).all()
    assert np.isfinite(jax.tree.leaves(state.opt_state[0])[1]).all()
    usual, skipped, _ = models(bad=False)
    assert np.sum(skipped) == 0
    np.testing.assert_array_equal(gcjax.info(state.opt_state).exchanges, gcjax.info(usual.opt_state).exchanges)


def test_a_worker_that_skips_an_update_between_exchanges_stays_where_it_was():
    tx = optax.chain(optax.sgd(0.02, momentum=0.5), gossip.local_sgd(3, axis_name="data"))
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(4), max_skipped=3)
    (x, y), *_ = batches_of()
    state, _ = step(step.init({"w": jnp.ones(5)}), (x, y))
    before, trace = jax.device_get((state.params.stacked()["w"], state.opt_state[0][0].trace["w"].packed.stacked()))
    x = x.copy()
    x[-1] = np.inf
    state, metrics = step(state, (x, y))
    np.testing.assert_array_equal(metrics.skipped, [0, 0, 0, 1])
    np.testing.assert_array_equal(state.params.stacked()["w"][3], before[3])
    np.testing.assert_array_equal(state.opt_state[0][0].trace["w"].packed.stacked()[3], trace[3])
    assert (state.params.stacked()["w"][:3] != before[:3]).all()
    for _ in range(9):
        state, _ = step(state, (x, y))
    with pytest.raises(FloatingPointError, match=r"the last 10 steps, all since step 1, were skipped"):
        step(state, (x, y))


def test_the_norm_of_each_workers_gradient_is_reported():
    tx = optax.chain(optax.sgd(0.02), gossip.local_sgd(3, axis_name="data"))
    batch = batches_of()[0]
    _, metrics = by_step(loss_fn, tx, {"w": jnp.ones(5)}, [batch], mesh_of(4))
    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    grads = jax.vmap(jax.grad(lambda w, x, y: loss_fn({"w": w}, (x, y))), (None, 0, 0))(jnp.ones(5), *parts)
    np.testing.assert_allclose(metrics[0].grad_norm, jnp.linalg.norm(grads, axis=1), rtol=1e-5)


def test_gossip_with_sharded_parameters_raises():
    mesh = jax.make_mesh((4, 2), ("city", "chip"))
    tx = optax.chain(optax.sgd(0.02), gossip.d_psgd(axis_name="city"))
    step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name=("city", "chip"), param_specs=P("chip"))
    with pytest.raises(ValueError, match=r"shards parameters over \['chip'\].*leave param_specs out"):
        step.init({"w": jnp.ones(6)})
