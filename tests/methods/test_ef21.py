"""ef21_compress: it contracts, h is the mean of the h_i, and it converges linearly at a constant rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, compress_state, draws
from optimum import distance_after_training
from oracle import F, largest, split
from rows import Row

import gcjax

DENSITY = 0.05


class EF21Oracle:
    def __init__(self, workers, sizes):
        self.sizes, self.k = sizes, max(1, int(DENSITY * sum(sizes)))
        self.known = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.mean = np.zeros(sum(sizes), F)

    def step(self, gradients, squares):
        del squares
        total, counts = np.zeros(sum(self.sizes), F), []
        for leaves, known in zip(gradients, self.known, strict=True):
            change = np.concatenate([np.ravel(leaf) for leaf in leaves]) - known
            chosen = largest(np.abs(change), self.k)
            for i in sorted(chosen):
                known[i] += change[i]
                total[i] += change[i] / F(len(gradients))
            counts.append((len(chosen), len(chosen), 0, 0))
        self.mean = self.mean + total
        return split(self.mean, self.sizes), counts


def make(axis_name=None, **more):
    return gcjax.ef21_compress(DENSITY, axis_name=axis_name, **more)


ROWS = [Row("ef21", "ef21_compress", make, EF21Oracle)]


def chain(axis_name, learning_rate):
    return optax.chain(
        gcjax.local_transform(optax.ema(0.9), axis_name),
        gcjax.ef21_compress(0.2, axis_name=axis_name),
        optax.sgd(learning_rate),
    )


CHAINS = {"ef21_compress": chain}


def test_two_workers_by_hand():
    # Each worker sends one entry per step.
    runner = Runner(gcjax.ef21_compress(0.25, axis_name="data"), {"a": np.zeros(4, np.float32)}, 2)

    def step(first, second):
        return runner.step({"a": np.array([first, second], np.float32)})["a"][0].tolist()

    assert step([4, 1, 0, 0], [0, 2, 0, -6]) == [2, 0, 0, -3]
    assert step([4, 1, 0, 0], [0, 2, 0, -6]) == [2, 1.5, 0, -3]  # the second entries, 1 and 2
    assert step([1, 1, 0, 0], [0, 2, 0, 2]) == [0.5, 1.5, 0, 1]  # the changes -3 and 8
    assert step([1, 1, 0, 0], [0, 2, 0, 2]) == [0.5, 1.5, 0, 1]  # no change, so nothing is sent
    assert gcjax.info(runner.state).sent.tolist() == [0, 0]


def test_the_error_of_a_constant_gradient_contracts():
    d, k = 200, 14
    g = np.random.default_rng(0).normal(size=d).astype(np.float32)
    unknown = np.sum(np.square(g - draws(gcjax.ef21_compress(k / d), g, 8)), axis=1)
    assert unknown[0] <= (1 - k / d) * np.sum(np.square(g))
    assert (unknown[1:] <= (1 - k / d) * unknown[:-1]).all()
    assert unknown[-1] > 0


@pytest.mark.full
def test_it_converges_linearly_where_a_residual_stalls():
    def distance(compressor, steps):
        return distance_after_training(optax.chain(compressor, optax.sgd(0.05)), steps)

    ef21 = gcjax.ef21_compress(0.1, axis_name="data")
    at = [distance(ef21, steps) for steps in (50, 100, 150)]
    assert at[0] < 0.2
    assert at[1] < at[0] / 5
    assert at[2] < at[1] / 5
    assert distance(gcjax.top_k_compress(0.1, axis_name="data"), 150) > 20 * at[2]


def test_h_stays_the_mean_of_the_workers_h():
    rng = np.random.default_rng(1)
    params = {"a": np.zeros((7, 9), jnp.bfloat16), "b": np.zeros(50, np.float32)}
    runner = Runner(gcjax.ef21_compress(0.1, axis_name="data"), params, 4)
    for _ in range(50):
        gradients = {name: rng.normal(size=(4, *x.shape)).astype(x.dtype) for name, x in params.items()}
        update = runner.step(gradients)
    (bucket,) = compress_state(runner.state).buckets.value
    known = np.asarray(bucket.known).reshape(4, -1).mean(axis=0, dtype=np.float64)
    assert np.abs(known).max() > 1
    for name, of_leaf in zip(params, bucket.bucket.split(known), strict=True):
        h = np.asarray(runner.state.mean[name])
        np.testing.assert_allclose(h, np.ravel(of_leaf), atol=2e-6)
        np.testing.assert_array_equal(update[name][0].ravel(), h.astype(params[name].dtype))


def test_density_one_is_the_dense_mean():
    g = np.random.default_rng(2).integers(-8, 9, (4, 40)).astype(np.float32)
    runner = Runner(gcjax.ef21_compress(1.0, axis_name="data"), {"a": np.zeros(40, np.float32)}, 4)
    for factor in (1, 3, -2):
        np.testing.assert_array_equal(runner.step({"a": factor * g})["a"][0], factor * g.mean(axis=0))


def test_nothing_waits():
    tx = gcjax.ef21_compress(0.25)
    update = jax.jit(tx.update)
    _, state = update(jnp.arange(8.0), tx.init(jnp.zeros(8)))
    assert gcjax.info(state).residual_norm == 0
    h, _ = update(jnp.zeros(8), state)  # 6 and 7 are sent again as changes, 1 to 5 were never sent
    np.testing.assert_array_equal(h, jnp.zeros(8))


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, float("nan")])
def test_a_bad_density_raises(density):
    with pytest.raises(ValueError, match=rf"density must be in \(0, 1\], got {density}"):
        gcjax.ef21_compress(density)


def test_specs_replicate_h_and_nothing_else():
    state = gcjax.ef21_compress(0.5, axis_name="data").init({"a": jnp.zeros((2, 3))})
    specs = gcjax.state_specs(state)
    assert specs.mean == {"a": jax.sharding.PartitionSpec()}
    assert specs.changes.buckets == jax.sharding.PartitionSpec(("data",))
