"""Pytrees to buckets and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import limited_buckets
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gcjax._kernels import bits
from gcjax._kernels import layout as layouts

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)
LIMITS = st.sampled_from([32, 64, 96, 70_016, 1 << 28])
# Leaves that share blocks and leaves that have their own, one of them of a whole block.
MIXED = [(40,), (300, 110), (0,), (), (4096,), (130, 33), (40_000,)]


@settings(deadline=None, max_examples=8)
@example(MIXED, 1 << 28, 0)
@example(MIXED, 50_016, 0)
@given(SHAPES, LIMITS, st.integers(0, 2**31))
def test_flatten_and_unflatten_are_inverse(shapes, limit, seed):
    rng = np.random.default_rng(seed)
    dtypes = [np.float32, np.float16, jnp.bfloat16]
    tree = {str(i): jnp.asarray(rng.normal(size=s), dtypes[i % 3]) for i, s in enumerate(shapes)}
    with limited_buckets(limit):
        layout = layouts.layout_of(tree)
    flat = layouts.flatten(layout, tree)
    assert [[x.shape for x in leaves] for leaves in flat] == [[s.shape for s in b.segments] for b in layout.buckets]
    assert all(32 * b.words <= limit for b in layout.buckets)
    assert sum(b.entries for b in layout.buckets) == sum(x.size for x in tree.values())
    back = layouts.unflatten(layout, flat)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name, leaf in tree.items():
        assert back[name].dtype == leaf.dtype
        np.testing.assert_array_equal(back[name].astype(np.float32), leaf.astype(np.float32))


@settings(deadline=None, max_examples=8)
@example(MIXED, 1 << 28)
@example(MIXED, 50_016)
@given(SHAPES, LIMITS)
def test_every_entry_has_a_place_and_no_mask_word_two_leaves(shapes, limit):
    with limited_buckets(limit):
        layout = layouts.layout_of([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    for bucket in layout.buckets[:3]:
        leaves = [np.random.default_rng(s.leaf).normal(size=s.shape).astype(np.float32) for s in bucket.segments]
        expected, owner = np.zeros(bucket.size, np.float32), bucket.leaf_of_word()
        for number, (s, leaf, words) in enumerate(zip(bucket.segments, leaves, bucket.leaf_word_ranges(), strict=True)):
            position = s.position_of(np.arange(s.size))
            word = np.asarray(bits.word_and_bit(position)[0])
            assert (owner[word] == number).all()
            assert (word.min(), words[1] - words[0]) == (words[0], s.words)
            assert word.max() < words[1]
            expected[position] = leaf.ravel()
        x = bucket.join(leaves)
        assert x.shape == bucket.shape
        assert len(owner) == bucket.size // 32 >= bucket.words > owner.size - 128
        np.testing.assert_array_equal(x.ravel(), expected)
        np.testing.assert_array_equal(bits.unpack_mask(jnp.asarray(bucket.valid_words())).ravel(), expected != 0)
        for back in (bucket.split(x), bucket.split(x.ravel()[: bucket.span])):
            jax.tree.map(np.testing.assert_array_equal, list(back), leaves)


def test_large_leaves_come_first_in_blocks_of_their_own():
    (bucket,) = layouts.layout_of([jax.ShapeDtypeStruct(s, jnp.float32) for s in MIXED]).buckets
    assert [(s.leaf, s.word, s.words) for s in bucket.segments] == [
        (1, 0, 9 * 128),
        (4, 9 * 128, 128),
        (6, 10 * 128, 10 * 128),
        (0, 20 * 128, 2),
        (3, 20 * 128 + 2, 1),
        (5, 20 * 128 + 3, 135),
    ]
    assert bucket.shape == (22, 32, 128)


def test_only_leaves_larger_than_a_bucket_are_cut():
    with limited_buckets(320):
        layout = layouts.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in (200, 10, 200, 700, 100)])
    found = [[(s.leaf, s.begin, s.size) for s in bucket.segments] for bucket in layout.buckets]
    assert found == [
        [(0, 0, 200), (1, 0, 10)],
        [(2, 0, 200), (3, 0, 96)],
        [(3, 96, 320)],
        [(3, 416, 284)],
        [(4, 0, 100)],
    ]


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_integer_and_complex_leaves_raise(dtype):
    tree = {"dense": {"kernel": jnp.ones(3), "steps": jnp.zeros(2, dtype)}}
    with pytest.raises(TypeError, match=rf"'steps'.*{dtype}.*optax.partition"):
        layouts.layout_of(tree)
