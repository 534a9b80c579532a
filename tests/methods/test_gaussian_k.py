"""gaussian_k_compress: the threshold of the normal distribution and the rounds that adjust it."""

import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import gcjax
from gcjax._kernels import bits, layout
from gcjax.contrib import gaussian_k


@functools.partial(jax.jit, static_argnames="capacity")
def step(gradient, capacity):
    tx = gcjax.contrib.gaussian_k_compress(0.01, capacity=capacity)
    return tx.update(gradient, tx.init(gradient))


def once(gradient, capacity=64):
    """The first update of density 1/100."""
    update, state = step(gradient, capacity)
    return np.asarray(update), gcjax.info(state)


@jax.jit
def selected(x, threshold, k):
    mask = bits.unpack_mask(gaussian_k._adjusted_mask(bits.to_blocks(x), threshold, k))
    return mask.reshape(-1)[: len(x)]


SIZES = (5000, 33, 1)
BUCKET = layout.layout_of([jax.ShapeDtypeStruct((n,), jnp.float32) for n in SIZES]).buckets[0]


@jax.jit
def standard(leaves, quantile):
    x, threshold = gaussian_k._normal_threshold(BUCKET.join(leaves), BUCKET, quantile)
    return BUCKET.split(x)[0], threshold


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1000.0, 1.0), (-0.3, 0.5), (1e-32, 1e-33), (2e35, 1e36)])
def test_threshold_of_the_normal_distribution(density, mean, deviation):
    rng = np.random.default_rng(0)
    leaves = [(mean + deviation * rng.normal(size=n)).astype(np.float32) for n in SIZES]
    x, threshold = standard(leaves, statistics.NormalDist().inv_cdf(density / 2))
    everything = np.concatenate(leaves).astype(np.float64)
    expected = everything.mean() - scipy.stats.norm.ppf(density / 2) * everything.std()
    unit = np.abs(leaves[0][0]) / np.asarray(x[0])
    assert float(threshold) * float(unit) == pytest.approx(expected, rel=1e-5, abs=1e-5 * deviation)
    np.testing.assert_array_equal(x, np.abs(leaves[0] / unit))


@pytest.mark.parametrize(
    ("threshold", "chosen"),
    [
        (5.0, [8]),  # one passes: done
        (10.0, [8]),  # none pass 10, one passes 5
        (20.0, [8]),  # none pass 20 and 10, one passes 5
        (40.0, []),  # none pass 40, 20 and 10; 5 would be the fourth round
        (3.0, [8]),  # two pass 3, one passes 4.5
        (2.0, [8]),  # two pass 2 and 3, one passes 4.5
        (0.5, [8, 4, 2]),  # four pass 0.5 and 0.75, three pass 1.125
    ],
)
def test_rounds_by_hand(threshold, chosen):
    x = jnp.array([1.0, 8.0, 2.0, 4.0])
    assert sorted(np.asarray(x)[np.asarray(selected(x, threshold, 1))], reverse=True) == chosen


@pytest.mark.parametrize(("draw", "times"), [(jax.random.normal, 1), (jax.random.laplace, 6)])
def test_normal_entries_are_sent_at_the_density_and_laplace_entries_six_times_as_many(draw, times):
    info = once(draw(jax.random.key(0), (300_000,)), 4096)[1]
    assert info.selected / 3000 == pytest.approx(times, rel=5 / 3000**0.5 + (times - 1) / 50)


@pytest.mark.parametrize("power", [-100, 70])
def test_a_power_of_two_as_scale_changes_nothing(power):
    g = np.random.default_rng(3).normal(size=4000).astype(np.float32)
    update = once(g)[0]
    assert np.count_nonzero(update) > 20
    np.testing.assert_array_equal(once(np.ldexp(g, power))[0], np.ldexp(update, power))


def test_equal_entries_and_a_single_entry_are_sent():
    assert once(jnp.full(20, -3.0))[0].tolist() == [-3.0] * 20
    assert once(jnp.float32(2.0))[0] == 2.0
