"""qsgd_compress: levels and words by hand, no bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import draws, messages
from rows.qsgd import KEY

import gcjax
from gcjax._kernels.groups import block_groups
from gcjax._kernels.layout import layout_of


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_words_by_hand():
    g = {"a": np.zeros(40, np.float32), "b": np.array([0.0, 7.0], np.float32)}
    g["a"][[0, 2, 6, 38]] = 3.0, -1.0, 2.0, -3.0
    g["a"][[3, 15]] = -6.0, 4.0
    (words,), info = messages(gcjax.qsgd_compress(3, 32, key=KEY), g)
    assert words[:3].view(np.float32).tolist() == [3.0, 6.0, 7.0]  # the even entries of a, the odd ones, then b
    assert info.payload_bits == 42 * 3 + 3 * 32
    # In thirds: 3, 1, 2, 3 in the first block, 3 and 2 in the second, 3 in that of b.
    low, high, sign = words[3:].reshape(3, 3).tolist()
    assert low == [1 << 0 | 1 << 1 | 1 << 19, 1 << 1, 1 << 1]
    assert high == [1 << 0 | 1 << 3 | 1 << 19, 1 << 1 | 1 << 7, 1 << 1]
    assert sign == [1 << 1 | 1 << 19, 1 << 1, 0]


@pytest.mark.parametrize("bits", [2, 4])
def test_the_mean_of_many_draws_is_the_gradient(bits):
    g = np.concatenate([normal(64), [0.0, 2.0, 1e-3]]).astype(np.float32)
    got = draws(gcjax.qsgd_compress(bits, 32, key=KEY), g, 4000)
    # A draw is one of two neighbouring levels: its standard deviation is at most half the gap between them.
    blocks = [g[k::3] for k in range(3)]
    scale = np.array([np.abs(b).max() for b in blocks])
    gap = scale / (2 ** (bits - 1) - 1)
    error = np.abs(got.mean(0) - g) / (gap / 2 / 4000**0.5)[np.arange(67) % 3]
    assert error.max() < 5


def test_block_norms_equal_float64_over_float32s_range():
    x = np.stack([normal(26), normal(26) * 1e37, normal(26) * 1e-36, np.zeros(26), [1e-20, 1e20] * 13], 1).astype("f4")
    (bucket,) = layout_of(x).buckets
    groups = block_groups(bucket, 32)
    expected = np.linalg.norm(x.astype(np.float64), axis=0)
    norms = jax.jit(lambda x: groups.norms(x, groups.maxima(jnp.abs(x))[0]))(bucket.join([x]))
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
