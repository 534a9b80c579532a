"""Selection and group reductions against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcjax._kernels import bits, buckets
from gcjax._kernels import groups as grouping
from gcjax._sparse import selection

LARGE = 200_003  # above 2 * SAMPLE, where the search begins with a sample


def numpy_top_k(x, k):
    """The mask of the k entries of largest magnitude, of equal ones the first; nothing below the normal range."""
    order = np.lexsort((np.arange(len(x)), -np.abs(x)))[:k]
    mask = np.zeros(len(x), bool)
    mask[order] = True
    return mask & (np.abs(x) >= bits.TINY)


@functools.partial(jax.jit, static_argnums=1)
def top_k_static(x, k):
    return bits.unpack_mask(selection.top_k_mask(x, k), len(x))


top_k_traced = jax.jit(lambda x, k: bits.unpack_mask(selection.top_k_mask(x, k), len(x)))


def test_max_nonzero_limits_the_search():
    rng = np.random.default_rng(0)
    x = np.zeros(5000, np.float32)
    filled = rng.choice(5000, 300, replace=False)
    x[filled] = 2.0 ** rng.integers(-3, 3, 300) * rng.choice([-1, 1], 300)  # ties, as coded values have
    for k in (1, 40, 299, 300, 400):
        mask = bits.unpack_mask(selection.top_k_mask(jnp.asarray(x), k, max_nonzero=320), 5000)
        np.testing.assert_array_equal(mask, numpy_top_k(x, k))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 1025), st.sampled_from(["normal", "ties", "mostly zero", "tiny"]))
def test_top_k_words_are_the_k_largest_with_ties_by_index(seed, k, kind):
    x = LARGE_CASES[kind](np.random.default_rng(seed), 1025)
    np.testing.assert_array_equal(top_k_traced(x, jnp.int32(k)), numpy_top_k(x, k))


def _spikes(rng, n):
    x = np.zeros(n, np.float32)
    x[rng.permutation(n)[: n // 500]] = 1.0
    return x


LARGE_CASES = {
    "normal": lambda rng, n: rng.normal(size=n).astype(np.float32),
    "heavy tails": lambda rng, n: (rng.standard_cauchy(size=n) ** 3).astype(np.float32),
    "ties": lambda rng, n: rng.integers(-3, 4, n).astype(np.float32),
    "all equal": lambda rng, n: np.full(n, -2.5, np.float32),
    "mostly zero": _spikes,
    "zero": lambda rng, n: np.zeros(n, np.float32),
    "sorted": lambda rng, n: np.linspace(-1, 1, n, dtype=np.float32),
    "large ones in one place": lambda rng, n: (
        np.where(np.arange(n) < n // 50, 1e3, 1).astype(np.float32) * rng.normal(size=n).astype(np.float32)
    ),
    "tiny": lambda rng, n: (rng.normal(size=n) * 1e-38).astype(np.float32),
    "huge": lambda rng, n: (rng.uniform(-1, 1, size=n) * 3e38).astype(np.float32),
}


@pytest.mark.parametrize("kind", LARGE_CASES)
@pytest.mark.parametrize("k", [1, 2000, LARGE // 2, LARGE])
def test_the_search_from_a_sample_is_exact(kind, k):
    x = LARGE_CASES[kind](np.random.default_rng(k), LARGE)
    np.testing.assert_array_equal(top_k_static(x, k), numpy_top_k(x, k))


@functools.partial(jax.jit, static_argnums=0)
def keep_largest(limit, x, mask):
    return bits.unpack_mask(selection.keep_largest(limit, x, bits.pack_mask(mask)), len(x))


@pytest.mark.parametrize("kind", ["normal", "ties", "mostly zero"])
@pytest.mark.parametrize("size", [1025, LARGE])
@pytest.mark.parametrize("limit", [1 / 40, 0.4])
def test_keep_largest_of_too_many(limit, size, kind):
    rng = np.random.default_rng(size)
    share = 0.995 if kind == "normal" else 0.5  # nearly all: the bracket then holds with and without the mask
    x, mask, limit = LARGE_CASES[kind](rng, size), rng.random(size) < share, int(limit * size)
    expected = numpy_top_k(np.where(mask, x, 0), limit)
    np.testing.assert_array_equal(keep_largest(limit, x, mask), expected)
    np.testing.assert_array_equal(keep_largest(limit, x, expected), expected)


def test_keep_largest_of_few_keeps_all(monkeypatch):
    x = np.arange(1, LARGE + 1, dtype=np.float32)
    mask = np.arange(LARGE) % 3 > 0
    np.testing.assert_array_equal(keep_largest(LARGE, x, mask), mask)
    monkeypatch.setattr(selection, "scatter_positions", lambda size, count, step: jnp.zeros(count, jnp.int32))
    got = jax.jit(lambda x: bits.unpack_mask(selection.keep_largest(300, x, bits.pack_mask(mask)), len(x)))(x)
    np.testing.assert_array_equal(got, numpy_top_k(np.where(mask, x, 0), 300))


def test_a_bracket_that_misses_falls_back_to_the_whole(monkeypatch):
    """With a sample that sees only small entries."""
    monkeypatch.setattr(selection, "scatter_positions", lambda size, count, step: jnp.zeros(count, jnp.int32))
    x = np.arange(1, LARGE + 1, dtype=np.float32)
    got = jax.jit(lambda x: bits.unpack_mask(selection.top_k_mask(x, 300), len(x)))(x)
    np.testing.assert_array_equal(got, numpy_top_k(x, 300))


def _largest_in_loops(jaxpr, inside=False):
    """Entries of the largest array that is made inside a loop of a jaxpr."""
    found = 0
    for eqn in jaxpr.eqns:
        loop = inside or eqn.primitive.name in ("while", "scan")
        if loop:
            found = max([found, *(v.aval.size for v in eqn.outvars if eqn.primitive.name not in ("while", "scan"))])
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")):
            if hasattr(sub, "jaxpr"):
                found = max(found, _largest_in_loops(sub.jaxpr, loop))
    return found


def test_the_sampled_search_does_not_loop_over_all_entries():
    jaxpr = jax.make_jaxpr(lambda x: selection.kth_magnitude(x, 2000))(jnp.zeros(LARGE)).jaxpr
    (choice,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    whole, few = choice.params["branches"]
    assert _largest_in_loops(whole.jaxpr) >= LARGE
    assert _largest_in_loops(few.jaxpr) < LARGE / 16
    assert (
        _largest_in_loops(jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn is not choice])) <= 2 * selection.SAMPLE
    )


@pytest.mark.parametrize("sizes", [[1], [32, 64], [90, 1, 33, 65], [5, 2000, 31]])
def test_group_sums_and_maxima_equal_numpy(sizes):
    rng = np.random.default_rng(sum(sizes))
    bucket = buckets.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]).buckets[0]
    leaves = [rng.integers(-9, 10, n).astype(np.float32) for n in sizes]
    flat = np.zeros(bucket.size, np.float32)
    for s, leaf in zip(bucket.segments, leaves, strict=True):
        flat[s.offset : s.offset + s.size] = leaf
    for groups, parts in (
        (grouping.leaf_groups(bucket), leaves),
        (grouping.whole_group(bucket), [np.concatenate(leaves)]),
        (grouping.block_groups(bucket, 32), [leaf[i : i + 32] for leaf in leaves for i in range(0, len(leaf), 32)]),
        (grouping.block_groups(bucket, 64), [leaf[i : i + 64] for leaf in leaves for i in range(0, len(leaf), 64)]),
    ):
        assert len(groups) == len(parts)
        sums, squares = groups.sums(jnp.asarray(flat), jnp.asarray(flat) ** 2)
        (maxima,) = groups.maxima(jnp.abs(flat))
        np.testing.assert_array_equal(sums, [p.sum() for p in parts])
        np.testing.assert_array_equal(squares, [(p**2).sum() for p in parts])
        np.testing.assert_array_equal(maxima, [np.abs(p).max() for p in parts])
        np.testing.assert_array_equal(groups.counts(), [len(p) for p in parts])
        spread = np.broadcast_to(groups.per_entry(jnp.arange(len(parts), dtype=jnp.float32)), bucket.size)
        owners = np.concatenate([np.full(len(p), i) for i, p in enumerate(parts)])
        valid = np.asarray(bits.unpack_mask(jnp.asarray(bucket.valid_words()), bucket.size))
        assert valid.sum() == sum(sizes)
        np.testing.assert_array_equal(spread[valid], owners)


def test_a_sampled_threshold_lets_the_wanted_share_pass():
    bucket = buckets.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in (150_000, 70_000, 10)]).buckets[0]
    groups = grouping.leaf_groups(bucket)
    rng = np.random.default_rng(0)
    x = rng.normal(size=bucket.size).astype(np.float32) * np.repeat(
        [1, 100, 1], [150_016, 70_016, bucket.size - 220_032]
    )
    samples = selection.sampled(jnp.asarray(x), groups, 4096, jnp.int32(3))
    assert samples.shape == (3, 4096)
    np.testing.assert_array_equal(samples[2, :10], x[220_032:220_042])  # a small group is taken whole
    assert not np.asarray(samples[2, 10:]).any()
    threshold = np.asarray(selection.quantile_threshold(samples, jnp.array([4096, 4096, 10]), 0.05))
    for g, (begin, size) in enumerate([(0, 150_000), (150_016, 70_000)]):
        share = (np.abs(x[begin : begin + size]) >= threshold[g]).mean()
        assert share == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / 4096) ** 0.5)
    assert threshold[2] == np.abs(x[220_032:220_042]).max()
