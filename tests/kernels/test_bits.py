"""Bits and compaction against plain Python, over generated inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcjax._kernels import bits as packing
from gcjax._kernels import floats
from gcjax._sparse import compaction

SEEDS = st.integers(0, 2**32 - 1)
BLOCKS = st.sampled_from([1, 2, 5])
DENSITIES = st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0])


def mask_of(seed, blocks, density):
    return np.random.default_rng(seed).random((blocks, 32, 128)) < density


def by_word(x):
    """[blocks, 32, 128] -> [words, 32], every word's entries from bit 0 on."""
    return np.swapaxes(np.asarray(x), 1, 2).reshape(-1, 32)


@settings(deadline=None, max_examples=30)
@given(SEEDS, BLOCKS, DENSITIES)
def test_masks_pack_and_unpack(seed, blocks, density):
    mask = mask_of(seed, blocks, density)
    words, inverse = packing.pack_masks(jnp.asarray(mask), ~jnp.asarray(mask))
    np.testing.assert_array_equal(words, np.packbits(by_word(mask).ravel(), bitorder="little").view(np.uint32))
    np.testing.assert_array_equal(inverse, ~words)
    np.testing.assert_array_equal(packing.pack_mask(jnp.asarray(mask)), words)
    np.testing.assert_array_equal(packing.unpack_mask(words), mask)
    mask[-1, :, 40:] = False
    np.testing.assert_array_equal(packing.unpack_mask(words[: 128 * blocks - 88]), mask)


