"""Squares are computed where a compressor reads them, and nowhere else; without them it warns."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from harness import mesh_of

import gcjax
import gcjax.flax

WORKERS = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype(np.float32)
PARAMS = {"a": jnp.ones((3, 2)), "b": jnp.full((2, 5), 0.5)}


def variance():
    return gcjax.variance_compress(axis_name="data", capacity=64)


def top_k():
    return gcjax.top_k_compress(0.5, axis_name="data")


def behind_momentum(compressor):
    return optax.chain(gcjax.local_transform(optax.trace(0.9), "data"), compressor)


def by_leaf(a, b):
    return optax.partition({"a": a, "b": b}, {"a": "a", "b": "b"})


READ = {  # chains with a compressor that reads squares, somewhere
    "alone": variance,
    "in a chain": lambda: behind_momentum(variance()),
    "scaled first": lambda: gcjax.scale_first(optax.clip(1.0), variance()),
    "of some leaves": lambda: by_leaf(top_k(), variance()),
    "with hyperparameters": lambda: optax.inject_hyperparams(
        gcjax.variance_compress, static_args=("axis_name", "capacity", "decay")
    )(alpha=0.5, axis_name="data", capacity=64),
}
IGNORED = {
    "top_k": top_k,
    "in a chain": lambda: behind_momentum(top_k()),
    "of all leaves": lambda: by_leaf(top_k(), gcjax.dense_compress(axis_name="data")),
}


def by_step(loss, tx, mesh, **options):
    """A step and its first state."""
    step = gcjax.make_train_step(loss, tx, mesh, checks=False, **options)
    return step, step.init(PARAMS)


def by_gradient(loss, tx, mesh, **options):
    fn = gcjax.compressed_value_and_grad(loss, tx, mesh, **options)
    return lambda state, batch: jax.jit(fn)(PARAMS, state, batch), fn.init(PARAMS)


def sizes_seen(make, tx, state_of=lambda state: state, **options):
    """How many samples the loss sees at once."""
    seen = set()

    def loss(params, x):
        seen.add(len(x))
        return jnp.mean((x @ params["a"] @ params["b"]) ** 2)

    run, state = make(loss, tx, mesh_of(WORKERS), **options)
    jax.eval_shape(run, state_of(state), X)
    return seen


@pytest.mark.parametrize("make", [by_step, by_gradient])
@pytest.mark.parametrize("case", READ)
def test_squares_are_computed_where_a_compressor_reads_them(make, case):
    assert 1 in sizes_seen(make, READ[case]())


@pytest.mark.parametrize("make", [by_step, by_gradient])
@pytest.mark.parametrize("case", IGNORED)
def test_no_squares_are_computed_where_no_compressor_reads_them(make, case):
    assert sizes_seen(make, IGNORED[case]()) == {len(X) // WORKERS}


@pytest.mark.parametrize("make", [by_step, by_gradient])
def test_moments_of_the_user_are_taken_as_they_are(make):
    assert 1 in sizes_seen(make, top_k(), moments=functools.partial(gcjax.value_and_moments, method="scan"))
    assert sizes_seen(make, top_k(), moments=None) == {len(X) // WORKERS}


def restored(state):
    fresh = jax.tree.map(np.asarray, state)
    back = serialization.from_bytes(fresh, serialization.to_bytes(state))
    return jax.device_put(back, jax.tree.map(lambda x: x.sharding, state))


def shapes(state):
    return jax.eval_shape(lambda state: state, state)


def resized(state):
    return gcjax.resize(gcjax.resize(state, mesh_of(2)), mesh_of(WORKERS))


@pytest.mark.parametrize("state_of", [restored, shapes, resized])
@pytest.mark.parametrize("make", [by_step, by_gradient])
def test_a_state_knows_after_a_journey_whether_squares_are_read(make, state_of):
    assert 1 in sizes_seen(make, behind_momentum(variance()), state_of)
    assert sizes_seen(make, behind_momentum(top_k()), state_of) == {len(X) // WORKERS}


def alone(tx):
    return tx.update(jnp.ones(4), tx.init(jnp.ones(4)))


def compiled(tx):
    return jax.jit(tx.update)(jnp.ones(4), tx.init(jnp.ones(4)))


def on_a_mesh(tx):
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh_of(WORKERS), moments=None)
    step(step.init(jnp.ones(3)), X)


def by_gradient_alone(tx):
    fn = gcjax.compressed_value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh_of(WORKERS), moments=None)
    jax.eval_shape(fn, jnp.ones(3), fn.init(jnp.ones(3)), X)


@pytest.mark.parametrize("run", [alone, compiled, on_a_mesh, by_gradient_alone])
def test_a_compressor_that_reads_squares_and_gets_none_warns_once_where_the_user_calls_it(run):
    axis = "data" if run in (on_a_mesh, by_gradient_alone) else None
    tx = optax.chain(gcjax.variance_compress(axis_name=axis, capacity=64), optax.scale(0.1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            run(tx)
    (warning,) = found
    assert issubclass(warning.category, gcjax.MissingSquaresWarning)
    lines, first = inspect.getsourcelines(run)
    assert warning.filename == __file__
    assert first <= warning.lineno < first + len(lines)
    for line in (r"gcjax.value_and_moments(loss_fn)", "sum_grad_squared=moments.sum_grad_squared", "leave out moments"):
        assert line in str(warning.message)


def test_without_squares_the_gradients_own_square_stands_for_them():
    tx, gradient = gcjax.variance_compress(alpha=1.5, capacity=64, decay=0.9), jnp.arange(1.0, 5.0)

    def run(**extra):
        state, step = tx.init(gradient), jax.jit(tx.update)
        for _ in range(2):  # nothing passes in the first
            updates, state = step(gradient, state, **extra)
        return updates

    with pytest.warns(gcjax.MissingSquaresWarning):
        found = run()
    np.testing.assert_array_equal(found, run(sum_grad_squared=gradient**2))
    assert (found != 0).all()


def test_rounds_of_local_steps_have_no_squares_to_miss():
    compressor = gcjax.variance_compress(axis_name="data", capacity=64)
    tx = optax.chain(optax.sgd(0.1), gcjax.gossip.local_sgd(2, compressor=compressor, axis_name="data"))
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh_of(WORKERS))
    step(step.init(jnp.ones(3)), X)  # warnings are errors here


ROWS = RNG.normal(size=(WORKERS * 16, 3, 3)).astype(np.float32)  # three positions: a loop makes the squares


def of_rows(params, x):
    return jnp.mean(jnp.sum(jnp.tanh(x @ params["a"] @ params["b"]) ** 2, axis=(1, 2)))


def accumulated_squares(make, moments, accumulate):
    """`v` of the compressor after one step: the squares that it was given, as nothing was sent before."""
    tx = gcjax.variance_compress(axis_name="data", alpha=1e6)
    options = {} if accumulate == 1 else {"accumulate": accumulate}
    run, state = make(of_rows, tx, mesh_of(WORKERS), moments=moments, **options)
    state = run(state, ROWS)[0 if make is by_step else 2]
    return [np.asarray(x) for x in jax.tree.leaves(getattr(state, "opt_state", state)) if x.ndim == 3][1]


@pytest.mark.parametrize(("make", "accumulate"), [(by_step, 1), (by_step, 2), (by_gradient, 1)])
def test_auto_takes_groups_and_a_given_function_what_it_says(make, accumulate):
    squares = functools.partial(accumulated_squares, make, accumulate=accumulate)
    auto, exact = squares("auto"), squares(gcjax.value_and_moments)
    np.testing.assert_array_equal(auto, squares(functools.partial(gcjax.value_and_moments, groups="auto")))
    assert np.abs(auto - exact).max() > 0.01 * exact.max()
    parts = ROWS.reshape(WORKERS, accumulate, -1, 3, 3)
    groups = {16: 8, 8: 4}[parts.shape[2]]

    def by_hand(x):
        return gcjax.value_and_moments(of_rows, groups=groups)(PARAMS, x)[1].sum_grad_squared

    found = jax.jit(jax.vmap(jax.vmap(by_hand)))(parts)
    for worker in range(WORKERS):
        wanted = np.concatenate([np.ravel(found[leaf][worker].sum(0)) for leaf in "ab"]) / accumulate**2
        np.testing.assert_allclose(np.sort(auto[worker][auto[worker] != 0]), np.sort(wanted), rtol=1e-5)
