"""State for another number of workers: what was owed is still owed, and training goes on."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, compress_state, mesh_of, residuals, sample_gradients
from row_steps import PARAMS, inputs, runner_of
from rows import SIZES, group_of, methods, name_of
from selection import cases

import gcjax


def firsts():
    """The first row of every method, and of every kind of owner one more."""
    owners = {"variance-owners", "top_k-0.3-owners", "qsgd-3-owners", "ef_sign-owners"}
    seen = set()
    for row in methods():
        if row.public not in seen or row.name in owners:
            yield row
        seen.add(row.public)


def row_named(name):
    return next(row for row in methods() if row.name == name)


def steps_of(workers, count, seed=0):
    gradients, squares = sample_gradients(workers, SIZES, count, seed)
    return [(inputs(g), inputs(s)) for g, s in zip(gradients, squares, strict=True)]


def mean_residual(state, workers):
    """Of all leaves in one vector, float64."""
    return np.mean([np.concatenate(leaves) for leaves in residuals(state, workers, SIZES)], axis=0, dtype=np.float64)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def ran(row, workers=8, **more):
    runner = Runner(row.make("data", **more), PARAMS, workers) if more else runner_of(row, workers)
    for g, s in steps_of(workers, 3):
        runner.step(g, s)
    return runner


@cases(
    ("row", "path"),
    itertools.product(firsts(), ((6,), (4, 6, 8))),
    default=(lambda row, path: len(path) == 1, 5),
    ids=lambda value: name_of(value) or str(value),
    marks=group_of,
)
def test_what_was_owed_is_still_owed(row, path):
    runner = ran(row)
    state, before = runner.state, mean_residual(runner.state, 8)
    for workers in path:
        state = gcjax.resize(state, mesh_of(workers))
        np.testing.assert_allclose(mean_residual(state, workers), before, rtol=2e-6, atol=2e-6 * np.abs(before).max())
    after = runner_of(row, path[-1])
    after.state = state
    assert jax.tree.structure(state) == jax.tree.structure(runner_of(row, path[-1]).state)
    for g, s in steps_of(path[-1], 2, seed=1):
        updates = after.step(g, s)
        assert all((leaf == leaf[0]).all() for leaf in updates.values())
    gcjax.check_training(after.state)
    assert gcjax.info(after.state).skipped == 0


@pytest.mark.parametrize("name", ["variance-owners-hybrid-overflow", "ef_sign-owners"])
def test_nothing_is_lost_over_a_run_that_shrinks_and_grows(name):
    """Updates and what is left at the end add up to the dense means of all workers that there were."""
    row = row_named(name)
    total, sent, state = 0.0, 0.0, None
    for seed, workers in enumerate((8, 3, 1, 4)):
        runner = runner_of(row, workers)
        if state is not None:
            runner.state = gcjax.resize(state, mesh_of(workers))
        for g, s in steps_of(workers, 3, seed):
            sent += np.concatenate([x[0].ravel() for x in runner.step(g, s).values()], dtype=np.float64)
            total += np.concatenate([x.mean(0, dtype=np.float64).ravel() for x in g.values()])
        state = runner.state
    np.testing.assert_allclose(sent + mean_residual(state, 4), total, atol=2e-6 * np.abs(total).max())


def test_as_many_workers_go_on_bit_for_bit():
    """On other devices. With the counts that `info` reads of the last step, nothing else begins anew."""
    row = row_named("variance-owners")
    plain, moved = ran(row), ran(row)
    moved.state = gcjax.resize(on_host(moved.state), mesh_of(8))
    for g, s in steps_of(8, 2, seed=1):
        jax.tree.map(np.testing.assert_array_equal, plain.step(g, s), moved.step(g, s))


def test_it_works_where_jax_has_no_cpu(monkeypatch):
    def no_cpu(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    tx, mesh = gcjax.top_k_compress(0.5, axis_name="data"), jax.make_mesh((1,), ("data",))
    of_two = gcjax.restore_target(tx.init(jnp.ones(4)), workers=2)
    monkeypatch.setattr(jax, "local_devices", no_cpu)
    assert gcjax.resize(of_two, mesh).report.workers == 1


def test_squares_are_those_of_the_joint_batch():
    """Two workers' samples seen by one: in the mean each sample counts half, and its square a quarter."""
    tx = gcjax.variance_compress(alpha=1e9, axis_name="data")  # sends nothing
    runner, joint = Runner(tx, PARAMS, 8), Runner(tx, PARAMS, 4)
    for g, s in steps_of(8, 2):
        runner.step(g, s)
        pairs = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), {"g": g, "s": s})
        joint.step(*(jax.tree.map(lambda x, n=n: x.sum(1) / n, pairs[name]) for name, n in (("g", 2), ("s", 4))))
    ours, theirs = settled(gcjax.resize(runner.state, mesh_of(4))), settled(joint.state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs)


