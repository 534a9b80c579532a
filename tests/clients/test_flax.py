"""Small programs after the patterns of Flax's examples, with compression put in."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training import train_state
from harness import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax
import gcjax.flax

WORKERS, CLASSES = 4, 4
CHANGING = (nnx.BatchStat, nnx.RngCount)  # what a forward pass changes


def variance(**options):
    return gcjax.variance_compress(1.0, **{"capacity": 256, "axis_name": "data"} | options)


def batches(number=6, size=32):
    """Small images of some classes, as MNIST's loop would get them."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(CLASSES, 6, 6, 1))
    for _ in range(number):
        label = rng.integers(0, CLASSES, size)
        yield {"image": (means[label] + rng.normal(size=(size, 6, 6, 1)) / 4).astype(np.float32), "label": label}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def on(mesh, tree, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def assert_equal_on_all_devices(tree):
    for leaf in jax.tree.leaves(tree):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], shard) for shard in shards)


class CNN(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.avg_pool(linen.relu(linen.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        return linen.Dense(CLASSES)(x.reshape(len(x), -1))


def test_linen_mnist_on_one_device():
    """examples/mnist: `TrainState.apply_gradients`, which here passes the squares."""
    params = CNN().init(jax.random.key(0), jnp.ones((1, 6, 6, 1)))["params"]
    tx = optax.chain(variance(axis_name=None), optax.sgd(0.1, momentum=0.9))
    state = train_state.TrainState.create(apply_fn=CNN().apply, params=params, tx=tx)

    def loss_fn(params, batch):
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"])

    @jax.jit
    def train_step(state, batch):
        loss, moments = gcjax.value_and_moments(loss_fn)(state.params, batch)
        squares = moments.sum_grad_squared
        return gcjax.flax.apply_gradients(state, grads=moments.grad, sum_grad_squared=squares), loss

    batch = next(batches())
    after, _ = train_step(state, batch)
    _, moments = jax.jit(gcjax.value_and_moments(loss_fn))(state.params, batch)
    assert gcjax.info(after.opt_state).selected == expected_count(moments)
    assert after.tx is tx
    assert after.step == 1


def expected_count(moments):
    """Entries whose gradient stands out from their squares, in the first step of `variance`."""
    pairs = zip(jax.tree.leaves(moments.grad), jax.tree.leaves(moments.sum_grad_squared), strict=True)
    return sum(int((g**2 > s).sum()) for g, s in pairs)


class Net(nnx.Module):
    """BatchNorm and Dropout, as in NNX's MNIST example."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear = nnx.Linear(72, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.linear(self.dropout(x.reshape(len(x), -1)))


def moments_of(model, batch):
    """((loss, new statistics and counters), moments) of a module's batch."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, batch):
        local = nnx.merge(graphdef, params, rest, copy=True)
        with gcjax.flax.sync_batchnorm("samples", local):
            loss = cross_entropy(local(batch["image"]), batch["label"])
        return loss, nnx.state(local, CHANGING)

    return gcjax.value_and_moments(loss_fn, has_aux=True, sample_axis="samples")(params, batch)


def sharded_optimizer(mesh, transport):
    model = Net(nnx.Rngs(0))
    tx = optax.chain(variance(transport=transport), optax.adam(1e-2))
    return model, gcjax.flax.distribute(nnx.Optimizer(model, tx, wrt=nnx.Param), mesh)


def nnx_step(model, optimizer, batch):
    (loss, rest), moments = moments_of(model, batch)
    means = jax.tree.map(lambda x: jax.lax.pmean(x, "data").astype(x.dtype), rest)
    nnx.update(model, means)
    optimizer.update(model, moments.grad, sum_grad_squared=moments.sum_grad_squared)
    return jax.lax.pmean(loss, "data")


@cases("transport", ["two_phase", "all_gather"], default=1)
def test_nnx_shard_map_trains_module_and_optimizer(transport):
    mesh = mesh_of(WORKERS)
    model, optimizer = sharded_optimizer(mesh, transport)
    specs = (nnx.StateSharding({...: P()}), gcjax.flax.state_sharding(optimizer), P("data"))
    train_step = nnx.jit(nnx.shard_map(nnx_step, mesh=mesh, in_specs=specs, out_specs=P()))
    losses = [float(jax.block_until_ready(train_step(model, optimizer, on(mesh, b, P("data"))))) for b in batches(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert int(model.dropout.rngs.count[...]) == 8
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0
    info = gcjax.info(optimizer.opt_state)
    assert info.sent.shape == info.payload_bits.shape == info.residual_norm.shape == (WORKERS,)
    assert len(np.unique(info.residual_norm)) == WORKERS
    assert_equal_on_all_devices(nnx.state(model, nnx.Param))


def test_nnx_objects_go_through_jax_shard_map():
    mesh = mesh_of(WORKERS)
    model, optimizer = sharded_optimizer(mesh, "all_gather")
    specs = (P(), gcjax.state_specs(optimizer))

    def step(model, optimizer, batch):
        loss = nnx_step(model, optimizer, batch)
        return loss, model, optimizer

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(P(), *specs)))
    for batch in batches(2):
        _, model, optimizer = jax.block_until_ready(run(model, optimizer, on(mesh, batch, P("data"))))
    assert (gcjax.info(optimizer.opt_state).sent > 0).all()


def test_nnx_jit_with_a_sharded_batch():
    """NNX's MNIST loop on several devices: `nnx.jit`, the optimiser outside the compression."""
    mesh = mesh_of(WORKERS)
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graphdef, params, _ = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, batch, rest):
        local = nnx.merge(graphdef, params, rest, copy=True)
        return cross_entropy(local(batch["image"]), batch["label"]), nnx.state(local, CHANGING)

    @nnx.jit
    def train_step(model, optimizer, compression, batch):
        _, params, rest = nnx.split(model, nnx.Param, ...)
        value_and_grad = compressed(lambda params, batch: loss_fn(params, batch, rest))
        (loss, changed), grads, compression = value_and_grad(params, compression, batch)
        nnx.update(model, changed)
        optimizer.update(model, grads)
        return loss, compression

    def compressed(loss_fn):
        tx = gcjax.top_k_compress(0.1, axis_name="data")
        return gcjax.compressed_value_and_grad(loss_fn, tx, mesh, has_aux=True, moments=None)

    compression, losses = compressed(loss_fn).init(params), []
    for batch in batches(8):
        loss, compression = jax.block_until_ready(train_step(model, optimizer, compression, on(mesh, batch, P("data"))))
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert (gcjax.info(compression).residual_norm > 0).all()
    assert int(model.dropout.rngs.count[...]) == 8
    assert_equal_on_all_devices(nnx.state(model, nnx.Param))


def test_a_split_state_is_refused():
    mesh = mesh_of(WORKERS)
    _, optimizer = sharded_optimizer(mesh, "all_gather")
    for function in (lambda state: gcjax.distribute(state, mesh), gcjax.state_specs):
        with pytest.raises(TypeError, match=r"split into dicts.*gcjax.flax.distribute\(optimizer, mesh\)"):
            function(nnx.state(optimizer))
        with pytest.raises(TypeError, match="from_state_dict"):
            function(serialization.to_state_dict(variance().init({"w": jnp.ones(3)})))
    for function in (lambda state: gcjax.flax.distribute(state, mesh), gcjax.flax.state_sharding):
        with pytest.raises(
            TypeError, match=r"expected an nnx.Optimizer, got tuple; for states of optax use gcjax.distribute"
        ):
            function(optimizer.opt_state)


def test_placing_an_nnx_optimizer_as_a_pytree_raises():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(variance(), optax.adam(1e-2)), wrt=nnx.Param)
    for state in (optimizer, optimizer.opt_state):
        with pytest.raises(TypeError, match=r"use gcjax\.flax\.distribute\(optimizer, mesh\)"):
            gcjax.distribute(state, mesh_of(WORKERS))
    step = gcjax.make_train_step(lambda params, batch: 0.0, optax.chain(variance(), optax.adam(1e-2)), mesh_of(WORKERS))
    step.init(nnx.state(model, nnx.Param))  # parameters of NNX are fine


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(36, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("stream", ["default", "dropout"])
@pytest.mark.parametrize("squares", [False, True])
def test_dropout_of_nnx_draws_for_each_worker_step_and_sample(squares, stream):
    rngs = nnx.Rngs(0) if stream == "default" else nnx.Rngs(params=0, dropout=1)
    graphdef, params, rest = nnx.split(Dropped(rngs), nnx.Param, ...)

    def loss_fn(params, batch, key):
        model = nnx.merge(graphdef, params, rest, copy=True)
        gcjax.flax.reseed(model, **{stream: key})
        out = model(batch["image"].reshape(-1, 36))
        return cross_entropy(out, batch["label"]), out == 0

    tx = optax.chain(variance() if squares else gcjax.top_k_compress(0.25, axis_name="data"), optax.adam(1e-2))
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(WORKERS), has_aux=True)
    state, masks = step.init(params, key=jax.random.key(1)), []
    for batch in batches(3):
        state, metrics = step(state, batch)
        masks.append(np.asarray(metrics.aux).reshape(-1, 64))
    found = np.concatenate(masks)  # of all steps, workers and samples
    assert abs(found.mean() - 0.5) < 0.05
    assert len(np.unique(found, axis=0)) == len(found)
    with pytest.raises(TypeError, match="is a random key, which cannot be trained"):
        step.init(nnx.split(Dropped(rngs))[1])


def test_batchnorm_and_dropout_of_nnx_train_in_a_step():
    graphdef, params, stats, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)

    def loss_fn(params, batch, key, model_state):
        model = nnx.merge(graphdef, params, model_state, rest, copy=True)
        gcjax.flax.reseed(model, default=key)
        loss = cross_entropy(model(batch["image"]), batch["label"])
        return loss, nnx.state(model, nnx.BatchStat)

    tx = optax.chain(gcjax.top_k_compress(0.25, axis_name="data"), optax.adam(1e-2))
    step = gcjax.make_train_step(loss_fn, tx, mesh_of(WORKERS))
    state, losses = step.init(params, model_state=stats, key=jax.random.key(1)), []
    for batch in batches(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < 0.8 * losses[0]
    assert jax.tree.leaves(state.model_state.stacked())[0].any()


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_optimizer_states_are_serialised():
    mesh = mesh_of(WORKERS)
    params = {"w": jnp.arange(40.0), "b": jnp.ones(3)}
    tx = optax.chain(variance(transport="two_phase"), optax.adam(1e-2))
    fresh = gcjax.distribute(tx.init(params), mesh)
    specs = gcjax.state_specs(fresh)
    gradients = on(mesh, jax.tree.map(lambda x: jnp.stack([x * (i + 1) for i in range(WORKERS)]), params), P("data"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    def update(state, gradients):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

    state = update(fresh, gradients)[1]
    expected = update(state, gradients)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, update(restored, gradients), expected)
    other = gcjax.distribute(tx.init(params), mesh_of(2))
    with pytest.raises(
        ValueError, match=r"saved state does not fit: .* \(4, 32, 128\) there and \(2, 32, 128\) in the"
    ):
        serialization.from_bytes(other, serialization.to_bytes(state))
    assert copy.copy(serialization.to_state_dict(state))["0"]["report"].keys() >= {".skipped", ".sent.sent"}


def test_a_stream_that_the_model_does_not_have_is_named():
    model = Dropped(nnx.Rngs(params=0, dropout=1))
    with pytest.raises(ValueError, match=r"no random stream \['default'\]; its streams are \['dropout'\]"):
        gcjax.flax.reseed(model, default=jax.random.key(1), dropout=jax.random.key(2))
    gcjax.flax.reseed(model, dropout=jax.random.key(2))
