"""Pytrees to buckets and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcjax._kernels import buckets

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)


@settings(deadline=None, max_examples=20)
@given(SHAPES, st.sampled_from([32, 64, 96, 1 << 28]), st.integers(0, 2**31))
def test_flatten_and_unflatten_are_inverse(shapes, limit, seed):
    rng = np.random.default_rng(seed)
    dtypes = [np.float32, np.float16, jnp.bfloat16]
    tree = {str(i): jnp.asarray(rng.normal(size=s), dtypes[i % 3]) for i, s in enumerate(shapes)}
    layout = buckets.layout_of(tree, limit)
    flat = buckets.flatten(layout, tree)
    assert [len(f) for f in flat] == [b.size for b in layout.buckets]
    assert all(b.size <= limit for b in layout.buckets)
    assert sum(b.entries for b in layout.buckets) == sum(x.size for x in tree.values())
    back = buckets.unflatten(layout, flat)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name, leaf in tree.items():
        assert back[name].dtype == leaf.dtype
        np.testing.assert_array_equal(back[name].astype(np.float32), leaf.astype(np.float32))


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.sampled_from([64, 1 << 28]))
def test_no_mask_word_belongs_to_two_leaves(shapes, limit):
    layout = buckets.layout_of([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], limit)
    for bucket in layout.buckets:
        owner = bucket.leaf_of_word()
        assert len(owner) == bucket.words
        for number, s in enumerate(bucket.segments):
            assert s.offset % 32 == 0
            words = {i // 32 for i in range(s.offset, s.offset + s.size)}
            assert all(owner[w] == number for w in words)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_integer_and_complex_leaves_raise(dtype):
    tree = {"dense": {"kernel": jnp.ones(3), "steps": jnp.zeros(2, dtype)}}
    with pytest.raises(TypeError, match=rf"'steps'.*{dtype}.*optax.partition"):
        buckets.layout_of(tree)
