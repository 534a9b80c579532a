"""sketch_compress: collisions and estimates as stated, entries that are no candidates, momentum by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner
from rows.sketch import KEY

import gcjax
from gcjax.contrib import sketch

SIZE, WIDTH = 100, 16  # six whole stretches and a ragged end


def over_keys(function, times):
    """function(hashes of one row) for many keys, stacked."""

    def one(key):
        return function(sketch._draw(key, 1, WIDTH, SIZE))

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, times)))


def test_entries_collide_as_often_as_stated():
    times = 8000
    apart, near = [(0, 16), (0, 17), (15, 16), (3, 99), (40, 95), (64, 96)], [(0, 1), (16, 31), (96, 99)]

    def cells_of(entry, hashes):
        return sketch._sketch(jnp.zeros(SIZE).at[entry].set(1), hashes, WIDTH)[0]

    def products(hashes):  # the product of the signs in a common cell, or 0
        return jnp.stack([jnp.dot(cells_of(i, hashes), cells_of(j, hashes)) for i, j in apart + near])

    collisions = over_keys(products, times)
    assert set(np.unique(collisions)) == {-1, 0, 1}
    rate, far = 1 / WIDTH, collisions[:, : len(apart)]
    np.testing.assert_allclose((far != 0).mean(axis=0), rate, atol=5 * (rate * (1 - rate) / times) ** 0.5)
    np.testing.assert_allclose(far.mean(axis=0), 0, atol=5 * (rate / times) ** 0.5)
    assert (collisions[:, len(apart) :] == 0).all()


def test_estimates_of_a_row_are_unbiased_and_vary_as_stated():
    times = 8000
    v = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    v[40] = 5
    estimates = over_keys(
        lambda hashes: sketch._estimate(sketch._sketch(jnp.asarray(v), hashes, WIDTH), hashes, SIZE), times
    )
    stretch = np.arange(SIZE) // WIDTH
    others = np.array([np.sum(np.square(v[stretch != stretch[i]])) for i in range(SIZE)])
    variance = others / WIDTH
    np.testing.assert_allclose(estimates.mean(axis=0), v, atol=5 * (variance.max() / times) ** 0.5)
    squares = (estimates - v) ** 2
    np.testing.assert_array_less(np.abs(squares.mean(axis=0) - variance), 5 * squares.std(axis=0) / times**0.5)
    assert (variance < np.sum(np.square(v)) / WIDTH).all()


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 9])
def test_the_median_equals_numpys(rows):
    x = np.random.default_rng(rows).integers(-9, 9, (rows, 200)).astype(np.float32)
    np.testing.assert_array_equal(sketch._median(list(x)), np.median(x, axis=0))


def test_sending_resets_momentum_and_sum_on_every_worker():
    # One entry per step. Worker 1 alone would send its second entry; the first one is the largest of the mean.
    tx = gcjax.contrib.sketch_compress(0.25, key=KEY, momentum=0.5, axis_name="data")
    runner = Runner(tx, {"a": np.zeros(4, np.float32)}, 2)
    g = {"a": np.array([[8, 4, 0, 0], [4, -6, 0, 1]], np.float32)}
    assert runner.step(g)["a"][0].tolist() == [6, 0, 0, 0]
    # Both are reset in the first entry, where u = v = g. In the others u = 1.5 g and v = 2.5 g.
    assert runner.step(g)["a"][0].tolist() == [6, 0, 0, 0]
    # In the others v = 4.25 g, after 1.75 g more.
    assert runner.step({"a": g["a"] * [1 / 64, 1, 1, 1]})["a"][0].tolist() == [0, -4.25, 0, 0]


def test_padding_between_leaves_is_no_candidate():
    params = {f"x{i}": np.zeros((), np.float32) for i in range(64)}  # a word for each
    g = {name: jnp.float32(1 + i) for i, name in enumerate(params)}
    tx = gcjax.contrib.sketch_compress(0.0625, columns=8, key=KEY, momentum=0)
    _, state = jax.jit(tx.update)(g, tx.init(params))
    assert gcjax.info(state).sent == 4


@pytest.mark.parametrize("columns", [None, 5000])  # of a block of 4,096
def test_zeros_are_not_sent(columns):
    g = jnp.where(jnp.arange(50) % 7 == 3, jnp.arange(50.0), 0).at[2].set(-1e-38)  # XLA flushes this to zero
    tx = gcjax.contrib.sketch_compress(1.0, columns=columns, key=KEY)
    update, state = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_array_equal(update, g.at[2].set(0))
    assert gcjax.info(state).sent == 7
