"""natural_compress: powers of two exactly, no bias, variance factor 1/8, words by hand."""

import numpy as np
from harness import draws, messages
from rows.natural import KEY

import gcjax


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
