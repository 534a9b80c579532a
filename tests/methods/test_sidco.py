"""sidco_compress: exponential fits in stages, exact for Laplace entries."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from oracle import TINY, SparseOracle
from rows import Row

import gcjax
from gcjax._kernels import bits, layout
from gcjax.methods import sidco


def expected_entries(a, density, stages):
    """Positions of the entries sent: each stage fits the magnitudes above the previous threshold."""
    magnitudes = np.abs(a).astype(np.float64)
    ratios = [density]
    if stages > 1 and density < 0.25:
        ratios = [0.25] + [(density / 0.25) ** (1 / (stages - 1))] * (stages - 1)
    threshold = 0.0
    for ratio in ratios:
        beyond = [m - threshold for m in magnitudes if m >= threshold]
        threshold = min(threshold - math.log(ratio) * sum(beyond) / len(beyond), max(magnitudes))
    return [i for i, m in enumerate(magnitudes) if m >= threshold and m >= TINY]


CAPACITIES = (64, 96, 128)  # 3/4, 5/4 and 2 times 59 of the 854 entries in multiples of 32


def row(stages, density):
    def make(axis_name=None, **more):
        return gcjax.sidco_compress(density, stages=stages, axis_name=axis_name, **({"transport": "all_gather"} | more))

    def make_oracle(workers, sizes):
        return SparseOracle(workers, sizes, lambda a, step: expected_entries(a, density, stages), max(CAPACITIES))

    return Row(f"sidco-{stages}", "sidco_compress", make, make_oracle, conserves=True, capacities=CAPACITIES)


ROWS = [row(3, density=0.07)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.sidco_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"sidco_compress": chain}

N = 400_000


@functools.partial(jax.jit, static_argnames="density")
def update(gradient, density):
    tx = gcjax.sidco_compress(density, capacity=256)
    return tx.update(gradient, tx.init(gradient))[0]


@jax.jit
def selected(x, ratios):
    bucket = layout.layout_of(x).buckets[0]
    return bucket.split(bits.unpack_mask(sidco._above(bucket.join([x]), bucket, ratios)))[0]


def share(x, density, stages):
    """Selected entries relative to the wanted count."""
    return np.mean(selected(x.astype(np.float32), sidco._ratios(density, stages))) / density


def test_stages_by_hand():
    x = np.array([1, -2, 3, -4, 5, 0, 12, -13], np.float32)  # mean magnitude 5

    def chosen(density, stages):
        return x[np.asarray(selected(x, sidco._ratios(density, stages)))].tolist()

    # One stage at 1/10: 5 ln 10 = 11.51.
    assert chosen(0.1, 1) == [12, -13]
    # Two stages, 1/4 and 2/5: 5 ln 4 = 6.93; 12 and 13 exceed it by 5.57 on average; 6.93 + 5.57 ln 2.5 = 12.03.
    assert chosen(0.1, 2) == [-13]
    # Two stages, 1/4 and 4/5: 6.93 + 5.57 ln 1.25 = 8.17.
    assert chosen(0.2, 2) == [12, -13]
    # One stage only at a density of 1/4 or more: 5 ln 2 = 3.47.
    assert chosen(0.5, 3) == [-4, 5, 12, -13]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("density", [0.2, 0.01])
def test_laplace_entries_are_sent_at_the_density(density, stages):
    x = np.random.default_rng(0).laplace(size=N)
    threshold = scipy.stats.expon.isf(density)
    assert (np.abs(x) >= threshold).mean() == pytest.approx(density, rel=0.05)
    # A stage's mean is over at least 10,000 entries, so its error is 1 %; log(1 / ratio) is at most 4.6.
    assert share(x, density, stages) == pytest.approx(1, abs=0.1)


def test_three_stages_come_near_the_density_and_one_does_not():
    rng = np.random.default_rng(1)
    for x in (rng.normal(size=N), rng.standard_t(5, N), rng.standard_t(3, N)):
        for density in (0.01, 0.001):
            assert 0.6 < share(x, density, 3) < 1.3
    assert share(rng.normal(size=N), 0.001, 1) < 0.01
    assert share(rng.standard_t(3, N), 0.001, 1) > 3


def test_equal_entries_and_a_single_entry_are_sent():
    assert update(jnp.full(20, -3.0), 0.01).tolist() == [-3.0] * 20
    assert update(jnp.full((), 2.0), 0.01) == 2
    assert not selected(np.zeros(40, np.float32), sidco._ratios(0.01, 3)).any()


def test_padding_between_leaves_does_not_count():
    values = np.random.default_rng(2).laplace(size=(20, 33)).astype(np.float32)  # half of it padding
    apart = np.concatenate(update(list(values), 0.05))
    chosen = np.asarray(selected(values.ravel(), sidco._ratios(0.05, 3)))
    assert chosen.sum() > 20
    np.testing.assert_array_equal(apart, np.where(chosen, values.ravel(), 0))


@pytest.mark.parametrize("power", [-100, 120])
def test_a_power_of_two_as_scale_changes_nothing(power):
    x, ratios = np.random.default_rng(3).normal(size=4000).astype(np.float32), sidco._ratios(0.01, 3)
    assert selected(x, ratios).sum() > 20
    np.testing.assert_array_equal(selected(np.ldexp(x, power), ratios), selected(x, ratios))


def test_density_one_sends_all_but_zeros():
    x = np.array([1e-30, 0.0, -5.0, 3e38, -3e38], np.float32)
    np.testing.assert_array_equal(selected(x, sidco._ratios(1.0, 3)), x != 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 0.1, "stages": 0}, ValueError, "stages must be at least 1, got 0"),
        ({"density": 0.1, "stages": 2.0}, TypeError, "stages must be an int, got 2.0"),
        ({"density": 0.1, "capacity": ()}, ValueError, "at least one size"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.sidco_compress(**options)
