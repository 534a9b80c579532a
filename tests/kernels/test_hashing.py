"""Hashed random bits: uniform, independent between keys and positions; sample positions that cover everything."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import limited_buckets

from gcjax._kernels import hashing, layout

N = 1 << 20


def bits(seed):
    return np.asarray(hashing.hash_bits(jax.random.key(seed), jnp.arange(N)))


def test_every_bit_is_set_half_of_the_time():
    x = bits(0)
    for b in range(32):
        share = ((x >> b) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / N**0.5
    for low in (1, 31, 32, 1024):  # neighbours and mask words
        assert abs(np.corrcoef(x[:-low] / 2**32, x[low:] / 2**32)[0, 1]) < 5 / N**0.5


@pytest.mark.parametrize("other", [1, 2, 3])
def test_two_keys_give_independent_bits(other):
    differing = np.bitwise_count(bits(0) ^ bits(other)).mean()
    assert abs(differing - 16) < 5 * (8 / N) ** 0.5


def test_uniform_numbers_fill_the_interval_evenly():
    u = np.asarray(hashing.uniform(jax.random.key(4), jnp.arange(N)))
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, 256, (0, 1))[0]
    assert ((counts - N / 256) ** 2 / (N / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5


def test_the_bits_equal_the_same_hash_in_numpy():
    words = np.asarray(jax.random.bits(jax.random.key(9), (2,), jnp.uint32))
    np.testing.assert_array_equal(bits(9), oracle.hash_bits(words, np.arange(N)))


def test_step_keys_differ_between_steps_workers_and_buckets():
    shapes = [jax.ShapeDtypeStruct((100,), jnp.float32)] * 2
    with limited_buckets(128):
        one, two = layout.layout_of(shapes).buckets[:2]
    keys = [
        hashing.step_key(jax.random.key(0), step, bucket, rank)
        for step in (0, 1)
        for bucket in (one, two)
        for rank in (None, 0, 1)
    ]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize(("size", "count"), [(10, 20), (20, 20), (21, 20), (100_000, 65_536), (10_000_000, 65_536)])
def test_sample_positions_are_distinct_and_reach_the_end(size, count):
    for step in (0, 1):
        position = np.asarray(hashing.scatter_positions(size, count, step))
        assert position.shape == (count,)
        assert (np.diff(position) >= (0 if size < count else 1)).all()
        assert position[0] < max(size / count, 1)
        assert size - 1 - 2 * size / count < position[-1] < size


@pytest.mark.parametrize(("size", "count"), [(8191, 4096), (10_000, 4096), (102_400, 65_536)])
def test_every_position_is_sampled_in_time(size, count):
    found = [np.asarray(hashing.scatter_positions(size, count, step)) for step in range(60)]
    assert len(np.unique(found)) == size


def test_sample_positions_change_with_the_step():
    a, b = (np.asarray(hashing.scatter_positions(10**6, 1000, step)) for step in (0, 1))
    assert (a != b).mean() > 0.9
