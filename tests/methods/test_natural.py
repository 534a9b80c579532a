"""natural_compress: powers of two exactly, no bias, variance factor 1/8, words by hand."""

import jax
import numpy as np
import optax
import pytest
from codec_oracle import CodecOracle
from harness import draws, messages
from oracle import F, floor_log2, hash_bits, nearest_power
from rows import Row

import gcjax

KEY = jax.random.key(13)


def code(leaves, places, words):
    sent = [np.zeros(len(x), F) for x in leaves]
    for leaf, x in enumerate(leaves):
        draws = (hash_bits(words, places.positions[leaf]) >> np.uint32(9)) * 2.0**-23
        for i in np.flatnonzero(x):
            power = 2.0 ** floor_log2(x[i])
            up = draws[i] >= 2 - abs(float(x[i])) / power  # as likely as the mantissa
            sent[leaf][i] = np.copysign(2 * power if up else power, x[i])
    return sent


def code_mean(leaves, places, words):
    """The nearest power of two."""
    del places, words
    return [np.array([np.copysign(2.0 ** nearest_power(t), t) if t else 0 for t in x], F) for x in leaves]


def row(name, transport, rare=False):
    def make(axis_name=None, **more):
        return gcjax.contrib.natural_compress(key=KEY, transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return CodecOracle(workers, sizes, code, key=KEY, transport=transport, code_mean=code_mean)

    return Row(name, "natural_compress", make, make_oracle, rare=rare)


ROWS = [row("natural", "all_gather"), row("natural-owners", "two_phase", rare=True)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.natural_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"natural_compress": chain}


def once(g):
    g = np.asarray(g, np.float32)
    return draws(gcjax.contrib.natural_compress(key=KEY), g, 1)[0]


def test_powers_of_two_are_sent_exactly():
    powers = np.float32(2.0) ** np.arange(-126, 80).astype(np.float32)
    g = np.concatenate([powers, -powers, [0.0, -0.0]]).astype(np.float32)
    np.testing.assert_array_equal(once(g), g)


def test_draws_are_neighbours_unbiased_and_vary_as_stated():
    special, spread = [4 / 3, -4 / 3, 1.5, 1 + 2**-23, 2 - 2**-23], np.geomspace(1e-30, 1e24, 200)
    g = np.concatenate([special, spread * np.tile([1, -1], 100)]).astype(np.float32)
    got = draws(gcjax.contrib.natural_compress(key=KEY), g, 4000) / g.astype(np.float64)
    mantissa = np.abs(g) / 2.0 ** np.floor(np.log2(np.abs(g)))
    for column, m in zip(got.T, mantissa, strict=True):
        assert np.isin(np.round(column * m, 6), (1, 2)).all()
    variance = (mantissa - 1) * (2 - mantissa) / mantissa**2
    assert (np.abs(got.mean(0) - 1) <= 5 * np.sqrt(variance / 4000)).all()
    spread = ((got - 1) ** 2).mean(0)
    np.testing.assert_allclose(spread[:2], 1 / 8, rtol=0.05)  # the worst case
    assert variance.max() <= 1 / 8 + 1e-6
    assert (spread <= 1 / 8 + 5 * ((got - 1) ** 2).std(0) / 4000**0.5).all()


def test_words_by_hand():
    g = np.zeros(40, np.float32)
    g[[0, 1, 33]] = 4.0, -0.25, -1.0  # biased exponents 129, 125, 127
    (words,), info = messages(gcjax.contrib.natural_compress(key=KEY), g)
    planes = words.reshape(9, 2).tolist()  # the even entries, then the odd ones
    for bit in range(8):
        assert planes[bit] == [129 >> bit & 1, (125 >> bit & 1) | (127 >> bit & 1) << 16]
    assert planes[8] == [0, 1 | 1 << 16]
    assert info.payload_bits == 9 * 40


def test_tiny_numbers_become_zero():
    assert not once(np.full(100, 1.1e-38)).any()


def test_a_bad_key_raises():
    with pytest.raises(TypeError, match=r"key must be a key made by jax.random.key"):
        gcjax.contrib.natural_compress(key=3)
