"""A language model trained as in Flax's lm1b: plain `jax.jit`, state sharded by rules, batch sharded by the mesh."""

import difflib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax._hlo import collectives

VOCABULARY, WIDTH = 32, 16


class LanguageModel(nn.Module):
    """Each token sees the mean of those before it."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, deterministic):
        def kernel(*names):
            return nn.with_partitioning(nn.initializers.lecun_normal(), names)

        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=kernel("tensor", "fsdp"))(tokens)
        x = jnp.cumsum(x, axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
        x = nn.relu(nn.Dense(4 * WIDTH, kernel_init=kernel("fsdp", "tensor"))(x))
        x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        return nn.Dense(VOCABULARY, kernel_init=kernel("tensor", "fsdp"))(x)


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def batches(mesh, steps):
    """Sentences in which a token follows from the one before."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = (rng.integers(0, VOCABULARY, (16, 1)) + 3 * np.arange(8)) % VOCABULARY
        yield jax.device_put({"inputs": tokens}, NamedSharding(mesh, P(("data", "fsdp"))))


def create_state(model, tx, mesh, key):
    """The state, made where it lives, and its shardings."""

    def init(key):
        params = model.init(key, jnp.zeros((1, 8), jnp.int32), True)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    shardings = nn.get_sharding(jax.eval_shape(init, key), mesh)
    return nn.unbox(jax.jit(init, out_shardings=shardings)(key)), nn.unbox(shardings)


def plain(model, mesh, steps):
    dropout_key = jax.random.key(1)
    state, shardings = create_state(model, optax.adamw(3e-2), mesh, jax.random.key(0))

    def train_step(state, batch):
        key = jax.random.fold_in(dropout_key, state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"], False, rngs={"dropout": key})
            return cross_entropy(logits, batch["inputs"]), logits

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(state.params)
        new_state = state.apply_gradients(grads=grads)
        return new_state, {"loss": loss, "first": logits[:, 0].argmax(-1)}

    train_step = jax.jit(train_step, out_shardings=(shardings, None), donate_argnums=0)
    history = []
    for batch in batches(mesh, steps):
        state, metrics = jax.block_until_ready(train_step(state, batch))
        history.append(jax.device_get(metrics))
    return state, history, train_step.lower(state, batch)


class TrainState(train_state.TrainState):
    compression: Any = None


def compressed(model, mesh, steps, compressor):
    dropout_key = jax.random.key(1)
    state, shardings = create_state(model, optax.adamw(3e-2), mesh, jax.random.key(0))
    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    state = TrainState(**vars(state), compression=gcjax.init_sharded(compressor, state.params, mesh, specs))
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def train_step(state, batch):
        key = jax.random.fold_in(dropout_key, state.step)

        def loss_fn(params, batch, key):
            logits = state.apply_fn({"params": params}, batch["inputs"], False, rngs={"dropout": key})
            return cross_entropy(logits, batch["inputs"]), logits

        grad_fn = gcjax.compressed_value_and_grad(loss_fn, compressor, mesh, has_aux=True, param_specs=specs)
        (loss, logits), grads, compression = grad_fn(state.params, state.compression, batch, key=key)
        new_state = state.apply_gradients(grads=grads, compression=compression)
        return new_state, {"loss": loss, "first": logits[:, 0].argmax(-1)}

    train_step = jax.jit(train_step, out_shardings=(shardings, None), donate_argnums=0)
    history = []
    for batch in batches(mesh, steps):
        state, metrics = jax.block_until_ready(train_step(state, batch))
        history.append(jax.device_get(metrics))
    return state, history, train_step.lower(state, batch)


def mesh_of():
    return jax.make_mesh((4, 1, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)


def test_a_loop_needs_ten_new_lines():
    sources = [inspect.getsource(part) for part in (plain, compressed, TrainState)]
    before, after = sources[0].splitlines(), (sources[2] + sources[1]).splitlines()
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) <= 10 + 1, new  # the name of the function is the eleventh


def test_the_dense_compressor_takes_the_steps_of_plain_jit():
    state, expected, _ = plain(LanguageModel(), mesh_of(), 3)
    found_state, found, _ = compressed(LanguageModel(), mesh_of(), 3, gcjax.dense_compress(axis_name="data"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4)
        assert a["first"].shape == b["first"].shape == (16,)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-3), found_state.params, state.params)
    kernel = found_state.params["Dense_0"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor")
    assert found_state.opt_state[0].mu["Dense_0"]["kernel"].sharding.spec == P("fsdp", "tensor")


def crossing_entries(text, mesh):
    """The largest number of entries that a collective of a compiled program moves between parts of the axis "data"."""
    part = mesh.size // mesh.shape["data"]
    found = [c for c in collectives(text) if any(len({i // part for i in group}) > 1 for group in c.groups or ())]
    return max((c.elements for c in found), default=0)


@pytest.mark.parametrize("name", ["top_k", "variance"])
def test_it_trains_and_sends_little(name):
    compressor = {
        "top_k": gcjax.top_k_compress(0.05, axis_name="data"),
        "variance": gcjax.variance_compress(1.0, capacity=64, axis_name="data"),
    }[name]
    state, history, lowered = compressed(LanguageModel(dropout=0.1), mesh_of(), 20, compressor)
    losses = [metrics["loss"] for metrics in history]
    assert losses[-1] < 0.9 * losses[0], losses
    info = gcjax.info(state.compression)
    assert info.sent.shape == (8,)
    assert 0 < info.sent.sum() < 0.2 * 8 * 1000
    assert crossing_entries(lowered.compile().as_text(), mesh_of()) <= 480  # 4 workers' words of 120
    for leaf in jax.tree.leaves(state.compression):
        assert 8 * leaf.addressable_shards[0].data.shape[0] == leaf.shape[0]


def test_plain_jit_all_reduces_the_gradient():
    """What the test above guards against is visible to it."""
    _, _, lowered = plain(LanguageModel(), mesh_of(), 1)
    assert crossing_entries(lowered.compile().as_text(), mesh_of()) >= 16 * 64 // 2  # a shard of a kernel
