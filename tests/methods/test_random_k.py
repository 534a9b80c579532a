"""random_k_compress: distinct entries, each equally likely; no bias; whole blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import draws

import gcjax
from gcjax._kernels import layout
from gcjax.contrib import random_k

KEY = jax.random.key(11)


def sets_drawn(count, total, times):
    keys = jax.random.split(KEY, times)
    return np.asarray(jax.jit(jax.vmap(lambda key: random_k._draw(key, count, total)))(keys))


@pytest.mark.parametrize(("count", "total"), [(3, 10), (7, 10), (5, 10), (1, 10), (10, 10), (1, 1)])
def test_entries_are_drawn_equally_often_and_never_twice(count, total):
    times = 20_000
    sets = np.sort(sets_drawn(count, total, times), axis=1)
    assert sets.min() >= 0
    assert sets.max() < total
    assert (np.diff(sets, axis=1) > 0).all()
    rate = count / total
    error = (rate * (1 - rate) / times) ** 0.5
    np.testing.assert_allclose(np.bincount(sets.ravel(), minlength=total) / times, rate, atol=5 * error + 1e-12)


def test_a_large_model_has_no_entry_drawn_twice():
    (entries,) = sets_drawn(30_011, 3_000_017, 1)
    assert len(np.unique(entries)) == 30_011
    assert 0 <= entries.min() < entries.max() < 3_000_017


@pytest.mark.parametrize("divisor", [1, 929, 10_000_000, (1 << 28) - 57, 1 << 28])
def test_remainders_of_64_bits_are_exact(divisor):
    for first, second in [(0, 5), (0xFFFFFFFF, 0xFFFFFFFF), (0x9E3779B9, 0x7F4A7C15)]:
        words = jnp.array([first, second], jnp.uint32)
        assert random_k._remainder(words, divisor) == ((first << 32) + second) % divisor


# d / k is 32 / 9 in the first case. In the second it is 7 blocks / 2; the last block has two entries instead of five.
@pytest.mark.parametrize(("density", "block", "rarity"), [(0.3, 1, 32 / 9), (0.4, 5, 7 / 2)])
def test_without_feedback_it_is_unbiased(density, block, rarity):
    steps, g = 20_000, np.linspace(-1, 2, 32, dtype=np.float32)
    y = draws(gcjax.contrib.random_k_compress(density, key=KEY, block=block, feedback=False), g, steps)
    np.testing.assert_allclose(y.mean(axis=0), g, atol=5 * ((rarity - 1) * (g**2).max() / steps) ** 0.5)
    squares = ((y - g) ** 2).sum(axis=1)
    assert squares.mean() == pytest.approx((rarity - 1) * (g**2).sum(), abs=5 * float(squares.std()) / steps**0.5)
    assert squares.std() > 0


def test_blocks_are_sent_whole():
    y = draws(gcjax.contrib.random_k_compress(0.6, key=KEY, block=20, feedback=False), jnp.ones(96), 60) != 0
    blocks = np.split(y, range(20, 96, 20), axis=1)  # the last one has 16 entries
    assert all((block == block[:, :1]).all() for block in blocks)
    assert (sum(block[:, 0].astype(int) for block in blocks) == 3).all()
    assert all(block.any() for block in blocks)


def test_every_parameter_has_a_number():
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (40_000, 300, 1, 5000)]
    (bucket,) = layout.layout_of(shapes).buckets
    block, row, lane = random_k._place(jnp.arange(bucket.words * 32 + 99), bucket)
    positions = np.asarray(4096 * block + 128 * row + lane)
    assert len(np.unique(positions)) == len(positions)
    assert (positions[-99:] >= bucket.size).all()
    for s in bucket.segments:
        assert np.isin(s.position_of(np.arange(s.size)), positions[:-99]).all()


def test_a_block_larger_than_the_model_sends_it_all():
    tx = gcjax.contrib.random_k_compress(0.01, key=KEY, block=1 << 31)
    update, state = jax.jit(tx.update)(jnp.arange(5.0), tx.init(jnp.zeros(5)))
    assert update.tolist() == [0, 1, 2, 3, 4]
    assert gcjax.info(state).payload_bits == 32 * 32  # padding included
