"""Mistakes that run and train worse: counted by every update, shown by info, raised by check_training."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax

WORKERS = 4
PARAMS = {"a": np.zeros((30, 20), np.float32), "b": np.zeros(7, np.float32), "c": np.zeros((), np.float32)}
METHODS = {
    "top_k": lambda axis: gcjax.top_k_compress(0.1, transport="all_gather", axis_name=axis),
    "variance": lambda axis: gcjax.variance_compress(axis_name=axis),
    "qsgd": lambda axis: gcjax.qsgd_compress(4, key=jax.random.key(0), axis_name=axis),
}


def gradients(seed=0, equal=False):
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(size=(WORKERS, *x.shape)).astype(np.float32) for name, x in PARAMS.items()}
    return {name: np.repeat(x[:1], WORKERS, 0) for name, x in drawn.items()} if equal else drawn


@functools.cache
def compiled(method, mode):
    return Runner(METHODS[method]("data"), PARAMS, WORKERS, mode)


def runner_of(method, mode="shard_map", steps=0, **options):
    """A runner after some steps; the compiled step is shared by all tests."""
    runner = compiled(method, mode).restart()
    for seed in range(steps):
        runner.step(gradients(seed, **options))
    return runner


@cases(
    ("method", "mode"),
    itertools.product(("top_k", "variance", "qsgd"), ("pmap", "unchecked shard_map")),
    default=lambda method, mode: method != "qsgd" and mode == "pmap",
)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_equal_gradients_are_counted(method, mode):
    runner = runner_of(method, mode, 3, equal=True)
    assert gcjax.info(runner.state).identical == 3
    with pytest.raises(ValueError, match=r"in 3 updates all workers had the same gradient.*leave out lax\.pmean"):
        gcjax.check_training(runner.state)


def different():
    """Gradients that are equal but for one worker."""
    g = gradients(equal=True)
    g["a"][2] = gradients(1)["a"][2]
    return g


@pytest.mark.parametrize(
    ("method", "mode", "draw"),
    [
        ("top_k", "pmap", gradients),
        ("top_k", "shard_map", gradients),
        ("top_k", "shard_map", different),
        ("variance", "shard_map", lambda: jax.tree.map(np.zeros_like, gradients())),
    ],
    ids=["local, pmap", "local", "one of its own", "zeros"],
)
def test_gradients_that_are_not_equal_or_zero_are_not_counted(method, mode, draw):
    runner, g = runner_of(method, mode), draw()
    runner.step(g, g if method == "variance" else None)
    assert gcjax.info(runner.state).identical == 0
    gcjax.check_training(runner.state)


def step_without_axis(grads):
    tx = METHODS["top_k"](None)
    return tx.update(grads, tx.init(PARAMS))[0]


def test_pmap_without_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"no axis_name was given, but update runs on the devices of \{'data': 4\}"):
        jax.pmap(step_without_axis, axis_name="data", devices=jax.devices()[:WORKERS])(gradients())
    with pytest.raises(ValueError, match="no axis_name was given"):
        jax.pmap(step_without_axis, devices=jax.devices()[:WORKERS])(gradients())


def test_unchecked_shard_map_without_the_axis_is_refused():
    def over(check_vma):
        specs = {"in_specs": P("data"), "out_specs": P("data")}
        run = jax.shard_map(
            lambda g: jax.tree.map(lambda x: x[None], step_without_axis(jax.tree.map(lambda x: x[0], g))),
            mesh=mesh_of(WORKERS),
            check_vma=check_vma,
            **specs,
        )
        return jax.jit(run)(gradients())

    with pytest.raises(ValueError, match="the parameters would drift apart"):
        over(check_vma=False)
    over(check_vma=True)  # each worker by itself, on purpose


def test_one_device_needs_no_axis():
    one = jax.tree.map(lambda x: x[:1], gradients())
    jax.pmap(step_without_axis, devices=jax.devices()[:1])(one)


def test_state_of_one_worker_given_to_all_is_counted():
    """What jax.pmap(out_axes=None) returns works on, but a checkpoint of it keeps one worker's state."""
    tx = METHODS["top_k"]("data")
    step = jax.pmap(
        lambda state, g: tx.update(g, state),
        axis_name="data",
        in_axes=(None, 0),
        out_axes=(0, None),
        devices=jax.devices()[:WORKERS],
    )
    _, state = step(tx.init(PARAMS), gradients())
    with pytest.raises(ValueError, match="its arrays claim to be equal on all devices"):
        gcjax.check_training(state)
    state = jax.device_get(state)
    for seed in range(2):
        state = jax.device_get(step(state, gradients(seed))[1])
    assert gcjax.info(state).misplaced == 2
    with pytest.raises(ValueError, match=r"in 2 updates some worker had the state of another.*out_axes=0"):
        gcjax.check_training(state)


