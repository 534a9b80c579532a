"""onebit_compress: both stages and words by hand, the columns of a vector, many workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner, residuals

import gcjax
from gcjax._comm.collectives import SingleWorker
from gcjax.methods import onebit


def one_step(leaf):
    """The update and the residual of a single worker."""
    g = jnp.asarray(leaf, jnp.float32)
    tx = gcjax.onebit_compress()
    update, state = jax.jit(tx.update)(g, tx.init(g))
    (bucket,) = state.buckets.value
    (residual,) = bucket.bucket.split(bucket.residual)
    return np.asarray(update), np.asarray(residual)


def test_two_workers_and_two_steps_by_hand():
    """Worker 0 owns the first column, worker 1 the second."""
    g = np.array([[[4, -1], [2, -3]], [[2, 5], [6, -1]]], np.float32)
    runner = Runner(gcjax.onebit_compress(axis_name="data"), {"a": g[0]}, 2)
    update = runner.step({"a": g})["a"]
    # Column 0: the mean of (4, 2) from worker 0 and (4, 4) for (2, 6) from worker 1 is (4, 3), sent as (3.5, 3.5).
    # Column 1: the mean of (-2, -2) for (-1, -3) from worker 0 and (5, -1) from worker 1 is (1.5, -1.5).
    assert update[0].tolist() == update[1].tolist() == [[3.5, 1.5], [3.5, -1.5]]
    first, second = residuals(runner.state, 2, [4])
    assert first[0].tolist() == [1.0, 1.0, -1.0, -1.0]  # column 0: twice the error of the mean
    assert second[0].tolist() == [-2.0, 0.0, 2.0, 0.0]
    update = runner.step({"a": np.zeros((2, 2, 2), np.float32)})["a"]
    assert update[0].tolist() == update[1].tolist() == [[-0.5, 0.5], [0.5, -0.5]]
    assert not np.any(residuals(runner.state, 2, [4]))


def test_words_by_hand():
    columns = np.ones((34, 2), np.float32)
    columns[[1, 33], 0] = [-2.0, -4.0]
    columns[2, 0] = 33.0
    matrix = onebit._Matrix(np.array([34, 34]), False, SingleWorker())
    words, means = matrix.encode(jnp.asarray(columns), matrix.heights)
    assert words.tolist() == [[0b10, 0], [0b10, 0]]
    assert means.tolist() == [[2.0, 1.0], [-3.0, 0.0]]  # (31 + 33) / 32 and -6 / 2; zero without negative entries
    decoded = matrix.decode(onebit._code(words, means))
    assert decoded.tolist() == np.where(columns < 0, -3.0, [2.0, 1.0]).tolist()


@pytest.mark.parametrize("shape", [(1000,), (1, 1000), (1000, 1)])
def test_a_vector_is_divided_into_columns_of_512(shape):
    g = np.where(np.arange(1000) < 512, 100.0, 1.0) * np.where(np.arange(1000) % 3, 1, -1)
    g[-1] = 489.0  # the second column has 163 negative and 325 other entries; the padding does not count
    expected = np.where(g < 0, np.where(np.arange(1000) < 512, -100.0, -1.0), np.where(np.arange(1000) < 512, 100.0, 1))
    expected[512:][g[512:] > 0] = 1 + 488 / np.count_nonzero(g[512:] > 0)
    np.testing.assert_allclose(one_step(g.reshape(shape))[0].ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_workers_are_added_in_a_loop(transposed):
    workers, rank, rows = 20, 3, 32
    comm = SingleWorker()
    comm.size, comm.rank = workers, lambda: jnp.int32(rank)
    matrix = onebit._Matrix(np.full(30, rows), transposed, comm)
    shape = (40, rows) if transposed else (rows, 40)
    blocks = np.random.default_rng(0).normal(size=(workers, *shape)).astype(np.float32)

    @jax.jit
    def run(blocks):
        shares = jax.vmap(lambda block: matrix.shares(*matrix.encode(block, matrix.heights)))(blocks)
        codes = jax.vmap(matrix.unshare)(shares)
        return matrix.add_to_owned(blocks[0], shares[:, rank]), jax.vmap(matrix.decode)(codes)

    total, decoded = run(blocks)
    np.testing.assert_array_equal(np.sign(decoded), np.sign(blocks))
    expected = blocks[0].copy()
    mine = (slice(2 * rank, 2 * rank + 2), slice(None))[:: 1 if transposed else -1]
    expected[mine] += np.sum(decoded, axis=0)[mine]
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
