"""dgc_compress: its recurrences by hand, warm-up, small leaves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compact import entries
from harness import messages
from rows.dgc import dgc

import gcjax

N = 100_000


def run(tx, gradients):
    """The updates of one worker, and its last state."""
    step, state, updates = jax.jit(tx.update), tx.init(gradients[0]), []
    for gradient in gradients:
        update, state = step(gradient, state)
        updates.append(np.asarray(update))
    return updates, state


def test_five_steps_by_hand():
    trace = [
        # g, update                        u and v before the reset
        ([4, 2, 1], [4, 0, 0]),  #         4, 2, 1            4, 2, 1
        ([1, 1, 1], [0, 4, 0]),  #         1, 2, 1.5          1, 4, 2.5
        ([1, 1, 1], [0, 0, 4.25]),  #      1.5, 1, 1.75       2.5, 1, 4.25
        ([0, -4, 1], [3.25, 0, 0]),  #     0.75, -3.5, 1      3.25, -2.5, 1
        ([0, 0, 0], [0, -4.25, 0]),  #     0, -1.75, 0.5      0, -4.25, 1.5
    ]
    tx = dgc(0.34, momentum=0.5)
    updates, state = run(tx, [jnp.array(g, jnp.float32) for g, _ in trace])
    np.testing.assert_array_equal(updates, [sent for _, sent in trace])
    (bucket,) = state.buckets.value
    v, u = (bucket.bucket.split(x)[0] for x in bucket.settled())
    np.testing.assert_array_equal(u, [0, 0, 0.5])
    np.testing.assert_array_equal(v, [0, 0, 1.5])


def test_message_by_hand():
    g = {"bias": jnp.array([0.5, -0.25]), "matrix": jnp.array([[1.0, -8.0], [0.0, 2.0]])}
    given, info = messages(dgc(0.5, dense_below=3), g)
    (payload,) = given  # `messages` does not record the mean of the small leaf
    assert payload[0] == 2
    assert entries(payload[1:], 2, 32, 64, 32) == [(33, 0xC1000000), (35, 0x40000000)]  # the matrix is the second word
    assert (info.selected[0], info.sent[0], info.capacity) == (4, 4, 34)
    assert info.payload_bits == 32 + (2 * 5 + 4) + 2 * 32 + 2 * 32
    assert info.entropy_bits == pytest.approx(32 + math.log2(64 * 63 / 2) + 4 * 32, rel=0.02)


def test_warm_up_has_the_papers_densities():
    tx = gcjax.dgc_compress(0.001, warmup_steps=8)
    g = jax.random.normal(jax.random.key(0), (N,))
    step, state, sent, slots = jax.jit(tx.update), tx.init(g), [], []
    for _ in range(11):
        _, state = step(g, state)
        sent.append(gcjax.info(state).sent[0] / N)
        slots.append(gcjax.info(state).capacity / N)
    paper = np.repeat([0.25, 0.0625, 0.015625, 0.00390625, 0.001], [2, 2, 2, 2, 3])
    np.testing.assert_allclose(sent, paper, atol=1 / N)
    np.testing.assert_allclose(slots, paper, atol=32 / N)


def test_a_model_of_small_leaves_is_sent_whole():
    g = {"a": jnp.ones(3), "b": jnp.ones((5, 2))}
    tx = gcjax.dgc_compress(0.01, momentum=0.5)
    updates, state = jax.jit(tx.update)(g, tx.init(g))
    updates, state = jax.jit(tx.update)(g, state)
    jax.tree.map(lambda u, g: np.testing.assert_array_equal(u, 1.5 * g), updates, g)
    assert gcjax.info(state).sent.tolist() == [13]
    assert gcjax.info(state).residual_norm == 0


def test_small_leaves_take_no_places_of_a_large_one():
    g = {"bias": jnp.full(40, 100.0), "matrix": jax.random.normal(jax.random.key(0), (500, 400))}
    tx = gcjax.dgc_compress(0.001)
    updates, _ = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_array_equal(updates["bias"], g["bias"])
    assert np.count_nonzero(updates["matrix"]) == 200


def test_momentum_may_be_scheduled_with_inject_hyperparams():
    injected = optax.inject_hyperparams(gcjax.dgc_compress, static_args=("density", "warmup_steps"))
    tx = injected(1.0, momentum=optax.linear_schedule(0.0, 0.75, 3))
    updates, _ = run(tx, [jnp.ones(1)] * 4)  # a small leaf, which keeps its momentum
    assert np.ravel(updates).tolist() == [1, 1.25, 1.625, 2.21875]  # u = m u + 1 for m = 0, 1/4, 1/2, 3/4
