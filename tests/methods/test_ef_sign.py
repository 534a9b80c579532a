"""ef_sign_compress: words by hand, the contraction, the bound on the error, where signs alone fail."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimum import decaying, distance_after_training

import gcjax
from gcjax._kernels.layout import layout_of
from gcjax.methods import ef_sign


def test_words_by_hand():
    a = jnp.zeros(34).at[jnp.array([1, 33])].set(jnp.array([-3.0, -14.0]))  # mean magnitude 17 / 34
    b = jnp.array([3.0, -1.0, 2.0])
    (bucket,) = layout_of((a, b)).buckets
    payload, bits = ef_sign._encode(bucket.join([a, b]), bucket, None)
    # The even entries of a, the odd ones, then b.
    assert [hex(word) for word in payload.tolist()] == ["0x3f000000", "0x40000000", "0x0", "0x10001", "0x2"]
    assert bits == 34 + 3 + 2 * 32
    decoded = bucket.split(ef_sign._decode(payload, bucket))
    assert decoded[0].tolist() == np.where(a < 0, -0.5, 0.5).tolist()
    assert decoded[1].tolist() == [2.0, -2.0, 2.0]


def test_the_contraction_of_a_leaf_is_the_papers():
    """|a - C(a)|^2 = (1 - |a|_1^2 / (d |a|_2^2)) |a|^2, independent of the other leaf."""
    rng = np.random.default_rng(0)
    g = {"a": rng.normal(size=1000), "b": 1e3 * rng.standard_cauchy(size=(20, 30))}
    g = jax.tree.map(lambda x: x.astype(np.float32), g)
    tx = gcjax.ef_sign_compress()
    sent, _ = jax.jit(tx.update)(g, tx.init(g))
    for name, a in g.items():
        a = a.astype(np.float64)
        left = np.sum((a - sent[name]) ** 2)
        contraction = 1 - np.abs(a).sum() ** 2 / (a.size * np.sum(a**2))
        np.testing.assert_allclose(left, contraction * np.sum(a**2), rtol=1e-5)


def test_the_residual_stays_within_the_papers_bound():
    """Lemma 3: |e|^2 <= 4 (1 - delta) / delta^2 * max |g|^2 with delta the smallest contraction so far."""
    rng = np.random.default_rng(0)
    tx = gcjax.ef_sign_compress()
    state = tx.init(jnp.zeros(200))
    step, e, delta, largest = jax.jit(tx.update), np.zeros(200), 1.0, 0.0
    for _ in range(200):
        g = rng.normal(size=200).astype(np.float32) * rng.exponential(size=200)
        a = g + e
        delta = min(delta, np.abs(a).sum() ** 2 / (200 * np.sum(a**2)))
        largest = max(largest, np.sum(g**2))
        _, state = step(jnp.asarray(g, jnp.float32), state)
        (bucket_state,) = state.buckets.value
        (e,) = bucket_state.bucket.split(np.asarray(bucket_state.residual))
        assert np.sum(e**2) <= 4 * (1 - delta) / delta**2 * largest
    assert np.sum(e**2) > largest / 10  # an error that is always small would not test the bound


def descend(tx, gradient, x, steps):
    """Parameters after `steps` steps of gradient(x, t)."""
    x = jnp.asarray(x, jnp.float32)

    def step(carry, t):
        x, state = carry
        updates, state = tx.update(gradient(x, t), state, x)
        return (optax.apply_updates(x, updates), state), None

    run = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), jnp.arange(steps))[0][0])
    return np.asarray(run(x))


@pytest.mark.full
def test_workers_reach_the_common_optimum_through_owners():
    tx = gcjax.ef_sign_compress(transport="two_phase", axis_name="data")
    assert distance_after_training(optax.chain(tx, optax.sgd(decaying))) < 0.02


def rate(t):
    return 0.1 / (1 + t / 100)


def both(gradient, x, steps=2000):
    """The last parameters with signs alone and with EF-SignSGD."""
    signs = optax.chain(gcjax.contrib.sign_vote_compress(), optax.sgd(rate))
    feedback = optax.chain(gcjax.ef_sign_compress(), optax.sgd(rate))
    return descend(signs, gradient, x, steps), descend(feedback, gradient, x, steps)


def test_skewed_noise_makes_signs_ascend():
    """f(x) = x / 4, with gradient 4 in one step of four and -1 in the others: the paper's first counter-example."""

    def gradient(x, t):
        return jnp.where(t % 4 == 0, 4.0, -1.0) * jnp.ones_like(x)

    signs, feedback = both(gradient, np.zeros(8), steps=400)
    assert (signs > 1).all()
    assert (feedback < -1).all()


def test_signs_miss_the_optimum_of_a_convex_function():
    """f(x) = |x0 + x1| / 2 + |x0 - x1| from (1, 1): every subgradient has the signs of +-(1, -1)."""

    def gradient(x, t):
        del t
        return jnp.sign(x[0] + x[1]) / 2 * jnp.ones(2) + jnp.where(x[0] >= x[1], 1.0, -1.0) * jnp.array([1.0, -1.0])

    signs, feedback = both(gradient, [1.0, 1.0])
    np.testing.assert_allclose(signs.sum(), 2.0, atol=1e-3)
    assert np.abs(feedback).max() < 0.05


def test_signs_miss_the_optimum_of_least_squares():
    """<a0, x>^2 + <a1, x>^2, one term at a time, with a = +-(1, -1) + (1, 1) / 2 and the optimum at 0."""
    rows = jnp.array([[1.5, -0.5], [-0.5, 1.5]])

    def gradient(x, t):
        a = rows[t % 2]
        return 2 * a * jnp.dot(a, x)

    signs, feedback = both(gradient, [1.0, 1.0])
    np.testing.assert_allclose(signs.sum(), 2.0, atol=1e-3)
    assert np.abs(feedback).max() < 0.05
