"""terngrad_compress: clipping, no bias after it, fields that do not carry, words by hand."""

import jax
import numpy as np
import pytest
from harness import Runner, draws, messages
from rows.terngrad import KEY

import gcjax
from gcjax.contrib.terngrad import field_bits

BOTH = pytest.mark.parametrize("aggregate", ["sum", "gather"])


def outlier():
    """128 entries of 1 or -1 except for the first, which is 20; and the clipped form."""
    g = np.where(np.arange(128) % 3, 1.0, -1.0).astype(np.float32)
    g[0] = 20
    limit = 2.5 * np.sqrt((g**2).mean())
    assert 1 < limit < 20
    return g, np.minimum(g, limit)


def normal(size):
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def deviations(got, expected, scale):
    """Deviations of the mean of the draws from the expected values, in standard errors."""
    variance = np.abs(expected) * (scale - np.abs(expected)) + 1e-6 * scale**2
    return np.abs(got.mean(0) - expected) / np.sqrt(variance / len(got))


@BOTH
def test_the_mean_of_many_draws_is_the_clipped_gradient(aggregate):
    g, clipped = outlier()
    got = draws(gcjax.contrib.terngrad_compress(aggregate=aggregate, key=KEY), g, 4000)
    scale = clipped.max()
    np.testing.assert_allclose(np.unique(np.abs(got)), [0, scale], rtol=1e-6)
    assert deviations(got, clipped, scale).max() < 5
    assert deviations(got, g, 20).max() > 20


@BOTH
def test_zeros_and_equal_entries_are_sent_exactly(aggregate):
    g = {"zeros": np.zeros(50, np.float32), "equal": np.full(50, -3.0, np.float32), "scalar": np.float32(1e24)}
    tx = gcjax.contrib.terngrad_compress(aggregate=aggregate, key=KEY)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(tx.update)(g, tx.init(g))[0], g)


@pytest.mark.parametrize(("workers", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8), (128, 16), (32768, 32)])
def test_a_field_holds_the_sum_of_all_codes(workers, bits):
    assert field_bits(workers) == bits
    assert 2 * workers < 2**bits


@pytest.mark.parametrize("workers", [3, 8])
def test_extreme_codes_add_up_without_a_carry(workers):
    g = np.array([1.0, -1.0] * 20 + [-1.0] * 5 + [1.0] * 5, np.float32)
    runner = Runner(gcjax.contrib.terngrad_compress(key=KEY, axis_name="data"), {"x": g}, workers)
    np.testing.assert_allclose(runner.step({"x": np.stack([g] * workers)})["x"][0], g, rtol=1e-6)


def test_words_of_sum_by_hand():
    g = np.array([3.0, -3.0, 0.0, 3.0] + [0.0] * 12 + [-3.0], np.float32)
    (words,), info = messages(gcjax.contrib.terngrad_compress(None, key=KEY), g)
    assert info.payload_bits == 17 * 2 + 32
    codes = [2, 0, 1, 2] + [1] * 12 + [0] + [1] * 15  # of a whole mask word
    assert words.tolist() == [[sum(code << 2 * j for j, code in enumerate(codes[k::2]))] for k in (0, 1)]


def test_words_of_gather_by_hand():
    g = {"a": np.array([3.0, -3.0, 0.0], np.float32), "b": np.array([0.0, -5.0], np.float32)}
    (words,), info = messages(gcjax.contrib.terngrad_compress(None, aggregate="gather", key=KEY), g)
    assert info.payload_bits == 5 * 2 + 2 * 32
    assert words[:2].view(np.float32).tolist() == [3.0, 5.0]
    not_zero, negative = words[2:].reshape(2, 2).tolist()
    assert not_zero == [0b011, 0b10]
    assert negative == [0b010, 0b10]
