"""drop_compress: a quantile from a sample, global or by leaf, and the need for the residual."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compact import entries
from harness import Runner, messages, residuals
from optimum import decaying, distance_after_training
from selection import cases

import gcjax
from gcjax._kernels import layout
from gcjax.contrib import drop

N, DENSITY = 1_000_000, 0.01


def bucket_of(*sizes):
    return layout.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]).buckets[0]


def once(tx, gradient):
    return jax.tree.map(np.asarray, jax.jit(lambda g: tx.update(g, tx.init(g))[0])(gradient))


def without_residual(tx):
    """The transform, with its first state in every step."""
    return optax.GradientTransformation(tx.init, lambda g, state, params=None: (tx.update(g, state)[0], state))


def test_message_by_hand():
    g = jnp.array([3.0, -0.5, -2.0, 0.25])
    (words,), info = messages(gcjax.contrib.drop_compress(0.5, capacity=32), g)
    assert info.payload_bits == 32 + (2 * 4 + 4) + 2 * 32  # in 2 slots: 3 low bits, 31 >> 3 is 3
    assert words[0] == 2
    assert entries(words[1:], 2, 32, 32, 32) == [(0, 0x40400000), (2, 0xC0000000)]  # 3 and -2


def test_a_small_model_sends_exactly_the_density():
    # 33 leaves of 33 entries in two words each: ceil(0.07 * 1089) = 77.
    values = np.random.default_rng(0).permutation(np.arange(1, 1090, dtype=np.float32)).reshape(33, 33)
    sent = once(gcjax.contrib.drop_compress(0.07, capacity=96), list(values))
    np.testing.assert_array_equal(sent, np.where(values > 1089 - 77, values, 0))


def test_the_threshold_is_the_quantile_within_sampling_error():
    bucket = bucket_of(N)
    x = jax.random.normal(jax.random.key(0), (N,))
    share = jax.jit(lambda step: jnp.mean(jnp.abs(x) >= drop._of_all(bucket.join([x]), step, bucket, DENSITY)))
    shares = np.array([share(step) for step in range(16)])
    error = (DENSITY * (1 - DENSITY) / drop.SAMPLE) ** 0.5
    assert 0.5 * error < shares.std() < 2 * error  # each step has its own sample
    assert np.abs(shares - DENSITY).max() < 5 * error
    assert abs(shares.mean() - DENSITY) < 5 * error / 4


@pytest.mark.full
def test_padding_does_not_dilute_the_sample():
    bucket = bucket_of(*[33] * 2500)  # nearly half is padding
    x = np.random.default_rng(1).normal(size=(2500, 33)).astype(np.float32)
    threshold = drop._of_all(bucket.join(list(x)), jnp.int32(0), bucket, 0.05)
    share = (np.abs(x) >= threshold).mean()
    assert share == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / (drop.SAMPLE * x.size / bucket.size)) ** 0.5)


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


def test_only_the_residual_sends_entries_below_ones_that_cancel():
    gradients = np.array([[10.0, 1.0], [-10.0, 1.0]], np.float32)
    tx = gcjax.contrib.drop_compress(0.5, capacity=32, axis_name="data")
    kept, forgotten = (Runner(t, jnp.zeros(2), 2) for t in (tx, without_residual(tx)))
    moved = sum(kept.step(gradients)[0] for _ in range(30))
    assert moved[0] == 0
    assert moved[1] + np.mean([r[0][1] for r in residuals(kept.state, 2, (2,))]) == 30
    assert moved[1] > 15
    assert not sum(forgotten.step(gradients)[0] for _ in range(30)).any()


@cases(
    ("make", "options"),
    [
        (gcjax.onebit_compress, {}),
        (gcjax.contrib.drop_compress, {"density": 0.1, "capacity": 64}),
        (gcjax.contrib.dryden_compress, {"density": 0.1}),
    ],
    default=1,
)
def test_methods_stall_without_their_residuals(make, options):
    tx = make(**options, axis_name="data")
    assert distance_after_training(optax.chain(without_residual(tx), optax.sgd(decaying))) > 0.1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, ValueError, "density.*1.5"),
        ({"layer_wise": 1}, TypeError, "layer_wise must be True or False, got 1"),
        ({"capacity": 0}, ValueError, "at least 1 slot, got 0"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.contrib.drop_compress(**options)