def test_state_that_claims_to_be_replicated_is_refused():
    tx, mesh = METHODS["top_k"]("data"), mesh_of(WORKERS)

    def step(state, g):
        return tx.update(jax.tree.map(lambda x: x[0], g), state)[1]

    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    state = jax.jit(run)(tx.init(PARAMS), gradients())
    with pytest.raises(ValueError, match=r"per worker along \('data',\), but its arrays claim to be equal"):
        gcjax.info(state)


def with_squares(runner, steps):
    """The state after some steps with the squares of the gradients."""
    for seed in range(steps):
        g = gradients(seed % 3)
        runner.step(g, jax.tree.map(np.square, g))
    return runner.state


def test_a_gradient_scaled_without_its_squares_is_named():
    tx = optax.chain(optax.scale(0.1), METHODS["variance"]("data"))
    scaled = with_squares(Runner(tx, PARAMS, WORKERS), 150)
    assert gcjax.info(scaled).squares_ratio < 0.02
    with pytest.raises(ValueError, match=r"times too large: something before the compressor.*gcjax\.scale_first"):
        gcjax.check_training(scaled)


def test_squares_that_fit_are_not():
    scaled = gcjax.scale_first(optax.scale(0.1), METHODS["variance"]("data"))
    for runner in (runner_of("variance"), Runner(scaled, PARAMS, WORKERS)):
        state = with_squares(runner, 20)
        np.testing.assert_allclose(gcjax.info(state).squares_ratio, 1, rtol=1e-5)
        gcjax.check_training(state)


def test_a_method_without_squares_has_no_ratio():
    runner = runner_of("top_k")
    runner.step(gradients(), jax.tree.map(lambda x: 100 + 0 * x, gradients()))
    np.testing.assert_array_equal(gcjax.info(runner.state).squares_ratio, 1)


def test_a_step_that_is_not_finite_spoils_no_symptom():
    runner, bad = runner_of("variance"), gradients(1)
    with_squares(runner, 1)
    bad["a"][:] = np.nan
    runner.step(bad, bad)
    found = gcjax.info(runner.state)
    assert (found.identical, found.misplaced, found.skipped) == (0, 0, 1)
    assert np.isfinite(found.squares_ratio).all()


def test_symptoms_cost_one_collective_of_five_words():
    runner = Runner(gcjax.dense_compress(axis_name="data"), PARAMS, WORKERS)
    text = runner.compiled_text(gradients())
    assert "s32[5]" in text


def test_a_training_step_checks_after_a_hundred():
    def make_step(**options):
        tx = optax.chain(METHODS["top_k"]("data"), optax.sgd(0.1))
        return gcjax.make_train_step(
            lambda params, x: jnp.mean((x - params) ** 2), tx, mesh_of(WORKERS), moments=None, **options
        )

    def train(step, batch):
        state = step.init(jnp.zeros(40))
        for _ in range(101):
            state, _ = step(state, batch)

    step = make_step()
    same, own = np.ones((WORKERS, 40), np.float32), np.arange(WORKERS * 40, dtype=np.float32).reshape(WORKERS, 40)
    with pytest.raises(ValueError, match="in 100 updates all workers had the same gradient"):
        train(step, same)
    train(step, own)
    train(make_step(checks=False), same)


def residual_ratios(tx, gradient, marks):
    state, found = tx.init(gradient), []
    update = jax.jit(tx.update)
    for step in range(1, max(marks) + 1):
        _, state = update(gradient, state)
        if step in marks:
            found.append(float(gcjax.info(state, gradient).residual_ratio[0]))
    return found


def test_a_residual_that_grows_for_ever_shows_beside_the_gradient():
    gradient = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(20, 30)), jnp.bfloat16), "b": jnp.full(3, 1e-3)}
    grows = residual_ratios(gcjax.contrib.strom_compress(threshold=0.01), gradient, [10, 40])
    np.testing.assert_allclose(grows, [10, 40], rtol=0.05)
    settles = residual_ratios(gcjax.top_k_compress(0.5), gradient, [10, 40])
    assert max(settles) < 2


