"""Training loops in pmap, and the same in shard_map from a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax

WORKERS, STEPS = 8, 6
METHODS = {
    "variance": gcjax.variance_compress(0.5, capacity=64, axis_name="data"),
    "top_k": gcjax.top_k_compress(0.2, axis_name="data"),
    "power_sgd": gcjax.power_sgd_compress(1, key=jax.random.key(0), axis_name="data"),
}


def loss_fn(params, batch):
    x, y = batch
    return optax.l2_loss(jnp.tanh(x @ params["first"]) @ params["second"], y).mean()


def params_of(seed=0):
    first, second = jax.random.split(jax.random.key(seed))
    return {"first": jax.random.normal(first, (6, 20)), "second": jax.random.normal(second, (20, 5))}


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(WORKERS * 4, 6)).astype(np.float32)
        yield x, np.stack([np.sin(x).sum(1)] * 5, 1)


def train_step_of(tx):
    """The same lines for both: the gradient is local in both."""

    def train_step(params, opt_state, batch):
        _, moments = gcjax.value_and_moments(loss_fn)(params, batch)
        updates, opt_state = tx.update(moments.grad, opt_state, params, sum_grad_squared=moments.sum_grad_squared)
        return optax.apply_updates(params, updates), opt_state

    return train_step


def stacked(tree):
    return jax.tree.map(lambda x: np.stack([x] * WORKERS), tree)


def first_states(tx, params):
    """The state of every worker, which depends on their number."""
    return jax.pmap(tx.init, axis_name="data")(stacked(params))


@functools.cache
def steps(method):
    """A transform, its step in pmap and its step in shard_map."""
    tx = optax.chain(METHODS[method], optax.sgd(0.125, momentum=0.5))
    specs = gcjax.state_specs(tx.init(params_of()))
    sharded = jax.shard_map(
        train_step_of(tx), mesh=mesh_of(WORKERS), in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
    )
    return tx, jax.pmap(train_step_of(tx), axis_name="data"), jax.jit(sharded)


def train_in_pmap(method, params, opt_state, data):
    step = steps(method)[1]
    for batch in data:
        batch = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        params, opt_state = jax.block_until_ready(step(params, opt_state, batch))
    return params, opt_state


def train_in_shard_map(method, params, opt_state, data):
    step, params = steps(method)[2], gcjax.distribute(params, mesh_of(WORKERS))
    for batch in data:
        batch = jax.device_put(batch, jax.NamedSharding(mesh_of(WORKERS), P("data")))
        params, opt_state = jax.block_until_ready(step(params, opt_state, batch))
    assert step._cache_size() == 1
    return params, opt_state


def out_of_pmap(opt_state):
    """As the README shows it."""
    specs = gcjax.state_specs(opt_state)
    joined = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: jnp.concatenate(x) if spec else x[0], part), specs, opt_state
    )
    return jax.device_put(joined, jax.tree.map(lambda spec: jax.NamedSharding(mesh_of(WORKERS), spec), specs))


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@cases("method", METHODS, default=1)
def test_a_checkpoint_of_pmap_goes_on_in_shard_map_to_the_same_bits(method):
    tx, params, data = steps(method)[0], params_of(), list(batches(STEPS))
    half, half_state = jax.device_get(train_in_pmap(method, stacked(params), first_states(tx, params), data[:3]))
    in_pmap, pmap_state = train_in_pmap(method, half, half_state, data[3:])
    of_one = jax.tree.map(lambda x: x[0], half)
    in_shard_map, state = train_in_shard_map(method, of_one, out_of_pmap(half_state), data[3:])
    for worker in range(WORKERS):
        assert_same_bits(jax.tree.map(lambda x, w=worker: x[w], in_pmap), in_shard_map)
    assert_same_bits(out_of_pmap(pmap_state), state)
    assert loss_fn(in_shard_map, data[0]) < loss_fn(params, data[0])
    ours, theirs = gcjax.info(state), gcjax.info(pmap_state)
    np.testing.assert_array_equal(ours.residual_norm, theirs.residual_norm)
    assert ours.wire_bytes == theirs.wire_bytes > 0
    afresh = gcjax.distribute(tx.init(params), mesh_of(WORKERS))
    without, _ = train_in_shard_map(method, of_one, afresh, data[3:])
    assert (without["first"] != in_shard_map["first"]).any()  # the state does matter


def test_stacked_states_outside_pmap_raise():
    tx = METHODS["top_k"]
    with pytest.raises(ValueError, match="update got the state of 8 workers at once"):
        tx.update(params_of(), jax.pmap(tx.init, axis_name="data")(stacked(params_of())))


FIRST = {"first": True, "second": False}
HIDING = {
    "masked": lambda compress: optax.masked(compress, FIRST),
    "partition": lambda compress: optax.partition(
        {True: compress, False: gcjax.dense_compress(axis_name="data")}, FIRST
    ),
}


def update_on(workers, tx, mode):
    """Trace an update with the gradient of every worker its own."""
    over = {"axis_name": "data", "devices": jax.devices()[:workers]}

    def update(worker, params):
        gradient = jax.tree.map(lambda x: x * (1 + worker), params)
        return tx.update(gradient, tx.init(params))[0]

    if mode == "pmap":
        return jax.pmap(lambda worker: update(worker, params_of()), **over)(jnp.arange(workers))
    run = jax.shard_map(
        lambda workers: update(workers[0], params_of()),
        mesh=mesh_of(workers),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=mode == "shard_map",
    )
    return jax.eval_shape(run, jax.device_put(jnp.arange(workers), jax.NamedSharding(mesh_of(workers), P("data"))))


@pytest.mark.parametrize("mode", ["pmap", "shard_map without types"])
@pytest.mark.parametrize("hiding", HIDING)
def test_hidden_leaves_are_refused_where_jax_has_no_types_for_them(hiding, mode):
    tx = HIDING[hiding](METHODS["top_k"])
    message = (
        r"hides the gradient at \['second'\] from the compressor, on the devices of \{'data': 4\}.*check_vma=True or"
    )
    with pytest.raises(ValueError, match=message):
        update_on(4, tx, mode)
    update_on(4, METHODS["top_k"], mode)
    update_on(1, tx, mode)


def test_jax_sees_leaves_that_nothing_averages():
    update_on(4, HIDING["partition"](METHODS["top_k"]), "shard_map")
    with pytest.raises(ValueError, match="could not infer replication"):
        update_on(4, HIDING["masked"](METHODS["top_k"]), "shard_map")


def test_leaves_that_have_no_gradient_are_not_hidden():
    """A tree with None in place of frozen parameters, as `make_train_step(trainable=...)` makes it."""

    def update(gradient):
        gradient = {"first": gradient["first"], "second": None}
        return METHODS["top_k"].update(gradient, METHODS["top_k"].init(gradient))[0]

    updates = jax.pmap(update, axis_name="data")(stacked(params_of()))
    assert updates["second"] is None
