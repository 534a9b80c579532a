"""Training in float16 with a dynamic loss scale, as `jmp` and `flax.training.dynamic_scale` do it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of

import gcjax

WORKERS = 4
X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float16)
Y = (X @ np.arange(8) / 8).astype(np.float16)
PARAMS = {"w": np.zeros(8, np.float32)}
GROWTH = 10  # good steps until the scale is doubled


def scaled_loss(params, batch):
    x, y, scale = batch
    half = params["w"].astype(jnp.float16)
    return jnp.mean((x @ half - y).astype(jnp.float16) ** 2 * scale.astype(jnp.float16)).astype(jnp.float32)


@pytest.mark.parametrize(
    "compress",
    [gcjax.variance_compress(alpha=1.0, axis_name="data"), gcjax.top_k_compress(0.5, axis_name="data")],
    ids=["variance", "top_k"],
)
def test_a_dynamic_loss_scale_finds_its_level(compress):
    """The gradient is divided by the scale in float32, before the compressor, and its squares by that squared.

    Steps that overflow are skipped whole: they leave no trace in residual or optimiser, and the scale is halved.
    """
    optimiser, mesh = optax.adam(0.05), mesh_of(WORKERS)

    def local_step(params, opt_state, compression, scale, x, y):
        value, moments = gcjax.value_and_moments(scaled_loss)(params, (x, y, jnp.full(len(x), scale)))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, moments.grad)
        squares = jax.tree.map(lambda s: s / scale**2, moments.sum_grad_squared)
        updates, compression = compress.update(grads, compression, sum_grad_squared=squares)
        good = jnp.all(jnp.isfinite(updates["w"]))  # NaN on all workers if the gradient of one is not finite
        stepped = optimiser.update(updates, opt_state)
        params = jnp.where(good, optax.apply_updates(params, stepped[0])["w"], params["w"])
        opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), stepped[1], opt_state)
        return {"w": params}, opt_state, compression, good, value[None]

    state = gcjax.distribute(compress.init(PARAMS), mesh)
    specs, over = gcjax.state_specs(state), jax.P("data")
    in_specs = (jax.P(), jax.P(), specs, jax.P(), over, over)
    run = jax.jit(
        jax.shard_map(local_step, mesh=mesh, in_specs=in_specs, out_specs=(jax.P(),) * 2 + (specs, jax.P(), over))
    )
    params, opt_state, scale, since, bad = PARAMS, optimiser.init(PARAMS), 2.0**20, 0, 0
    losses = []
    for _ in range(150):
        params, opt_state, state, good, value = jax.block_until_ready(run(params, opt_state, state, scale, X, Y))
        since, bad = (since + 1, bad) if good else (0, bad + 1)
        scale = scale / 2 if not good else scale * 2 if since % GROWTH == 0 else scale
        if good:
            losses.append(float(np.mean(value)) / scale)
    assert bad >= 4  # the first scales overflow
    assert gcjax.info(state).skipped == bad
    assert np.isfinite(gcjax.info(state).residual_norm).all()
    assert losses[-1] < 0.02 * losses[0]
