"""sparse_loco_compress: rounding by hand, words by hand, the residual's decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import messages

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
