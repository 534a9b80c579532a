"""demo_compress: the transform, its chunks, words by hand, the decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.fft
from harness import messages

import gcjax
from gcjax._kernels.chunks import chunk_groups, from_groups, into_groups, largest_of_rows
from gcjax._kernels.layout import layout_of
from gcjax.contrib import demo

RNG = np.random.default_rng(0)


def stepped(tx, gradients):
    """The updates of some steps on one worker, and the state after them."""
    state, step, updates = tx.init(gradients[0]), jax.jit(tx.update), []
    for g in gradients:
        update, state = step(g, state)
        updates.append(np.asarray(update))
    return updates, state


def bucket_of(*shapes):
    return layout_of([jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]).buckets[0]


def divided(shape, chunk=64):
    """(grid, chunk) of a leaf."""
    ((_, (leaf,)),) = chunk_groups(bucket_of(shape), chunk)
    return leaf.grid, leaf.chunk


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (64,), (64, 64), (5, 3, 4), (90, 100)])
def test_coefficients_equal_scipys_and_are_invertible(shape):
    bucket = bucket_of(shape)
    x = RNG.normal(size=shape).astype(np.float32)
    (coefficients,) = into_groups([jnp.asarray(x)], bucket, 64, demo._transform)
    (down, across), (height, width) = divided(shape)
    chunks = x.reshape(down, height, across, width).swapaxes(1, 2)
    truth = scipy.fft.dctn(chunks.astype(np.float64), type=2, norm="ortho", axes=(2, 3)).swapaxes(2, 3).reshape(-1)
    unit = demo._cosines(height)[1] * demo._cosines(width)[1]
    assert np.frexp(unit)[0] == 0.5
    np.testing.assert_allclose(unit * np.asarray(coefficients), truth, atol=2e-6 * np.abs(truth).max())
    np.testing.assert_allclose(from_groups([coefficients], bucket, 64, demo._inverse)[0], x, atol=2e-6)


def test_axes_are_divided_into_the_fewest_equal_chunks():
    assert divided((768, 3072)) == ((12, 48), (64, 64))
    assert divided((300, 97)) == ((5, 2), (60, 49))  # the largest divisors up to 64 are 60 and 1
    assert divided((50257, 8)) == ((786, 1), (64, 8))
    assert divided((3, 3, 16, 32)) == ((3, 1), (48, 32))
    assert divided((96,)) == ((1, 2), (1, 48))
    assert divided((4096,)) == ((1, 64), (1, 64))
    assert divided((4097,)) == ((2, 1), (33, 64))
    assert divided((100, 3), chunk=1) == ((100, 3), (1, 1))


@pytest.mark.parametrize(("size", "k"), [(4096, 32), (4032, 32), (3599, 8), (47, 32), (20, 32), (512, 32), (64, 1)])
def test_the_largest_of_each_row_are_found_exactly(size, k):
    x = RNG.integers(-40, 41, (9, size)).astype(np.float32)  # with many ties
    x[0], x[1], x[2, :: -(-size // k)] = 0, 7, 50  # nothing, ties, and the largest far from each other
    indices = np.asarray(largest_of_rows(jnp.abs(x), k))
    assert indices.shape == (9, min(k, size))
    for entries, found in zip(x, indices, strict=True):
        assert len(set(found.tolist())) == len(found)
        np.testing.assert_array_equal(np.sort(np.abs(entries[found])), np.sort(np.abs(entries))[-len(found) :])


SCHEDULED = optax.inject_hyperparams(gcjax.contrib.demo_compress, static_args=("top_k", "chunk"))  # the decay is traced


@pytest.mark.parametrize("make", [gcjax.contrib.demo_compress, SCHEDULED], ids=["fixed", "traced"])
def test_sum_and_decay_by_hand(make):
    # The coefficients of two entries are sum and difference over sqrt(2). After (3, 1) the difference is left.
    gradients = [jnp.array([3.0, 1.0]), jnp.zeros(2), jnp.zeros(2)]
    (first, second, third), state = stepped(make(top_k=1, decay=0.5), gradients)
    np.testing.assert_allclose(first, [2, 2], rtol=1e-6)
    np.testing.assert_allclose(second, [0.5, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(third, [0, 0])
    assert gcjax.info(state).residual_norm == 0


def test_words_by_hand():
    g = {"pairs": jnp.array([3.0, 1.0, 1.0, -4.0]), "scalar": jnp.float32(-7.0)}
    tx = gcjax.contrib.demo_compress(top_k=1, chunk=2)
    (words,), info = messages(tx, g)
    # Index 0 of the chunk with one entry, index 0 of the first pair (its sum), index 1 of the second (its difference).
    # The third index shares a word with the first.
    assert words[:2].tolist() == [1 << 16, 0]
    np.testing.assert_allclose(words[2:].view(np.float32), [-7, 4 / 2**0.5 / 2, 5 / 2**0.5 / 2], rtol=1e-6)
    assert info.payload_bits == 3 * 48
    assert info.sent == 3
