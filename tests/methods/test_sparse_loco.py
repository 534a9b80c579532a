"""sparse_loco_compress: rounding by hand, words by hand, both averages, fixed bytes, the residual's decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, messages
from optimum import decaying, distance_after_training

import gcjax
from gcjax._kernels.bits import unpack_planes

RNG = np.random.default_rng(0)


def first_update(g, **options):
    tx = gcjax.sparse_loco_compress(**options)
    update, state = jax.jit(tx.update)(g, tx.init(g))
    return np.asarray(update), state


def test_bins_are_one_and_a_half_deviations_wide_with_two_bits():
    # Mean 0, deviation 1 (of 8 values): bins end at -2.25, -0.75 and 0.75.
    g = np.array([-2.3, -0.76, -0.74, 0.0, 0.74, 0.76, 1.5, 0.8])
    g = np.float32((g - g.mean()) / g.std(ddof=1))
    at = np.digitize(g, [-2.25, -0.75, 0.75])
    expected = [g[at == code].mean() for code in at]
    assert len(set(at)) > 2
    np.testing.assert_allclose(first_update(g, chunk=8)[0], expected, rtol=1e-6)


def test_values_that_are_equal_are_sent_but_for_the_last_bit():
    for g in (np.full(9, 0.3, np.float32), np.float32(-7.5), np.zeros(5, np.float32)):
        update, state = first_update(g)
        np.testing.assert_allclose(update, g, rtol=1e-6)
        assert gcjax.info(state).residual_norm == pytest.approx(0, abs=1e-6)


def test_every_leaf_has_its_own_table():
    g = {"large": np.full(50, 1e20, np.float32), "small": np.full((3, 3), 1e-20, np.float32)}
    tx = gcjax.sparse_loco_compress()
    update = jax.jit(tx.update)(g, tx.init(g))[0]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), update, g)


def test_words_by_hand():
    # Two chunks of 2 x 3 of which two entries go each, at 3 bits; a vector that is sent whole. All equal in magnitude.
    matrix = np.zeros((4, 3), np.float32)
    matrix[0, 2], matrix[1, 1], matrix[2, 0], matrix[3, 2] = 8.0, 8.0, 8.0, 8.0
    payload, info = messages(gcjax.sparse_loco_compress(2, chunk=3), {"m": matrix, "v": np.float32([2, 2])})
    (words,) = payload
    places = unpack_planes(jnp.asarray(words[:3]), 3)[0, :, 0][:4]
    assert [sorted(pair) for pair in np.asarray(places).reshape(2, 2)] == [[2, 4], [0, 5]]
    codes = unpack_planes(jnp.asarray(words[3:5]), 2)[0, :, 0]
    assert codes[:6].tolist() == [2] * 6
    np.testing.assert_array_equal(words[5:].view(np.float32), [0, 0, 8, 0, 0, 0, 2, 0])
    assert info.payload_bits == 3 * 4 + 2 * 6 + 32 * 8
    assert info.sent == 6


def test_the_message_has_a_fixed_size():
    params = {"matrix": np.zeros((130, 70)), "vector": np.zeros(100)}  # 6 chunks of 44 x 35, 2 of 50 entries
    runner = Runner(gcjax.sparse_loco_compress(axis_name="data"), params, 4)
    placed, whole = 6 * 64, 100
    words = 11 * placed // 32 + 2 * math.ceil((placed + whole) / 32) + 8
    for g in (RNG.normal(size=(4, 130, 70)), np.zeros((4, 130, 70))):
        runner.step({"matrix": g.astype(np.float32), "vector": np.ones((4, 100), np.float32)})
        info = gcjax.info(runner.state)
        assert info.payload_bits.tolist() == [11 * placed + 2 * (placed + whole) + 32 * 8] * 4
        assert info.wire_bytes == 3 * 4 * (-(-words // 8) * 8) + 2 * 3 / 4 * 20  # 20 bytes are for the checks


@pytest.mark.parametrize(("average", "expected"), [("workers", [1.25, 2.0]), ("senders", [2.5, 4.0])])
def test_an_entry_is_averaged_over_all_workers_or_those_that_send_it(average, expected):
    tx = gcjax.sparse_loco_compress(1, chunk=2, average=average, axis_name="data")
    gradients = np.array([[4.0, 3.0], [1.0, 0.0], [0.0, 5.0], [2.0, 3.0]], np.float32)
    update = Runner(tx, {"x": gradients[0]}, 4).step({"x": gradients})["x"][0]
    np.testing.assert_array_equal(update, expected)


@pytest.mark.parametrize(("shape", "chunk"), [((5, 5), 4), ((4, 7), 3), ((23,), 4), ((2, 2, 3), 2)])
def test_padding_is_never_sent_in_place_of_an_entry(shape, chunk):
    g = RNG.normal(size=shape).astype(np.float32)
    update, state = first_update(g, top_k=chunk**2 - 1 if len(shape) > 1 else 3, chunk=chunk, bits=4)
    info = gcjax.info(state)
    assert info.sent == np.count_nonzero(update)
    assert info.residual_norm == pytest.approx(np.linalg.norm(g - update), abs=1e-6)


SCHEDULED = optax.inject_hyperparams(
    gcjax.sparse_loco_compress, static_args=("top_k", "chunk", "bits", "average")
)  # the decay is traced


@pytest.mark.parametrize("make", [gcjax.sparse_loco_compress, SCHEDULED], ids=["fixed", "traced"])
def test_the_residual_decays(make):
    tx = make(top_k=1, chunk=2, decay=0.5)
    state, updates = tx.init(jnp.zeros(2)), []
    for g in ([3.0, 1.0], [0.0, 0.0], [0.0, 0.0]):
        update, state = jax.jit(tx.update)(jnp.array(g), state)
        updates.append(update.tolist())
    assert updates == [[3, 0], [0, 0.5], [0, 0]]


def test_training():
    def distance(**options):
        tx = gcjax.sparse_loco_compress(4, chunk=8, axis_name="data", **options)
        return distance_after_training(optax.chain(tx, optax.scale_by_learning_rate(decaying)), 500)

    assert distance(decay=1.0, average="workers") < 0.05
    assert distance(average="workers") < 0.15  # what waits too long is lost
    assert distance() < 0.2
    assert distance(decay=0.0) > 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 0.01}, TypeError, "top_k must be an int, got 0.01"),
        ({"chunk": 257}, ValueError, "chunk must be from 1 to 256, got 257"),
        ({"decay": 1.001}, ValueError, r"decay must be in \[0, 1\], got 1.001"),
        ({"bits": 1}, ValueError, "bits must be from 2 to 4, got 1"),
        ({"bits": 5}, ValueError, "bits must be from 2 to 4, got 5"),
        ({"bits": 2.0}, TypeError, "bits must be an int, got 2.0"),
        ({"average": "all"}, ValueError, "average must be one of.*'all'"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.sparse_loco_compress(**options)
