"""`scale_first`: the compressor gets gradient and squares as if the scaled loss had been differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, compress_state, sample_gradients, tree_of
from selection import cases

import gcjax

SIZES = (300, 40)
PARAMS = tree_of([np.zeros(n, np.float32) for n in SIZES])


def leaves(worker):
    return jax.tree.map(jnp.asarray, tree_of(worker))


def run(tx, gradients, squares):
    """The updates of one worker, and its last state."""
    state, updates = tx.init(PARAMS), []
    step = jax.jit(lambda g, state, s: tx.update(g, state, PARAMS, sum_grad_squared=s))
    for g, s in zip(gradients, squares, strict=True):
        update, state = step(leaves(g[0]), state, leaves(s[0]))
        updates.append(update)
    return updates, state


@cases("factor", [2.0**-7, -(2.0**-40), 2.0**30], default=1)
def test_a_scaled_gradient_gives_the_scaled_update_to_the_bit(factor):
    gradients, squares = sample_gradients(1, SIZES, 6)  # many entries are zero: their squares must be scaled, too
    squares = [[[x + np.float32(0.25) for x in worker] for worker in step] for step in squares]
    compressor = gcjax.variance_compress(alpha=1.0)
    plain, _ = run(compressor, gradients, squares)
    scaled, _ = run(gcjax.scale_first(optax.scale(factor), compressor), gradients, squares)
    assert any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(factor * x, y), plain, scaled)


SCALINGS = {
    "global norm": optax.clip_by_global_norm(3.0),
    "entries": optax.clip(0.5),
    "leaves": optax.clip_by_block_rms(0.3),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_schedule(lambda count: 1.0 / (1 + count))),
    "sgd": optax.sgd(0.1),
}


@cases("name", SCALINGS, default=2)
def test_squares_are_scaled_by_the_factor_of_their_entry(name):
    gradients, squares = sample_gradients(1, SIZES, 4)
    scaling, compressor = SCALINGS[name], gcjax.variance_compress(alpha=1.0)
    state, scaled, scaled_squares = scaling.init(PARAMS), [], []
    for g, s in zip(gradients, squares, strict=True):
        after, state = scaling.update(leaves(g[0]), state)
        factors = [np.where(x != 0, y / np.where(x != 0, x, 1), 0) for x, y in zip(g[0], after.values(), strict=True)]
        scaled.append([[np.asarray(x) for x in after.values()]])
        scaled_squares.append([[x * f**2 for x, f in zip(s[0], factors, strict=True)]])  # zero for zeros, as given
    expected, by_hand = run(compressor, scaled, scaled_squares)
    updates, ours = run(gcjax.scale_first(scaling, compressor), gradients, squares)
    for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for got, want in zip(*(compress_state(s).buckets.value[0].accumulated for s in (ours, by_hand)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_each_worker_clips_by_its_own_norm():
    tx = gcjax.scale_first(optax.clip_by_global_norm(5.0), gcjax.variance_compress(axis_name="data"))
    gradients = {"x": np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)}
    squares = {"x": np.array([[1.0, 1.0], [100.0, 100.0]], np.float32)}
    runner = Runner(tx, {"x": np.zeros(2, np.float32)}, 2)
    np.testing.assert_array_equal(runner.step(gradients, squares)["x"][0], [4.0, 4.0])  # 3 becomes 4, a power of two
    assert gcjax.info(runner.state).sent.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_leaves_may_be_masked_and_squares_left_out():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    inner = gcjax.scale_first(optax.scale(0.5), gcjax.variance_compress())
    tx = optax.masked(inner, {"a": True, "b": False})
    grad = {"a": jnp.array([2.0, 4.0]), "b": jnp.ones(3)}

    def once(tx, **extra):
        return jax.jit(tx.update)(grad, tx.init(params), params, **extra)[0]

    assert once(tx, sum_grad_squared=jax.tree.map(jnp.square, grad))["b"].tolist() == [1.0] * 3
    chained = optax.chain(optax.scale(0.5), gcjax.variance_compress())
    jax.tree.map(np.testing.assert_array_equal, once(inner), once(chained))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), "keeps arrays in its state, at .*trace.*Put it after the compressor"),
        (optax.adam(1e-3), "keeps arrays in its state"),
        (optax.add_decayed_weights(0.25), r"turns a gradient of zero into 0.25, at \['a'\], as weight decay does"),
    ],
)
def test_what_does_not_scale_raises(scaling, message):
    tx = gcjax.scale_first(scaling, gcjax.variance_compress())
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, PARAMS)