def test_the_ratio_takes_a_gradient_or_its_norm_and_is_printed():
    tx, gradient = gcjax.top_k_compress(0.5), {"w": jnp.array([3e30, 4e30, 0, 0])}
    state = jax.jit(tx.update)({"w": jnp.array([1.0, 3, -4, 5])}, tx.init(gradient))[1]
    left = gcjax.info(state).residual_norm
    assert left == pytest.approx(10**0.5)
    np.testing.assert_allclose(gcjax.info(state, gradient).residual_ratio, left / 5e30, rtol=1e-6)
    np.testing.assert_allclose(
        gcjax.info(state, optax.tree.norm({"w": jnp.array([3.0, 4.0])})).residual_ratio, left / 5
    )
    assert ", 0.632 times the gradient's\n" in str(gcjax.info(state, 5.0))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])  # on which the parameters of a training step lie
    placed = jax.device_put(jnp.array([3.0, 4.0]), jax.NamedSharding(mesh, P()))
    np.testing.assert_allclose(gcjax.info(state, placed).residual_ratio, left / 5)
    assert np.isnan(gcjax.info(state).residual_ratio).all()
    assert "times" not in str(gcjax.info(state))
    assert np.isinf(gcjax.info(state, jnp.zeros(4)).residual_ratio).all()
    with pytest.raises(TypeError, match=r"cannot run inside jax\.jit"):
        jax.jit(lambda g: gcjax.info(state, g).sent)(gradient)


@pytest.mark.parametrize("method", ["top_k", "variance"])
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_entries_that_only_follow_a_penalty_stop_no_training(method):
    def loss_fn(table, batch):
        return jnp.mean((table[batch["row"]].sum(1) - batch["y"]) ** 2) + 1e-3 * jnp.sum(table**2)

    step = gcjax.make_train_step(
        loss_fn, optax.chain(METHODS[method]("data"), optax.sgd(0.1)), mesh_of(2), moments=None
    )
    state, rng = step.init(jnp.ones((40, 4))), np.random.default_rng(0)
    for _ in range(102):
        state, _ = step(state, {"row": rng.integers(10, size=8), "y": rng.normal(size=8).astype(np.float32)})
    assert gcjax.info(state.opt_state).identical > 3


def make_regression():
    """A step that converges on one batch, which leaves its gradients noise, its state and the batch."""
    x = jax.random.normal(jax.random.key(0), (64, 4))
    y = x @ jnp.arange(4.0) + jax.random.normal(jax.random.key(1), (64,))
    tx = optax.chain(gcjax.variance_compress(1e-3, capacity=1.0, axis_name="data"), optax.sgd(0.4))
    step = gcjax.make_train_step(lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2), tx, mesh_of(1))
    state = step.init(jnp.zeros(4))
    return step, state, x, y


def test_a_batch_that_is_always_the_same_may_converge():
    step, state, x, y = make_regression()
    for _ in range(102):
        state, _ = step(state, (x, y))
    assert gcjax.info(state.opt_state).squares_ratio < 0.05


def test_a_training_step_finds_clipping_before_the_compressor():
    tx = optax.chain(optax.clip_by_global_norm(1e-3), METHODS["variance"]("data"), optax.sgd(0.1))
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), tx, mesh_of(2))
    state, batch = step.init(jnp.zeros(4)), jax.random.normal(jax.random.key(0), (16, 4))
    for i in range(100):
        state, _ = step(state, jnp.roll(batch, i, axis=0))
    with pytest.raises(ValueError, match=r"squares of the gradients are .* times too large.*scale_first"):
        step(state, batch)


def test_squares_too_large_for_a_batch_that_is_not_the_same_raise():
    step, state, x, y = make_regression()
    for _ in range(99):
        state, _ = step(state, (x, y))
    deleted = jnp.copy(x)
    state, _ = step(state, (deleted, y))
    deleted.delete()  # as a program that it was donated to does
    with pytest.raises(ValueError, match=r"squares of the gradients are .* times too large"):
        step(state, (x, y + 1e-6))


@pytest.mark.parametrize("first", [True, False])
def test_ratios_count_the_workers_of_a_compressor_with_leaves(first):
    dense = {"all": gcjax.dense_compress(axis_name="data"), "none": gcjax.top_k_compress(0.1, axis_name="data")}
    tx = optax.partition(dict(sorted(dense.items(), reverse=first)), {"a": "all", "b": "all", "c": "all"})
    runner = Runner(tx, PARAMS, WORKERS)
    runner.step(gradients())
    assert gcjax.info(runner.state).wire_ratio == pytest.approx(1, rel=0.02)