def test_an_index_counts_word_by_word():
    index = np.arange(3 * 4096)
    position = packing.position_of(index)
    np.testing.assert_array_equal(position, by_word(index.reshape(3, 32, 128)).ravel())
    word, bit = packing.word_and_bit(position)
    np.testing.assert_array_equal(word, index // 32)
    np.testing.assert_array_equal(bit, np.uint32(1) << (index % 32).astype(np.uint32))


@pytest.mark.parametrize(("words", "bits"), [(1, 1), (128, 3), (200, 2), (600, 9)])
def test_bit_planes_take_exactly_their_bits_and_come_back(words, bits):
    values = np.random.default_rng(bits).integers(0, 1 << bits, (-(-words // 128), 32, 128)).astype(np.uint32)
    packed = packing.pack_planes(jnp.asarray(values), bits, words)
    for b, plane in enumerate(np.split(np.asarray(packed), bits)):
        np.testing.assert_array_equal(plane, packing.pack_mask(jnp.asarray(values >> b & 1 == 1))[:words])
    back = by_word(packing.unpack_planes(packed, bits))
    np.testing.assert_array_equal(back[:words], by_word(values)[:words])
    assert not back[words:].any()


@settings(deadline=None, max_examples=40)
@given(SEEDS, BLOCKS, DENSITIES)
def test_peak_is_the_largest_selected_magnitude(seed, blocks, density):
    mask = mask_of(seed, blocks, density)
    x = np.random.default_rng(seed + 1).normal(size=mask.shape).astype(np.float32)
    words, peak = packing.pack_mask_and_peak(jnp.asarray(mask), jnp.asarray(x))
    np.testing.assert_array_equal(words, packing.pack_mask(jnp.asarray(mask)))
    np.testing.assert_array_equal(floats.bits_float(peak), by_word(np.where(mask, np.abs(x), 0)).max(axis=1))


@pytest.mark.parametrize("reduce", [packing._reduce, packing._reduce_in_short])  # of accelerators, of CPUs
def test_rows_are_reduced(reduce):
    x = np.random.default_rng(0).integers(0, 99, (3, 32, 128)).astype(np.float32)
    total, most = reduce((jax.lax.add, jax.lax.max), x, x)
    np.testing.assert_array_equal(total, by_word(x).sum(axis=1))
    np.testing.assert_array_equal(most, by_word(x).max(axis=1))


@settings(deadline=None, max_examples=40)
@given(SEEDS, BLOCKS, DENSITIES)
def test_prefix_count_is_the_running_number_of_set_bits(seed, blocks, density):
    mask = mask_of(seed, blocks, density)
    np.testing.assert_array_equal(packing.prefix_count(packing.pack_mask(mask)), np.cumsum(by_word(mask).sum(axis=1)))


def test_a_product_with_a_triangle_is_a_running_sum():
    counts = np.random.default_rng(0).integers(0, 33, (5, 128)).astype(np.int32)
    np.testing.assert_array_equal(packing._cumsum_by_matmul(counts), counts.cumsum(axis=1))


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


def test_integers_share_words_with_distant_ones():
    assert packing.pack_uint(jnp.arange(1, 6), 16).tolist() == [1 | 4 << 16, 2 | 5 << 16, 3]


@settings(deadline=None, max_examples=300)
@given(st.floats(2.0**-125, 2.0**126, width=32), st.booleans())
def test_nearest_power_of_two(x, negative):
    x = np.float32(-x if negative else x)
    k = int(floats.nearest_exponent(jnp.float32(x))) - 127
    low = 2.0 ** int(np.floor(np.log2(abs(float(x)))))
    assert 2.0**k == (low if abs(float(x)) < 1.5 * low else 2 * low)


def test_mid_points_round_up():
    below = np.nextafter(np.float32(1.5), np.float32(0))
    assert floats.nearest_exponent(jnp.array([1.5, below, 1.0, 0.75])).tolist() == [128, 127, 127, 127]


@functools.partial(jax.jit, static_argnums=2)
def compacted(words, start_word, capacity):
    kept, resume = compaction.truncate(words, start_word, capacity)
    return kept, resume, compaction.slot_indices(compaction.assign_slots(kept), capacity)


@settings(deadline=None, max_examples=40)
@given(SEEDS, BLOCKS, DENSITIES, st.sampled_from([32, 64, 256, 5024]), st.integers(0, 10**6))
def test_slots_hold_the_set_entries_in_order(seed, blocks, density, capacity, first):
    mask = mask_of(seed, blocks, density)
    words, mask = packing.pack_mask(jnp.asarray(mask)), by_word(mask)
    first %= len(words)
    kept, resume, index = compacted(words, jnp.int32(first), capacity)
    count = int(packing.count_bits(kept).sum())
    # Loop-written truth: whole words from `first` on, until one does not fit.
    expected, stop = [], 0
    for step in range(len(words)):
        word = (first + step) % len(words)
        inside = (word * 32 + np.flatnonzero(mask[word])).tolist()
        if len(expected) + len(inside) > capacity:
            stop = word
            break
        expected += inside
    np.testing.assert_array_equal(index[:count], sorted(expected))
    np.testing.assert_array_equal(np.flatnonzero(by_word(packing.unpack_mask(kept))), sorted(expected))
    assert int(resume) == stop


def test_no_entry_starves_when_the_capacity_is_too_small():
    words = jnp.full(128, 0xFFFFFFFF, jnp.uint32)
    first, served = jnp.int32(0), np.zeros(128, int)
    for _ in range(128 // 3 + 1):
        kept, first = compaction.truncate(words, first, 96)
        served += np.asarray(kept != 0)
    assert served.min() >= 1


def test_no_sort_or_cumsum_of_gradient_length():
    def compact(x):
        slots = compaction.assign_slots(packing.pack_mask(x > 0))
        return compaction.slot_indices(slots, 1024)

    text = str(jax.make_jaxpr(compact)(jnp.zeros((245, 32, 128))))
    running = [
        line for line in text.splitlines() if any(name in line for name in ("cumsum", "sort", "top_k", "cummax"))
    ]
    assert running  # over the words of each block, and over the blocks
    assert not any("245,32,128" in line or f"[{245 * 128}]" in line for line in running)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_that_of_a_conversion(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 2.0 ** rng.uniform(-30, 15, 4000)).astype(np.float32)
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, 1e5, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14]]).astype(
        np.float32
    )
    truth = jnp.asarray(x).astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(floats.rounded(jnp.asarray(x), dtype), truth)
    assert np.isnan(floats.rounded(jnp.float32(jnp.nan), dtype))
