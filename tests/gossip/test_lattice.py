"""The modulo lattice against an oracle in Python's integers: words, bound, detection, bias."""

import functools
import math

import jax
import numpy as np
import pytest

from gcjax._kernels.buckets import vector_bucket
from gcjax.gossip import _lattice
from gcjax.gossip._lattice import margin, scale_for

BITS = [4, 8, 16]
KEY = jax.random.key(5)
SIZE, CASES = 100, 2000
WORDS = 4
scale_for = jax.jit(scale_for, static_argnums=1)


def joined(x, padding=0):
    return vector_bucket(len(x)).join([x - padding]) + padding if np.ndim(x) else x


@functools.partial(jax.jit, static_argnums=2)
def encode(x, scale, bits, key):
    points = _lattice.lattice_points(joined(x), joined(scale, 1), key)
    return _lattice.encode_points(*points, bits, vector_bucket(len(x)).words)


@functools.partial(jax.jit, static_argnums=3)
def decode(words, reference, scale, bits):
    values, right = _lattice.decode(words, joined(reference), joined(scale, 1), bits)
    return vector_bucket(len(reference)).split(values)[0], right


@jax.jit
def points_of(x, scale, key):
    points, in_range = _lattice.lattice_points(joined(x), joined(scale, 1), key)
    return vector_bucket(len(x)).split(points)[0], in_range


decode_rows = jax.jit(jax.vmap(decode, (None, 0, None, None)), static_argnums=3)


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def checksum(points):
    """The sum of one hash for each place of a block and its integer, in Python's integers."""
    block, entry, total = np.zeros(4096, int), np.arange(SIZE), 0
    block[entry // WORDS * 128 + entry % WORDS] = points
    for place, z in enumerate(block):
        h = (int(z) + place * 0x9E3779B1) % 2**32
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        total += h ^ h >> 16
    return total % 2**32


@pytest.mark.parametrize("bits", BITS)
def test_words_and_values_match_the_oracle(bits):
    scale, x = 0.25, normal(SIZE)
    points = np.asarray(points_of(x, scale, KEY)[0])
    words = np.asarray(encode(x, scale, bits, KEY))
    assert len(words) == 1 + bits * WORDS
    assert words[0] == checksum(points)
    near = x + np.float32(scale) * (-1) ** np.arange(SIZE, dtype=np.float32) * 2 ** (bits - 2)
    for i, z in enumerate(points):
        assert abs(int(z) * scale - float(x[i])) < scale
        last = sum((int(words[1 + WORDS * b + i % WORDS]) >> i // WORDS & 1) << b for b in range(bits))
        assert last == z % 2**bits
    values, right = decode(words, near, scale, bits)
    assert right
    np.testing.assert_array_equal(values, points.astype(np.float32) * np.float32(scale))


@pytest.mark.parametrize("bits", BITS)
def test_decoding_is_right_up_to_the_margin(bits):
    rng = np.random.default_rng(2)
    for k, scale in enumerate([2.0**-9, 0.037, 1.0, 50.0]):
        x, key, reach = normal(SIZE, k), jax.random.fold_in(KEY, k), margin(scale, bits)
        words = encode(x, scale, bits, key)
        points, whole = points_of(x, scale, key)
        far = reach * (1 - 1e-3 * (scale == 0.037))  # where x / scale is rounded
        distance = rng.uniform(-far, far, (CASES, SIZE))
        distance[:200] = far * rng.choice([-1, 1], (200, SIZE))
        reference = (x.astype(np.float64) + distance).astype(np.float32)
        reference = np.where(np.abs(reference - x.astype(np.float64)) > reach, x, reference)
        values, right = decode_rows(words, reference, scale, bits)
        assert np.asarray(right).all()
        assert whole
        expected = np.asarray(points, np.float32) * np.float32(scale)
        np.testing.assert_array_equal(values, np.broadcast_to(expected, values.shape))
        assert np.abs(expected.astype(np.float64) - x).max() <= scale * (1 + 1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_a_receiver_too_far_away_is_always_detected(bits):
    x, scale = normal(SIZE, 3), 2.0**-6
    words, rng = encode(x, scale, bits, KEY), np.random.default_rng(4)
    turns = (2**bits * scale * rng.integers(1, 4, CASES) * rng.choice([-1, 1], CASES)).astype(np.float32)
    reference = np.tile(x, (CASES, 1))
    reference[np.arange(CASES), rng.integers(0, 50, CASES)] += turns
    assert not np.asarray(decode_rows(words, reference, scale, bits)[1]).any()
    reference[np.arange(CASES), rng.integers(50, 100, CASES)] -= turns  # a plain sum would agree
    values, right = decode_rows(words, reference, scale, bits)
    assert not np.asarray(right).any()
    assert (np.abs(np.asarray(values) - x) > scale).sum() == 2 * CASES


def test_checksum_fails_exactly_where_values_are_wrong():
    x, scale, bits = normal(SIZE, 6), 1.0, 4
    reference = np.tile(x, (CASES, 1))
    reference[:, 5] += np.linspace(-12, 12, CASES, dtype=np.float32)
    values, right = decode_rows(encode(x, scale, bits, KEY), reference, scale, bits)
    distance = np.abs(reference[:, 5].astype(np.float64) - x[5])
    np.testing.assert_array_equal(right, np.asarray(values)[:, 5] == points_of(x, scale, KEY)[0][5])
    assert np.asarray(right)[distance <= margin(scale, bits)].all()
    assert not np.asarray(right)[distance > 9.5].any()


def test_corrupted_words_are_rejected():
    x, scale = normal(SIZE, 7), 2.0**-5
    words = np.asarray(encode(x, scale, 8, KEY))
    for k in (0, 1, 2, 31, 32):
        changed = words.copy()
        changed[k] ^= np.uint32(1 << 7)
        assert not decode(changed, x, scale, 8)[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**30, -(2.0**31), 3e38])
def test_values_out_of_range_are_rejected(bad):
    x = np.zeros(SIZE, np.float32)
    x[17] = bad
    words = encode(x, 1.0, 8, KEY)
    assert not decode(words, x, 1.0, 8)[1]
    assert not decode(words, np.zeros(SIZE, np.float32), 1.0, 8)[1]
    assert not decode(encode(np.zeros(SIZE, np.float32), 1.0, 8, KEY), x, 1.0, 8)[1]  # nor a receiver out of range


def test_rounding_is_unbiased():
    x = np.array([0.3, -0.3, 7.99, -123.456, 2.0**22 + 0.5, 3e8, 0.0], np.float32)
    keys = jax.random.split(KEY, 4000)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: points_of(x, 1.0, key)[0]))(keys), np.float64)
    part = x.astype(np.float64) % 1
    error = np.sqrt(part * (1 - part) / 4000)
    assert (np.abs(draws.mean(0) - x) <= 5 * error).all()
    assert (np.abs(draws - x) < 1).all()


