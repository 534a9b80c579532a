"""dryden_compress: two classes per leaf with their own thresholds and means, and a fixed share sent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compact import entries
from harness import messages, residuals

import gcjax

N = 400_000


def bits(value):
    return hex(np.float32(value).view(np.uint32))


def test_message_by_hand():
    # Leaf "a": of the positives 8, 4, 2, 1 half are sent, 8 and 4; the negative is alone. Leaf "b" is the second word.
    g = {"a": jnp.array([1.0, 8.0, -0.5, 2.0, 4.0]), "b": jnp.array([0.0, -3.0, -5.0])}
    (payload,), info = messages(gcjax.contrib.dryden_compress(0.5, capacity=32), g)
    assert payload[0] == 4
    assert [hex(w) for w in payload[1:5]] == [bits(6.0), "0x0", bits(-0.5), bits(-5.0)]
    assert entries(payload[5:], 4, 32, 64, 1) == [(1, 0), (2, 1), (4, 0), (34, 1)]
    assert info.payload_bits == 32 * (1 + 4) + (4 * 4 + 8) + 4


def test_each_class_sends_its_share_within_sampling_error():
    key = jax.random.key(0)
    # A heavy-tailed positive and a light-tailed negative class; a leaf of another size with values 1000 times smaller.
    skewed = jax.random.normal(key, (N,)) + 0.5
    leaves = {"a": jnp.where(skewed > 0, skewed**3, skewed), "b": jax.random.normal(key, (N // 4,)) * 1e-3}
    tx = gcjax.contrib.dryden_compress(0.02)
    updates, state = jax.jit(tx.update)(leaves, tx.init(leaves))
    info = gcjax.info(state)
    assert info.overflow[0] == 0
    assert info.capacity < 1.3 * 0.02 * 1.25 * N
    for name, leaf in leaves.items():
        for sign in (1, -1):
            of_class = sign * np.asarray(leaf) > 0
            # A leaf's sample has 32,768 entries, at least 200 of them in the share of each class: 5 standard errors.
            share = (np.sign(updates[name]) == sign).sum() / of_class.sum()
            assert share == pytest.approx(0.02, rel=5 / np.sqrt(0.02 * 32768 * of_class.mean()))
            sent = np.asarray(leaf)[updates[name] != 0] * sign
            assert sent[sent > 0].min() > np.quantile(np.asarray(leaf)[of_class] * sign, 0.97)


def test_every_step_takes_another_sample():
    g = jax.random.normal(jax.random.key(0), (N,))
    tx = gcjax.contrib.dryden_compress(0.02, capacity=N)
    start = tx.init(g)
    (bucket,) = start.buckets.value

    def counted(step):
        held = dataclasses.replace(bucket, step=step)
        return tx.update(g, dataclasses.replace(start, buckets=dataclasses.replace(start.buckets, value=(held,))))[1]

    counts = [int(gcjax.info(jax.jit(counted)(jnp.array([step]))).sent[0]) for step in range(6)]
    assert len(set(counts)) > 3
    # 1,311 entries of a sample of 65,536 are above the threshold.
    assert np.mean(counts) == pytest.approx(0.02 * N, rel=5 / np.sqrt(1311 * 6))


def test_equal_entries_are_sent_as_they_are_in_every_step():
    sizes = {1e24: 100_000, -1e24: 100, 1e-37: 100, 3.0: 1000}
    g = {str(value): jnp.full(size, value) for value, size in sizes.items()}
    tx = gcjax.contrib.dryden_compress(0.01, capacity=sum(sizes.values()))
    step, state = jax.jit(tx.update), tx.init(g)
    for _ in range(5):
        updates, state = step(g, state)
        jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g, rtol=1e-6), updates, g)


def test_a_changing_density_and_a_skipped_step_lose_nothing():
    schedule = optax.linear_schedule(0.5, 0.05, 6)
    tx = optax.inject_hyperparams(gcjax.contrib.dryden_compress, static_args=("capacity",))(
        schedule, capacity=(32, 128)
    )
    g = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)
    step, state, total, counts = jax.jit(tx.update), tx.init(g), 0.0, []
    for number in range(8):
        bad = number == 3
        updates, state = step(g * jnp.nan if bad else g, state)
        total = total + (0 if bad else updates)
        counts.append(int(gcjax.info(state).sent[0]))
    np.testing.assert_allclose(total + residuals(state, 1, (200,))[0][0], 7 * g, rtol=1e-5, atol=1e-5)
    assert counts[0] == 100
    assert counts[-1] < 20
