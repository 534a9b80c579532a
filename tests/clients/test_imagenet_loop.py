"""A loop as in Flax's ImageNet example, which was written for `pmap`, under `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from harness import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gcjax

WORKERS, CLASSES = 4, 4


class ResNet(nn.Module):
    """One block."""

    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9)
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = x + nn.relu(norm(nn.Conv(8, (3, 3), use_bias=False)(x)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_state(tx):
    variables = ResNet().init(jax.random.key(0), jnp.ones((1, 6, 6, 1)), train=False)
    return TrainState.create(
        apply_fn=ResNet().apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )


def batches(mesh, steps):
    rng = np.random.default_rng(0)
    means = rng.normal(size=(CLASSES, 6, 6, 1))
    for _ in range(steps):
        label = rng.integers(0, CLASSES, 32)
        batch = {"image": (means[label] + rng.normal(size=(32, 6, 6, 1)) / 4).astype(np.float32), "label": label}
        yield jax.device_put(batch, NamedSharding(mesh, P("batch")))


def train_step(state, batch, grad_of, reduce):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_state = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (new_state["batch_stats"], logits)

    (loss, (batch_stats, logits)), grads = grad_of(jax.value_and_grad(loss_fn, has_aux=True))(state.params)
    metrics = {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}
    batch_stats, metrics = jax.lax.pmean((batch_stats, metrics), "batch")
    return state.apply_gradients(grads=reduce(grads), batch_stats=batch_stats), metrics


def trained(compressor, steps):
    """The loop with local gradients and without the example's `pmean` of the gradient."""
    mesh = mesh_of(WORKERS, axis="batch")
    state = gcjax.distribute(create_state(optax.chain(compressor, optax.sgd(0.1, momentum=0.9, nesterov=True))), mesh)
    specs = gcjax.state_specs(state)

    def local(state, batch):
        return train_step(state, batch, lambda fn: gcjax.local_gradients(fn, "batch"), lambda grads: grads)

    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("batch")), out_specs=(specs, P()))
    step, losses = jax.jit(step, donate_argnums=0), []
    for batch in batches(mesh, steps):
        state, metrics = jax.block_until_ready(step(state, batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def test_the_dense_compressor_takes_the_steps_of_pmap():
    mesh = mesh_of(WORKERS, axis="batch")
    state = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), create_state(optax.sgd(0.1, momentum=0.9, nesterov=True)))
    by_pmap = jax.pmap(
        lambda state, batch: train_step(state, batch, lambda fn: fn, lambda grads: jax.lax.pmean(grads, "batch")),
        axis_name="batch",
    )
    expected = []
    for batch in batches(mesh, 3):
        batch = jax.tree.map(lambda x: np.asarray(x).reshape(WORKERS, -1, *x.shape[1:]), batch)
        state, metrics = jax.block_until_ready(by_pmap(state, batch))
        expected.append(float(metrics["loss"][0]))
    found, losses = trained(gcjax.dense_compress(axis_name="batch"), 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for now, then in zip(jax.tree.leaves(found.batch_stats), jax.tree.leaves(state.batch_stats), strict=True):
        np.testing.assert_allclose(now, then[0], rtol=1e-3, atol=1e-5)


def test_it_trains():
    state, losses = trained(gcjax.top_k_compress(0.1, axis_name="batch"), 15)
    assert losses[-1] < 0.8 * losses[0]
    assert (gcjax.info(state.opt_state).residual_norm > 0).all()
