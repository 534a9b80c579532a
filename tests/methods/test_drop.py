"""drop_compress: a quantile from a sample, global or by leaf; zeros and ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gcjax
from gcjax._kernels import layout
from gcjax.contrib import drop

N, DENSITY = 1_000_000, 0.01


def bucket_of(*sizes):
    return layout.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]).buckets[0]


def once(tx, gradient):
    return jax.tree.map(np.asarray, jax.jit(lambda g: tx.update(g, tx.init(g))[0])(gradient))


def test_the_threshold_is_the_quantile_within_sampling_error():
    bucket = bucket_of(N)
    x = jax.random.normal(jax.random.key(0), (N,))
    share = jax.jit(lambda step: jnp.mean(jnp.abs(x) >= drop._of_all(bucket.join([x]), step, bucket, DENSITY)))
    shares = np.array([share(step) for step in range(16)])
    error = (DENSITY * (1 - DENSITY) / drop.SAMPLE) ** 0.5
    assert 0.5 * error < shares.std() < 2 * error  # each step has its own sample
    assert np.abs(shares - DENSITY).max() < 5 * error
    assert abs(shares.mean() - DENSITY) < 5 * error / 4


def test_layer_wise_thresholds_select_from_every_leaf():
    g = {"large": jnp.array([400.0, 100.0, 200.0, 300.0]), "small": jnp.array([1.0, -4.0, 3.0, 2.0])}
    sent = once(gcjax.contrib.drop_compress(0.25, capacity=32), g)
    assert sent["large"].tolist() == [400, 0, 0, 300]
    assert sent["small"].tolist() == [0, 0, 0, 0]
    sent = once(gcjax.contrib.drop_compress(0.25, layer_wise=True, capacity=32), g)
    assert sent["large"].tolist() == [400, 0, 0, 0]
    assert sent["small"].tolist() == [0, -4, 0, 0]


def test_every_large_leaf_has_its_own_quantile():
    sizes, scales = (200_000, 150_000, 10), (1.0, 1000.0, 1e-6)
    rng = np.random.default_rng(2)
    leaves = [(rng.normal(size=n) * s).astype(np.float32) for n, s in zip(sizes, scales, strict=True)]
    bucket = bucket_of(*sizes)
    thresholds = drop._of_leaves(bucket.join(leaves), jnp.int32(0), bucket, 0.05)
    thresholds = bucket.split(jnp.broadcast_to(thresholds, bucket.shape))
    for threshold, leaf in zip(thresholds[:2], leaves, strict=False):
        share = (np.abs(leaf) >= threshold).mean()
        assert share == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / (drop.SAMPLE // 3)) ** 0.5)
    assert (thresholds[2] == np.abs(leaves[2]).max()).all()


@pytest.mark.parametrize("layer_wise", [False, True])
def test_zeros_are_never_sent(layer_wise):
    g = {"a": jnp.array([0.0, 2.0, 0.0, -1.0]), "b": jnp.zeros(40)}
    tx = gcjax.contrib.drop_compress(1.0, layer_wise=layer_wise, capacity=64)
    info = gcjax.info(jax.jit(tx.update)(g, tx.init(g))[1])
    assert info.selected == info.sent == 2


def test_ties_beyond_the_capacity_are_sent_later():
    tx = gcjax.contrib.drop_compress(0.01)
    state, zero = tx.init(jnp.zeros(160)), jnp.zeros(160)
    update, state = jax.jit(tx.update)(jnp.full(160, 0.5), state)
    assert gcjax.info(state).selected == 160
    total = np.asarray(update)
    assert 0 < np.count_nonzero(total) == gcjax.info(state).sent < 160
    for _ in range(4):
        update, state = jax.jit(tx.update)(zero, state)
        total = total + update
    np.testing.assert_array_equal(total, np.full(160, 0.5))
