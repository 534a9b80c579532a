"""A compressor without an axis, on gradients that jax.jit computes on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gcjax

W, X = np.ones(4, np.float32), np.ones((16, 4), np.float32)
TX = optax.chain(gcjax.top_k_compress(0.5), optax.sgd(0.1))
SEEN = pytest.raises(
    ValueError, match=r"no axis_name was given, but .* on a mesh with axes \{'data': 8\}.*compressed_v"
)


def train_step(w, state, x):
    updates, state = TX.update(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), state, w)
    return optax.apply_updates(w, updates), state


def meshes():
    return mesh_of(8), jax.make_mesh((8,), ("data",), (AxisType.Explicit,))


@pytest.mark.parametrize("mesh", meshes(), ids=["auto", "explicit"])
def test_a_sharded_batch_in_plain_jit_raises(mesh):
    on = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with SEEN:
        jax.jit(train_step)(on(W), on(TX.init(W)), x)
    with SEEN, jax.set_mesh(mesh):
        jax.jit(train_step)(W, TX.init(W), x)
    with SEEN, jax.set_mesh(mesh):
        jax.jit(train_step).lower(W, TX.init(W), X)
    with SEEN, jax.set_mesh(mesh):
        jax.jit(TX.update)(W, TX.init(W))
    with SEEN:
        TX.update(on(W), TX.init(W))


def test_shardings_that_only_jit_names_raise_when_the_program_is_lowered():
    mesh = mesh_of(8)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P(), P(), P("data")))
    seen = pytest.raises(ValueError, match=r"no axis_name was given, but .* on 8 devices.*compressed_v")
    with seen:
        jax.jit(train_step, in_shardings=shardings)(W, TX.init(W), X)
    with seen:
        jax.jit(train_step, out_shardings=shardings[:2]).lower(W, TX.init(W), X)

    def in_a_scan(w, state, x):
        return jax.lax.scan(lambda carry, x: (train_step(*carry, x), None), (w, state), x[None])

    with seen:
        jax.jit(in_a_scan, in_shardings=shardings)(W, TX.init(W), X)


def test_a_single_worker_runs_on_a_machine_with_many_devices():
    w, _ = jax.jit(train_step)(W, TX.init(W), X)
    on_third = jax.device_put((W, TX.init(W), X), jax.devices()[3])
    np.testing.assert_array_equal(jax.jit(train_step)(*on_third)[0], w)
    single = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with jax.set_mesh(single):
        np.testing.assert_array_equal(jax.jit(train_step)(W, TX.init(W), X)[0], w)
    alone = jax.shard_map(train_step, mesh=mesh_of(8), in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(jax.jit(alone)(W, TX.init(W), X)[0], w)


def test_the_check_at_lowering_passes_through_transformations():
    tx = gcjax.dense_compress()
    state, update = tx.init(W), lambda w, state: tx.update(3 * w, state)[0]
    expected = jax.jit(update)(W, state)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (W, state))
    np.testing.assert_array_equal(jax.jit(jax.vmap(update))(*two), [expected, expected])
    np.testing.assert_array_equal(jax.vmap(update)(*two), [expected, expected])
    np.testing.assert_array_equal(jax.export.export(jax.jit(jax.checkpoint(update)))(W, state).call(W, state), expected)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda w: jnp.sum(update(w, state))))(W), expected)
