"""dgc_compress: its recurrences by hand, clipping, warm-up, small leaves, masking."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compact import entries
from harness import Runner, messages, residuals, sample_gradients, stacked, tree_of
from optimum import decaying, distance_after_training

import gcjax

N = 100_000


def run(tx, gradients):
    """The updates of one worker, and its last state."""
    step, state, updates = jax.jit(tx.update), tx.init(gradients[0]), []
    for gradient in gradients:
        update, state = step(gradient, state)
        updates.append(np.asarray(update))
    return updates, state


def residual(state):
    """Of the only worker and leaf."""
    return residuals(state, 1, [0])[0][0]


def test_five_steps_by_hand():
    trace = [
        # g, update                        u and v before the reset
        ([4, 2, 1], [4, 0, 0]),  #         4, 2, 1            4, 2, 1
        ([1, 1, 1], [0, 4, 0]),  #         1, 2, 1.5          1, 4, 2.5
        ([1, 1, 1], [0, 0, 4.25]),  #      1.5, 1, 1.75       2.5, 1, 4.25
        ([0, -4, 1], [3.25, 0, 0]),  #     0.75, -3.5, 1      3.25, -2.5, 1
        ([0, 0, 0], [0, -4.25, 0]),  #     0, -1.75, 0.5      0, -4.25, 1.5
    ]
    tx = gcjax.dgc_compress(0.34, momentum=0.5, dense_below=0)
    updates, state = run(tx, [jnp.array(g, jnp.float32) for g, _ in trace])
    np.testing.assert_array_equal(updates, [sent for _, sent in trace])
    (bucket,) = state.buckets.value
    v, u = (bucket.bucket.split(x)[0] for x in bucket.settled())
    np.testing.assert_array_equal(u, [0, 0, 0.5])
    np.testing.assert_array_equal(v, [0, 0, 1.5])


def test_three_nesterov_steps_by_hand():
    trace = [
        # g, update              u and v before the reset
        ([4, 2], [6, 0]),  #     2, 1        6, 3
        ([1, 1], [0, 5]),  #     0.5, 1      1.5, 5
        ([1, 1], [3.25, 0]),  #  0.75, 0.5   3.25, 1.5
    ]
    tx = gcjax.dgc_compress(0.5, momentum=0.5, nesterov=True, dense_below=0)
    updates, state = run(tx, [jnp.array(g, jnp.float32) for g, _ in trace])
    np.testing.assert_array_equal(updates, [sent for _, sent in trace])
    np.testing.assert_array_equal(residual(state), [0, 1.5])


def test_message_by_hand():
    g = {"bias": jnp.array([0.5, -0.25]), "matrix": jnp.array([[1.0, -8.0], [0.0, 2.0]])}
    given, info = messages(gcjax.dgc_compress(0.5, dense_below=3), g)
    (payload,) = given  # `messages` does not record the mean of the small leaf
    assert payload[0] == 2
    assert entries(payload[1:], 2, 32, 64, 32) == [(33, 0xC1000000), (35, 0x40000000)]  # the matrix is the second word
    assert (info.selected[0], info.sent[0], info.capacity) == (4, 4, 34)
    assert info.payload_bits == 32 + (2 * 5 + 4) + 2 * 32 + 2 * 32
    assert info.entropy_bits == pytest.approx(32 + math.log2(64 * 63 / 2) + 4 * 32, rel=0.02)


def test_clipping_four_workers_by_hand():
    # Each worker's gradient, of a dense and a compressed leaf, is clipped to a norm of 5 / sqrt(4).
    gradients = {
        "a": np.array([[3.0], [0.3], [0.0], [0.0]], np.float32),
        "b": np.array([[0.0, 4.0], [0.0, 0.4], [0.0, 0.0], [-10.0, 0.0]], np.float32),
    }
    tx = gcjax.dgc_compress(1.0, momentum=0.0, clip_norm=5.0, dense_below=2, axis_name="data")
    update = Runner(tx, {"a": np.zeros(1, np.float32), "b": np.zeros(2, np.float32)}, 4).step(gradients)
    np.testing.assert_allclose(update["a"][0], [(1.5 + 0.3) / 4], rtol=1e-6)
    np.testing.assert_allclose(update["b"][0], [-2.5 / 4, (2.0 + 0.4) / 4], rtol=1e-6)


@pytest.mark.parametrize("size", [4e23, 1e-36])
def test_clipping_works_near_the_ends_of_float32(size):
    tx = gcjax.dgc_compress(1.0, clip_norm=size, dense_below=0)
    updates, _ = run(tx, [jnp.array([3.0, 4.0, -3.0]) * jnp.float32(size / 2)])
    np.testing.assert_allclose(updates[0] / np.float32(size), np.array([3.0, 4.0, -3.0]) / np.sqrt(34), rtol=1e-6)


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


def test_small_leaves_get_momentum_sgd():
    sizes = (40, 300)
    params = tree_of([np.zeros(n, np.float32) for n in sizes])
    gradients, _ = sample_gradients(4, sizes, 5)
    ours = Runner(gcjax.dgc_compress(0.01, nesterov=True, dense_below=300, axis_name="data"), params, 4)
    momentum_sgd = optax.trace(0.9, nesterov=True)
    state = momentum_sgd.init(params)
    for g in gradients:
        mean = jax.tree.map(lambda x: x.mean(axis=0), stacked(g))
        expected, state = momentum_sgd.update(mean, state)
        got = ours.step(stacked(g))
        np.testing.assert_allclose(got["a"][0], expected["a"], rtol=1e-5, atol=1e-6)
        assert not np.allclose(got["b"][0], expected["b"], rtol=0.1)
    assert not any(small.any() for small, _ in residuals(ours.state, 4, sizes))


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


def test_without_momentum_it_is_top_k_to_the_bit():
    gradients = list(jax.random.normal(jax.random.key(0), (5, 341)))
    ours, _ = run(gcjax.dgc_compress(0.05, momentum=0.0, dense_below=0), gradients)
    np.testing.assert_array_equal(ours, run(gcjax.top_k_compress(0.05), gradients)[0])


def test_without_masking_updates_sum_to_momentum_sgd():
    gradients = list(jax.random.normal(jax.random.key(0), (20, 200)))
    momentum_sgd, _ = run(optax.trace(0.9), gradients)

    def lost(masking):
        updates, state = run(gcjax.dgc_compress(0.05, masking=masking, dense_below=0), gradients)
        return np.abs(sum(updates) + residual(state) - sum(momentum_sgd)).max()

    assert lost(masking=False) < 1e-4
    assert lost(masking=True) > 1


@pytest.mark.full
def test_without_masking_stale_momentum_overshoots():
    curvature = jnp.linspace(0.5, 2.0, 400)

    def distance(masking):
        tx = optax.chain(gcjax.dgc_compress(0.1, masking=masking, dense_below=0), optax.sgd(0.03))

        def step(carry, _):
            x, state = carry
            updates, state = tx.update(curvature * x, state)
            return (x + updates, state), None

        start = jax.random.normal(jax.random.key(1), (400,))
        (x, _), _ = jax.lax.scan(step, (start, tx.init(start)), length=100)
        return float(jnp.linalg.norm(x) / jnp.linalg.norm(start))

    assert distance(masking=True) < 0.01
    assert distance(masking=False) > 0.1


@pytest.mark.full
def test_masking_ends_beside_the_common_optimum():
    masked = optax.chain(gcjax.dgc_compress(0.1, dense_below=40, axis_name="data"), optax.sgd(decaying))
    assert distance_after_training(masked) > 0.1


def test_density_may_be_a_schedule():
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.2, 4: 0.5})
    g = jax.random.normal(jax.random.key(0), (1000,))

    @jax.jit
    def step(state):
        return gcjax.dgc_compress(schedule, dense_below=0).update(g, state)[1]

    state, sent, slots = gcjax.dgc_compress(schedule, dense_below=0).init(g), [], []
    for _ in range(6):
        state = step(state)
        sent.append(int(gcjax.info(state).sent[0]))
        slots.append(gcjax.info(state).capacity)
    assert sent == [500, 500, 100, 100, 50, 50]
    assert slots == [512, 512, 128, 128, 64, 64]


def test_a_peak_between_the_probed_steps_overflows():
    tx = gcjax.dgc_compress(lambda step: jnp.where(step == 3, 0.5, 0.06), momentum=0.0, dense_below=0)
    gradients = list(jax.random.normal(jax.random.key(0), (5, 1000)))
    updates, state = run(tx, gradients[:4])
    info = gcjax.info(state)
    assert info.selected[0] == 500
    assert info.sent[0] in range(33, 65)
    assert info.overflow[0] == 500 - info.sent[0]
    np.testing.assert_allclose(sum(updates) + residual(state), sum(gradients[:4]), atol=1e-5)


def test_momentum_may_be_scheduled_with_inject_hyperparams():
    fixed = ("density", "warmup_steps", "dense_below")
    injected = optax.inject_hyperparams(gcjax.dgc_compress, static_args=fixed)
    tx = injected(1.0, momentum=optax.linear_schedule(0.0, 0.75, 3), masking=False, dense_below=0)
    updates, _ = run(tx, [jnp.ones(1)] * 4)
    assert np.ravel(updates).tolist() == [1, 1.25, 1.625, 2.21875]  # u = m u + 1 for m = 0, 1/4, 1/2, 3/4


def test_a_donated_update_needs_few_temporaries():
    size = 1 << 18
    tx = gcjax.dgc_compress(nesterov=True, clip_norm=1.0)
    g = jax.ShapeDtypeStruct((size,), jnp.float32)
    compiled = jax.jit(tx.update, donate_argnums=(0, 1)).lower(g, jax.eval_shape(tx.init, g)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 3 * 4 * size
    assert memory.temp_size_in_bytes < 0.6 * 4 * size  # includes a sample of 65,536


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ({"density": "1 %"}, TypeError, "density must be a number, got '1 %'"),
        ({"density": lambda step: 2.0 - step}, ValueError, r"density\(0\) must be in \(0, 1\], got 2.0"),
        ({"density": optax.linear_schedule(0.1, 0.0, 100)}, ValueError, r"density\(128\).*got .*0"),
        ({"density": lambda step: 0.1, "warmup_steps": 5}, ValueError, "its own warm-up; leave out warmup_steps=5"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 2.5}, TypeError, "warmup_steps must be an int, got 2.5"),
        ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
        ({"masking": None}, TypeError, "masking must be True or False, got None"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm.*got 0.0"),
        ({"dense_below": -1}, ValueError, "dense_below must be at least 0, got -1"),
        ({"capacity": 0}, ValueError, "at least 1 slot, got 0"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.dgc_compress(**options)


def test_a_traced_density_raises():
    with pytest.raises(TypeError, match=r"density .*cannot be traced.*give a function"):
        jax.jit(lambda density: gcjax.dgc_compress(density).init(jnp.ones(3)))(0.1)
