"""`delay` hands updates on unchanged, late by the number of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of

import gcjax


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_every_update_comes_out_so_many_steps_later(steps):
    tx = gcjax.delay(steps)
    params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros((), jnp.bfloat16)}
    state = tx.init(params)
    put_in, came_out = [], []
    for t in range(8):
        g = {"w": jnp.full((2, 2), t + 1.0), "b": jnp.bfloat16(-t - 1.0)}
        late, state = jax.jit(tx.update)(g, state)
        assert late["b"].dtype == jnp.bfloat16
        put_in.append(g)
        came_out.append(late)
    for t, late in enumerate(came_out):
        expected = put_in[t - steps] if t >= steps else jax.tree.map(jnp.zeros_like, params)
        jax.tree.map(np.testing.assert_array_equal, late, expected)


def test_delay_after_a_compressor_slows_descent():
    """On x^2 / 2 with rate 0.9 plain descent shrinks x by 10 a step; a delay of 2 makes the same rate diverge."""
    mesh = mesh_of(4)

    def loss(params, batch):
        return 0.5 * params**2 + 0 * jnp.mean(batch)

    def distance(tx):
        step = gcjax.make_train_step(loss, tx, mesh, axis_name="data")
        state = step.init(jnp.float32(1.0))
        for _ in range(20):
            state, _ = step(state, np.ones((4, 1), np.float32))
        return abs(float(state.params))

    dense = gcjax.dense_compress(axis_name="data")
    assert distance(optax.chain(dense, gcjax.delay(0), optax.sgd(0.9))) < 1e-6
    assert distance(optax.chain(dense, gcjax.delay(2), optax.sgd(0.9))) > 1.0
    assert distance(optax.chain(dense, gcjax.delay(2), optax.sgd(0.2))) < 0.1


def test_bad_steps_raise():
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        gcjax.delay(-1)
    for bad in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"int, got {bad!r}"):
            gcjax.delay(bad)
