"""`gossip.make_train_step` and the functions for parameters that differ between workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_workers import KEY, least_squares, loss_fn, partner_of
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax import gossip


def test_params_and_momentum_are_per_worker():
    x, y, _ = least_squares()
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
    step = gossip.make_train_step(loss_fn, tx, mesh_of(8))
    state, metrics = step(step.init({"w": jnp.zeros(5)}), (x.reshape(-1, 5), y.reshape(-1)))
    grad = np.einsum("wsi,ws->wi", x, -y) / x.shape[1]
    expected = -0.02 * grad * np.asarray(metrics.loss)[:, None]
    np.testing.assert_allclose(state.params.stacked()["w"], expected, atol=1e-5)


def test_chains_in_which_gossip_cannot_work_raise():
    average = gossip.local_sgd(2, compressor=gcjax.top_k_compress(0.1, axis_name="data"), axis_name="data")
    for tx, message in (
        (optax.sgd(0.1), "has 0 gossip transforms"),
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
            gossip.make_train_step(loss_fn, tx, mesh_of(2)).init({"w": jnp.zeros(5)})
    with pytest.raises(ValueError, match="axis_name='model' must name axes of the mesh"):
        gossip.make_train_step(loss_fn, gossip.d_psgd(axis_name="model"), mesh_of(2), axis_name="model")
    step = gossip.make_train_step(loss_fn, gossip.d_psgd(axis_name="data"), mesh_of(2))
    with pytest.raises(TypeError, match=r"model_state\['k'\] is a random key"):
        step.init({"w": jnp.zeros(5)}, model_state={"k": KEY})
    with pytest.raises(TypeError, match=r"params\['w'\] has dtype int32, which cannot be trained"):
        step.init({"w": jnp.zeros(5, int)})
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        gossip.make_train_step(loss_fn, gossip.d_psgd(axis_name="data"), mesh_of(2), accumulate=0)


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
    step = gossip.make_train_step(lambda params, x: jnp.mean(x) * params["a"].sum(), tx, mesh)
    state, _ = step(step.init({"a": jnp.ones(3), "empty": jnp.zeros((0, 4))}), jnp.ones(2))
    assert gossip.mean_params(state.params)["empty"].shape == (0, 4)
    assert gossip.consensus_distance(state.params) == (0.0, 0.0)


def test_a_device_that_holds_more_than_int32_counts_is_named():
    tx = gossip.local_sgd(1)
    model = [jax.ShapeDtypeStruct((1 << 28,), jnp.float32)] * 8
    with pytest.raises(ValueError, match="holds 2,147,483,648 parameters, and gcjax counts to 2,147,483,647; shard"):
        jax.eval_shape(tx.update, model, jax.eval_shape(tx.init, model), model)
