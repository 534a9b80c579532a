"""Bits and compaction against plain Python, over generated inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcjax._kernels import bits as packing
from gcjax._sparse import compaction

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([1, 31, 32, 33, 1023, 1024, 1025, 5000])
DENSITIES = st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0])


def mask_of(seed, size, density):
    return np.random.default_rng(seed).random(size) < density


@settings(deadline=None, max_examples=30)
@given(SEEDS, SIZES, DENSITIES)
def test_masks_pack_and_unpack(seed, size, density):
    mask = mask_of(seed, size, density)
    words = np.asarray(packing.pack_mask(jnp.asarray(mask)))
    assert len(words) == packing.words_for(size)
    assert len(words) % 32 == 0
    expected = np.packbits(np.pad(mask, (0, len(words) * 32 - size)), bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(words, expected)
    np.testing.assert_array_equal(packing.unpack_mask(jnp.asarray(words), size), mask)


@pytest.mark.parametrize(("size", "bits"), [(1, 1), (33, 3), (1024, 9), (5000, 2), (1025, 8)])
def test_bit_planes_take_exactly_their_bits_and_come_back(size, bits):
    values = np.random.default_rng(bits).integers(0, 1 << bits, size).astype(np.uint32)
    words = packing.pack_planes(jnp.asarray(values), bits)
    assert len(words) == bits * packing.words_for(size)
    for b in range(bits):
        plane = words[b * packing.words_for(size) : (b + 1) * packing.words_for(size)]
        np.testing.assert_array_equal(plane, packing.pack_mask(jnp.asarray(values >> b & 1 == 1)))
    np.testing.assert_array_equal(packing.unpack_planes(words, bits, size), values)


@settings(deadline=None, max_examples=40)
@given(SEEDS, SIZES, DENSITIES)
def test_peak_is_the_largest_selected_magnitude(seed, size, density):
    mask = mask_of(seed, size, density)
    x = np.random.default_rng(seed + 1).normal(size=size).astype(np.float32)
    words, peak = packing.pack_mask_and_peak(jnp.asarray(mask), jnp.asarray(x))
    np.testing.assert_array_equal(words, packing.pack_mask(jnp.asarray(mask)))
    padded = np.zeros(len(words) * 32, np.float32)
    padded[:size] = np.where(mask, np.abs(x), 0)
    np.testing.assert_array_equal(packing.bits_float(peak), padded.reshape(-1, 32).max(axis=1))


@settings(deadline=None, max_examples=40)
@given(SEEDS, SIZES, DENSITIES)
def test_prefix_count_is_the_running_number_of_set_bits(seed, size, density):
    words = packing.pack_mask(jnp.asarray(mask_of(seed, size, density)))
    expected = np.cumsum([bin(w).count("1") for w in np.asarray(words).tolist()])
    np.testing.assert_array_equal(packing.prefix_count(words), expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2**32 - 1))
def test_nth_set_bit_finds_every_bit(word):
    positions = [i for i in range(32) if word >> i & 1]
    found = packing.nth_set_bit(jnp.full(32, word, jnp.uint32), jnp.arange(32))  # of one shape, to compile once
    np.testing.assert_array_equal(found[: len(positions)], positions)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([0, 1, 31, 33, 200]), st.sampled_from([1, 2, 4, 8, 16, 32]), SEEDS)
def test_packed_integers_come_back(count, bits, seed):
    values = np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint32)
    words = jax.jit(packing.pack_uint, static_argnums=1)(values, bits)
    assert len(words) == packing.packed_size(count, bits)
    np.testing.assert_array_equal(jax.jit(packing.unpack_uint, static_argnums=(1, 2))(words, bits, count), values)


@settings(deadline=None, max_examples=300)
@given(st.floats(2.0**-125, 2.0**126, width=32), st.booleans())
def test_nearest_power_of_two(x, negative):
    x = np.float32(-x if negative else x)
    k = int(packing.nearest_exponent(jnp.float32(x))) - 127
    low = 2.0 ** int(np.floor(np.log2(abs(float(x)))))
    assert 2.0**k == (low if abs(float(x)) < 1.5 * low else 2 * low)


def test_mid_points_round_up():
    below = np.nextafter(np.float32(1.5), np.float32(0))
    assert packing.nearest_exponent(jnp.array([1.5, below, 1.0, 0.75])).tolist() == [128, 127, 127, 127]


@functools.partial(jax.jit, static_argnums=2)
def compacted(words, start_word, capacity):
    slots = compaction.assign_slots(words, start_word)
    return *compaction.truncate(slots, capacity), compaction.slot_indices(slots, capacity)


@settings(deadline=None, max_examples=40)
@given(SEEDS, SIZES, DENSITIES, st.sampled_from([32, 64, 256, 5024]), st.integers(0, 10**6))
def test_slots_hold_the_set_entries_in_order(seed, size, density, capacity, first):
    mask = mask_of(seed, size, density)
    words = packing.pack_mask(jnp.asarray(mask))
    first %= len(words)
    kept, resume, index = compacted(words, jnp.int32(first), capacity)
    count = int(packing.count_bits(kept).sum())
    # Loop-written truth: whole words from `first` on, until one does not fit.
    expected, stop = [], 0
    for step in range(len(words)):
        word = (first + step) % len(words)
        inside = [i for i in range(word * 32, min(word * 32 + 32, size)) if mask[i]]
        if len(expected) + len(inside) > capacity:
            stop = word
            break
        expected += inside
    np.testing.assert_array_equal(index[:count], expected)
    np.testing.assert_array_equal(np.flatnonzero(packing.unpack_mask(kept, size)), sorted(expected))
    assert int(resume) == stop


def test_no_entry_starves_when_the_capacity_is_too_small():
    words = packing.pack_mask(jnp.ones(4096, bool))
    first, served = jnp.int32(0), np.zeros(4096, int)
    for _ in range(4096 // 96 + 1):
        kept, first = compaction.truncate(compaction.assign_slots(words, first), 96)
        served += np.asarray(packing.unpack_mask(kept, 4096))
    assert served.min() >= 1


@pytest.mark.parametrize("size", [10**6, 10**6 + 17])
def test_no_sort_or_cumsum_of_gradient_length(size):
    def compact(x):
        slots = compaction.assign_slots(packing.pack_mask(x > 0), jnp.int32(0))
        return compaction.slot_indices(slots, 1024)

    text = str(jax.make_jaxpr(compact)(jnp.zeros(size)))
    for line in text.splitlines():
        if any(name in line for name in ("cumsum", "sort", "top_k", "cummax")):
            assert str(size) not in line
            assert f"[{packing.words_for(size)}]" not in line