def test_senders_with_one_key_round_alike():
    x = normal(20000, 8)
    near = (x + np.float32(0.1)).astype(np.float32)
    a, b = (np.asarray(points_of(v, 1.0, KEY)[0]) for v in (x, near))
    assert set(np.unique(b - a)) == {0, 1}  # drawn apart it would be -2 to 2
    assert abs((b - a).mean() - 0.1) < 5 * (0.1 * 0.9 / 20000) ** 0.5


def test_scales_may_differ_by_entry():
    scale = np.repeat(np.float32([0.25, 4.0]), SIZE // 2)
    x = normal(SIZE, 9) * scale
    words = encode(x, scale, 8, KEY)
    values, right = decode(words, x + scale, scale, 8)
    assert right
    assert (np.abs(values - x) < scale).all()
    assert not decode(words, x + 40, scale, 8)[1]  # beyond the margin only where the scale is fine


@pytest.mark.parametrize("bits", BITS)
def test_scale_for_is_the_smallest_sufficient_power_of_two(bits):
    distances = np.concatenate([margin(2.0 ** np.arange(-20, 20), bits), np.abs(normal(50)) * 100]).astype(np.float32)
    for distance, scale in zip(distances, np.asarray(scale_for(distances, bits)), strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert margin(float(scale), bits) >= float(distance) > margin(float(scale) / 2, bits)
    assert scale_for(np.float32(0), bits) == 2.0**-126
