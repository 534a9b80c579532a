"""qsgd_compress: levels and words by hand, no bias, the variance bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import draws, messages
from rows.qsgd import KEY

import gcjax
from gcjax._kernels.groups import block_groups
from gcjax._kernels.layout import layout_of

SETTINGS = [(1, "max"), (2, "max"), (4, "max"), (2, "l2"), (4, "l2")]


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_words_by_hand():
    g = {"a": np.zeros(40, np.float32), "b": np.array([0.0, 7.0], np.float32)}
    g["a"][[0, 2, 6, 38]] = 3.0, -1.0, 2.0, -3.0
    g["a"][[3, 15]] = -6.0, 4.0
    (words,), _ = messages(gcjax.qsgd_compress(3, 32, key=KEY), g)
    assert words[:3].view(np.float32).tolist() == [3.0, 6.0, 7.0]  # the even entries of a, the odd ones, then b
    # In thirds: 3, 1, 2, 3 in the first block, 3 and 2 in the second, 3 in that of b.
    low, high, sign = words[3:].reshape(3, 3).tolist()
    assert low == [1 << 0 | 1 << 1 | 1 << 19, 1 << 1, 1 << 1]
    assert high == [1 << 0 | 1 << 3 | 1 << 19, 1 << 1 | 1 << 7, 1 << 1]
    assert sign == [1 << 1 | 1 << 19, 1 << 1, 0]


@pytest.mark.parametrize(("bits", "norm"), SETTINGS)
def test_the_mean_of_many_draws_is_the_gradient(bits, norm):
    g = np.concatenate([normal(64), [0.0, 2.0, 1e-3]]).astype(np.float32)
    got = draws(gcjax.qsgd_compress(bits, 32, norm=norm, key=KEY), g, 4000)
    # A draw is one of two neighbouring levels: its standard deviation is at most half the gap between them.
    blocks = [g[k::3] for k in range(3)]
    scale = np.array([np.abs(b).max() if norm == "max" else np.linalg.norm(b) for b in blocks])
    gap = scale * (2 if bits == 1 else 1 / (2 ** (bits - 1) - 1))
    error = np.abs(got.mean(0) - g) / (gap / 2 / 4000**0.5)[np.arange(67) % 3]
    assert error.max() < 5


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_l2_variance_and_nonzeros_meet_the_papers_bounds(bits):
    d, s = 256, 2 ** (bits - 1) - 1
    xs = normal(d), np.full(d, 0.5, np.float32), normal(d) ** 3
    tiles = np.concatenate([x.reshape(32, 8) for x in xs], axis=1)  # a block each
    sent = draws(gcjax.qsgd_compress(bits, d, norm="l2", key=KEY), tiles, 400)
    for x, got in zip(xs, np.split(sent, 3, axis=2), strict=True):
        got = got.reshape(400, d)
        square = (x.astype(np.float64) ** 2).sum()
        position = s * np.abs(x) / square**0.5
        expected = (np.modf(position)[0] * (1 - np.modf(position)[0])).sum() * square / s**2
        measured = ((got - x) ** 2).sum(1)
        assert abs(measured.mean() - expected) < 5 * measured.std() / 20
        assert measured.mean() <= min(d / s**2, d**0.5 / s) * square
        assert (got != 0).sum(1).mean() <= s * (s + d**0.5)


@pytest.mark.parametrize(("bits", "norm"), SETTINGS)
def test_a_block_of_zeros_stays_zero(bits, norm):
    g = (np.arange(71) % 3 == 1).astype(np.float32)
    (update,) = draws(gcjax.qsgd_compress(bits, 32, norm=norm, key=KEY), g, 1)
    assert not update[g == 0].any()
    assert update[g == 1].any()


@pytest.mark.parametrize("magnitude", [1e24, 1e-30])
def test_an_l2_norm_outside_float32s_range_is_no_problem(magnitude):
    g = np.full(64, magnitude, np.float32)
    got = draws(gcjax.qsgd_compress(8, 64, norm="l2", key=KEY), g, 200) / np.float32(magnitude)
    np.testing.assert_allclose(got.mean(), 1, rtol=0.01)


@pytest.mark.parametrize("bits", [1, 4, 7])
def test_payload_bits_count_entries_and_norms(bits):
    g = [normal(40), normal(1), normal(100)]  # 2 + 1 + 4 blocks of 32
    _, info = messages(gcjax.qsgd_compress(bits, 32, key=KEY), g)
    assert info.payload_bits == 141 * bits + 7 * 32


def test_block_norms_equal_float64_over_float32s_range():
    x = np.stack([normal(26), normal(26) * 1e37, normal(26) * 1e-36, np.zeros(26), [1e-20, 1e20] * 13], 1).astype("f4")
    (bucket,) = layout_of(x).buckets
    groups = block_groups(bucket, 32)
    expected = np.linalg.norm(x.astype(np.float64), axis=0)
    norms = jax.jit(lambda x: groups.norms(x, groups.maxima(jnp.abs(x))[0]))(bucket.join([x]))
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 0}, ValueError, "bits must be from 1 to 8, got 0"),
        ({"bits": 9}, ValueError, "bits must be from 1 to 8, got 9"),
        ({"bits": 4.0}, TypeError, "bits must be an int, got 4.0"),
        ({"bucket_size": 100}, ValueError, "bucket_size must be at least 32 and a multiple of 32, got 100"),
        ({"bucket_size": 0}, ValueError, "got 0"),
        ({"norm": "l1"}, ValueError, "norm must be one of 'max', 'l2', got 'l1'"),
        ({"bits": 1, "norm": "l2"}, ValueError, "bits=1 needs norm='max', got norm='l2'"),
        ({"key": 3}, TypeError, "key must be a key made by jax.random.key"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.qsgd_compress(**{"key": KEY, **options})