def settled(state):
    (bucket,) = compress_state(state).buckets.stacked()
    return on_host(jax.vmap(type(bucket).settled)(bucket))


def loss_fn(params, batch):
    x, y = batch
    return optax.l2_loss(x @ params["w"] + params["b"], y).mean()


X = np.random.default_rng(0).normal(size=(48, 20)).astype(np.float32)
Y = (X @ np.arange(20) / 20).astype(np.float32)


@functools.cache
def make_step(workers):
    tx = optax.chain(
        gcjax.local_transform(optax.trace(0.5), "data"),
        gcjax.variance_compress(alpha=1.0, axis_name="data", capacity=32),
        optax.adam(0.01),
    )
    return gcjax.make_train_step(loss_fn, tx, mesh_of(workers), max_skipped=3)


def test_training_goes_on_without_a_jump():
    """On 8, 4, 6 and 8 workers with the same global batch: the loss falls as on 8 all the time."""
    params = {"w": np.zeros(20, np.float32), "b": np.float32(0)}
    losses = {}
    for path in ((8, 8, 8, 8), (8, 4, 6, 8)):
        state, found = make_step(8).init(params), []
        for workers in path:
            step = make_step(workers)
            state = gcjax.resize(state, mesh_of(workers))
            for _ in range(40):
                state, metrics = step(state, (X, Y))
                found.append(float(metrics.loss.mean()))
        assert int(state.step) == 160
        losses[path] = np.array(found)
    steady, resized = losses.values()
    assert resized[-1] < 0.02 * resized[0]
    assert (resized < 1.3 * steady + 1e-3).all(), resized / steady


def test_a_checkpoint_of_another_number_of_workers_is_restored_in_one_call(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    step = make_step(8)
    state = step.init({"w": np.zeros(20, np.float32), "b": np.float32(0)})
    for _ in range(5):
        state, _ = step(state, (X, Y))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        fresh = make_step(6).init({"w": np.zeros(20, np.float32), "b": np.float32(0)})
        target = gcjax.restore_target(fresh, workers=8)
        restored = checkpointer.restore(tmp_path / "saved", target)
    expected = gcjax.resize(state, mesh_of(6))
    jax.tree.map(np.testing.assert_array_equal, gcjax.resize(restored, mesh_of(6)), expected)
    make_step(6)(gcjax.resize(restored, mesh_of(6)), (X, Y))


@pytest.mark.parametrize("method", [gcjax.top_k_compress, gcjax.qsgd_compress])
def test_a_mesh_with_explicit_axes_gives_the_same_target(method):
    options = {"bits": 4, "key": jax.random.key(0)} if method is gcjax.qsgd_compress else {"density": 0.1}
    state = method(transport="two_phase", axis_name="data", **options).init(PARAMS)
    explicit = jax.make_mesh((6,), ("data",), devices=jax.devices()[:6])
    targets = [gcjax.restore_target(gcjax.distribute(state, mesh), workers=8) for mesh in (explicit, mesh_of(6))]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), target) for target in targets]
    assert shapes[0] == shapes[1]


def test_state_of_shards_and_gossip_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    params = {"w": np.ones((4, 8), np.float32)}
    specs = {"w": jax.P("model")}
    step = gcjax.make_train_step(
        lambda p, x: jax.lax.pmean(jnp.mean((x @ p["w"].T) ** 2), "model"),
        optax.chain(gcjax.top_k_compress(0.5, axis_name="data"), optax.sgd(0.1)),
        mesh,
        moments=None,
        param_specs=specs,
        checks=False,
    )
    state, _ = step(step.init(params), np.ones((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"shape \(4, 8\) is sharded"):
        gcjax.resize(state, jax.make_mesh((4, 2), ("data", "model")))
    with pytest.raises(ValueError, match=r"4 parts for 2 worker\(s\): the parameters are sharded"):
        gcjax.resize(on_host(state), jax.make_mesh((4, 2), ("data", "model")))
    with pytest.raises(ValueError, match=r"along \('data',\); the mesh has only \('rows',\)"):
        gcjax.resize(runner_of_top_k().state, mesh_of(2, axis="rows"))
    with pytest.raises(TypeError, match=r"takes no state of gcjax\.gossip"):
        gcjax.resize(gcjax.gossip.d_psgd(axis_name="data").init(params), mesh_of(2))
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        gcjax.restore_target(state, workers=0)


def runner_of_top_k():
    return Runner(gcjax.top_k_compress(0.1, axis_name="data"), PARAMS, 2)
