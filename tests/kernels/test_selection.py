"""Selection and group reductions against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gcjax
import gcjax.extend as gx
from gcjax._kernels import bits, floats, layout
from gcjax._kernels import groups as grouping
from gcjax._sparse import selection

LARGE = 200_003  # above 2 * SAMPLE, where the search begins with a sample


def numpy_top_k(x, k):
    """The k entries of largest magnitude, of equal ones the lowest index; nothing below the normal range."""
    place = np.arange(len(x))
    index = 32 * (place // 4096 * 128 + place % 128) + place // 128 % 32
    mask = np.zeros(len(x), bool)
    mask[np.lexsort((index, -np.abs(x)))[:k]] = True
    return mask & (np.abs(x) >= floats.TINY)


def flat(words, size):
    return bits.unpack_mask(words).reshape(-1)[:size]


@functools.partial(jax.jit, static_argnums=1)
def top_k_static(x, k):
    return flat(selection.top_k_mask(bits.to_blocks(x), k), len(x))


top_k_traced = jax.jit(lambda x, k: flat(selection.top_k_mask(bits.to_blocks(x), k), len(x)))


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
    return flat(selection.keep_largest(limit, bits.to_blocks(x), bits.pack_mask(bits.to_blocks(mask))), len(x))


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


def test_padding_that_a_method_selects_is_not_sent():
    every = gx.sparse_method(lambda a, step, bucket: gx.pack_mask(a >= 0), capacity=lambda bucket: bucket.size)
    tx, g = gx.compress(every), jnp.arange(1.0, 5001)  # with padding 8,192
    update, state = tx.update(g, tx.init(g))
    np.testing.assert_array_equal(update, g)
    assert gcjax.info(state).sent == 5000


def test_keep_largest_of_few_keeps_all(monkeypatch):
    x = np.arange(1, LARGE + 1, dtype=np.float32)
    mask = np.arange(LARGE) % 3 > 0
    np.testing.assert_array_equal(keep_largest(LARGE, x, mask), mask)
    monkeypatch.setattr(selection, "scatter_positions", lambda size, count, step: jnp.zeros(count, jnp.int32))
    got = jax.jit(lambda x: keep_largest.__wrapped__(300, x, mask))(x)  # traced anew
    np.testing.assert_array_equal(got, numpy_top_k(np.where(mask, x, 0), 300))


def test_a_bracket_that_misses_falls_back_to_the_whole(monkeypatch):
    """With a sample that sees only small entries."""
    monkeypatch.setattr(selection, "scatter_positions", lambda size, count, step: jnp.zeros(count, jnp.int32))
    x = np.arange(1, LARGE + 1, dtype=np.float32)
    got = jax.jit(lambda x: top_k_static.__wrapped__(x, 300))(x)  # traced anew
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
    jaxpr = jax.make_jaxpr(lambda x: selection.kth_magnitude(x, 2000))(jnp.zeros((49, 32, 128))).jaxpr
    choices = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    (choice,) = [eqn for eqn in choices if all(_largest_in_loops(b.jaxpr) for b in eqn.params["branches"])]
    whole, few = choice.params["branches"]
    assert _largest_in_loops(whole.jaxpr) >= LARGE
    assert _largest_in_loops(few.jaxpr) < LARGE / 16
    assert (
        _largest_in_loops(jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn is not choice])) <= 2 * selection.SAMPLE
    )


def word_of(size):
    """The mask word of each entry of a leaf, counted from the leaf's first."""
    entry = np.arange(size)
    return entry // 4096 * 128 + entry % 128 if size >= 32_768 else entry % -(-size // 32)


@pytest.mark.parametrize("sizes", [[1], [32, 64], [90, 1, 33, 65], [5, 2000, 31], [40, 33_000, 5000]])
def test_group_sums_and_maxima_equal_numpy(sizes):
    rng = np.random.default_rng(sum(sizes))
    (bucket,) = layout.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]).buckets
    leaves = [rng.integers(-9, 10, s.size).astype(np.float32) for s in bucket.segments]
    x = bucket.join(leaves)

    def seen(x, groups):
        spread = jnp.broadcast_to(groups.per_entry(jnp.arange(len(groups), dtype=jnp.float32)), bucket.shape)
        return *groups.sums(x, x**2), *groups.maxima(jnp.abs(x)), groups.counts(), bucket.split(spread)

    def in_runs(words):
        """The groups of every entry, as long as no group has more words than that."""
        runs = [word_of(len(leaf)) // words for leaf in leaves]
        ends = np.cumsum([-(-s.words // words) for s in bucket.segments])
        return [run + end - -(-s.words // words) for run, end, s in zip(runs, ends, bucket.segments, strict=True)]

    for groups, owners in (
        (grouping.leaf_groups(bucket), in_runs(1 << 20)),
        (grouping.whole_group(bucket), [np.zeros(len(leaf), int) for leaf in leaves]),
        (grouping.block_groups(bucket, 32), in_runs(1)),
        (grouping.block_groups(bucket, 96), in_runs(3)),
    ):
        owner, entries = np.concatenate(owners), np.concatenate(leaves)
        sums, squares, maxima, counts, spread = jax.jit(lambda x, of=groups: seen(x, of))(x)
        np.testing.assert_array_equal(sums, np.bincount(owner, entries, len(groups)))
        np.testing.assert_array_equal(squares, np.bincount(owner, entries**2, len(groups)))
        expected = np.zeros(len(groups))
        np.maximum.at(expected, owner, np.abs(entries))
        np.testing.assert_array_equal(maxima, expected)
        np.testing.assert_array_equal(counts, np.bincount(owner, minlength=len(groups)))
        jax.tree.map(np.testing.assert_array_equal, list(spread), owners)


def test_a_sampled_threshold_lets_the_wanted_share_pass():
    (bucket,) = layout.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in (150_000, 70_000, 10)]).buckets
    rng = np.random.default_rng(0)
    leaves = [
        scale * rng.normal(size=size).astype(np.float32) for size, scale in ((150_000, 1), (70_000, 100), (10, 1))
    ]
    samples = selection.sampled(bucket.join(leaves), bucket, 4096, jnp.int32(3))
    assert samples.shape == (3, 4096)
    np.testing.assert_array_equal(samples[2, :10], leaves[2])  # a small leaf is taken whole
    assert not np.asarray(samples[2, 10:]).any()
    thresholds = np.asarray(selection.quantile_threshold(samples, jnp.array([4096, 4096, 10]), 0.05))
    for leaf, threshold in zip(leaves[:2], thresholds, strict=False):
        share = (np.abs(leaf) >= threshold).mean()
        assert share == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / 4096) ** 0.5)
    assert thresholds[2] == np.abs(leaves[2]).max()
