"""`local_sgd` against loops in NumPy, and what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gossip_workers import BUCKET, DILOCO, SHAPES, Workers, assert_same, dyadic, mean_of_all, normal, stacks

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
    assert (all_reduce.kind, all_reduce.what) == ("all-reduce", ("f32", BUCKET))
    assert all_reduce.computation != "ENTRY"
    np.testing.assert_array_equal(run.info().bits, 2 * 32 * np.full(4, -(-6 * BUCKET // 4)))


@pytest.mark.parametrize(
    "compressor", [None, pytest.param(gcjax.top_k_compress(1.0, axis_name="data"), marks=pytest.mark.full)]
)
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
    each = 6 * BUCKET if compressor is None else gcjax.info(run.state).wire_bytes
    np.testing.assert_array_equal(run.info().bits, 3 * 32 * np.full(4, np.ceil(each / 4)))
    assert "ENTRY" not in {c.computation for c in run.collectives()}


def test_leaves_keep_their_dtypes():
    tx = gossip.local_sgd(1, outer=DILOCO)
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2)}
    got, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    assert (got["h"].dtype, got["f"].dtype) == (jnp.bfloat16, jnp.float32)
