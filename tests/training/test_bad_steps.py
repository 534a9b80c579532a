"""Steps whose gradient is not finite: they change nothing, are counted, and end training when there are too many."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax
from gcjax._training.bad_steps import STEPS_AHEAD

WORKERS = 4
PARAMS = {"w": jnp.ones((5, 3)), "v": jnp.full((2,), 0.5)}


def loss_fn(params, batch):
    """`x` reaches only the gradient of w, `z` only that of v."""
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2) + jnp.mean((batch["z"] @ params["v"]) ** 2)


def batch_of(seed, bad=()):
    rng = np.random.default_rng(seed)
    batch = {"x": rng.normal(size=(16, 5)).astype(np.float32), "z": rng.normal(size=(16, 2)).astype(np.float32)}
    for name in bad:
        batch[name][9, 1] = np.nan  # one number of one sample of one worker
    return batch


def on_host(tree):
    def copy(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(copy, tree)


def without_compressors(opt_state):
    def is_compressor(node):
        return isinstance(node, gcjax.CompressState)

    return jax.tree.map(lambda x: None if is_compressor(x) else x, opt_state, is_leaf=is_compressor)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, on_host(a), on_host(b))


def all_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(on_host(tree)) if np.issubdtype(x.dtype, np.floating))


def mean_over_workers():
    """A transform that averages, without a compressor."""
    return optax.stateless(lambda updates, params: jax.lax.pmean(updates, "data"))


def variance():
    return gcjax.variance_compress(axis_name="data", capacity=64)


def parted(w, v):
    return optax.partition({"w": w, "v": v}, {"w": "w", "v": "v"})


CHAINS = {
    "adam": lambda: optax.chain(variance(), optax.adam(1e-2)),
    "apply_if_finite": lambda: optax.chain(variance(), optax.apply_if_finite(optax.adam(1e-2), 5)),
    "schedule": lambda: optax.chain(variance(), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))),
    "noise": lambda: optax.chain(variance(), optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(1e-2)),
    "momentum before": lambda: optax.chain(
        gcjax.local_transform(optax.trace(0.9), "data"), variance(), optax.sgd(1e-2)
    ),
    "two compressors": lambda: optax.chain(
        parted(variance(), gcjax.dense_compress(axis_name="data")), optax.adam(1e-2)
    ),
    "compressor and mean": lambda: optax.chain(parted(variance(), mean_over_workers()), optax.adam(1e-2)),
    "no compressor": lambda: optax.chain(mean_over_workers(), optax.adam(1e-2)),
}


@cases(("chain", "bad"), itertools.product(CHAINS, ("x", "z")), default=(lambda chain, bad: bad == "x", 3))
def test_a_bad_step_changes_nothing_but_what_compressors_count(chain, bad):
    step = gcjax.make_train_step(loss_fn, CHAINS[chain](), mesh_of(WORKERS))
    state, metrics = step(step.init(PARAMS), batch_of(0))
    assert int(metrics.skipped) == 0
    before = on_host(state)
    state, metrics = step(state, batch_of(1, bad))
    assert int(metrics.skipped) == int(state.skipped) == 1
    assert int(state.step) == 2
    assert not np.isfinite(metrics.loss).all()
    assert_equal(state.params, before.params)
    assert_equal(without_compressors(state.opt_state), without_compressors(before.opt_state))
    state, metrics = step(state, batch_of(2))
    assert int(metrics.skipped) == int(state.skipped) == 0
    assert all_finite(state)
    assert not np.array_equal(state.params["w"], before.params["w"])


@cases("chain", ["two compressors", "compressor and mean"], default=1)
def test_a_compressor_whose_leaves_were_good_loses_nothing_in_a_bad_step(chain):
    step = gcjax.make_train_step(loss_fn, CHAINS[chain](), mesh_of(WORKERS))
    state, _ = step(step.init(PARAMS), batch_of(0))
    before = on_host(state.opt_state)
    state, _ = step(state, batch_of(1, "z"))
    states = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, gcjax.CompressState))
    compressors = [node for node in states if isinstance(node, gcjax.CompressState)]
    held = [node for node in compressors if int(node.report.stacked().skipped[0]) == 0]
    assert len(held) == 1  # of w
    assert_equal(state.opt_state[0].inner_states["w"], before[0].inner_states["w"])


def test_state_of_which_entries_become_equal_or_constant_stays_as_it_was():
    def update(updates, state, params):
        total = optax.tree.sum(updates)
        return updates, {"a": total, "b": total, "c": jnp.float32(4), "d": state["d"]}

    start = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}
    twins = optax.GradientTransformation(lambda params: jax.tree.map(jnp.float32, start), update)
    step = gcjax.make_train_step(loss_fn, optax.chain(variance(), twins), mesh_of(WORKERS))
    state, _ = step(step.init(PARAMS), batch_of(0, "x"))
    assert jax.tree.map(float, state.opt_state[1]) == start
    state, _ = step(state, batch_of(1))
    assert float(state.opt_state[1]["c"]) == 4.0


@cases("options", [{"moments": None}, {"accumulate": 2}], ids=str, default=1)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_bad_steps_are_skipped_in_every_mode(options):
    step = gcjax.make_train_step(loss_fn, CHAINS["adam"](), mesh_of(WORKERS), **options)
    state, metrics = step(step.init(PARAMS), batch_of(0, "x"))
    assert int(metrics.skipped) == 1
    assert_equal(state.params, PARAMS)


@pytest.mark.parametrize("axis", ["model", "data"])
def test_a_bad_shard_is_skipped_on_all_shards(axis):
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    axes = ("data", "model") if axis == "model" else "data"

    specs = {"w": P("model"), "v": P()} if axis == "model" else {"w": P(None, "model"), "v": P()}
    params = {"w": jnp.ones((4, 2)), "v": jnp.ones(2)}

    def loss(params, batch):
        return jnp.mean(batch @ params["w"]) + jnp.mean(params["v"])

    def partial_loss(params, batch):  # each shard has columns of its own
        return jax.lax.pmean(jnp.mean(batch @ params["w"]), "model") + jnp.mean(params["v"])

    step = gcjax.make_train_step(
        loss if axis == "model" else partial_loss,
        optax.chain(gcjax.dense_compress(axis_name="data"), optax.adam(0.1)),
        mesh,
        axis_name=axes,
        moments=None,
        param_specs=specs,
    )
    batch = np.ones((8, 4), np.float32)
    state, _ = step(step.init(params), batch)
    before = on_host(state)
    batch[3, 0] = np.inf  # the gradient of the first row of w only, which one shard has where rows are sharded
    state, metrics = step(state, batch)
    assert int(metrics.skipped) == 1
    assert_equal((state.params, state.opt_state[1]), (before.params, before.opt_state[1]))


def running_loss(params, batch, *, model_state):
    return loss_fn(params, batch), {"mean": batch["x"].mean(axis=0), "steps": model_state["steps"] + 1}


RUNNING = {"mean": jnp.zeros(5), "steps": jnp.int32(0)}


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_all_of_the_model_state_stays_in_a_bad_step():
    step = gcjax.make_train_step(running_loss, CHAINS["adam"](), mesh_of(WORKERS), moments=None)
    state, _ = step(step.init(PARAMS, model_state=RUNNING), batch_of(0))
    before = on_host(state.model_state)
    state, _ = step(state, batch_of(1, "z"))  # which x does not show
    assert_equal(state.model_state, before)
    np.testing.assert_array_equal(state.model_state.stacked()["steps"], [1] * WORKERS)


def test_too_many_bad_steps_in_a_row_raise_before_the_state_is_donated():
    step = gcjax.make_train_step(loss_fn, CHAINS["adam"](), mesh_of(WORKERS), max_skipped=3)
    state, _ = step(step.init(PARAMS), batch_of(0))
    params, taken = on_host(state.params), 3 + STEPS_AHEAD - 1
    for _ in range(taken):
        state, _ = step(state, batch_of(1, "x"))
    says = rf"the last {taken} steps, all since step 1, were skipped.*max_skipped=...\) sets the limit, now 3"
    with pytest.raises(FloatingPointError, match=says):
        step(state, batch_of(1, "x"))
    assert_equal(state.params, params)  # not donated
    state, metrics = step(state, batch_of(2))  # the same state trains on
    assert int(metrics.skipped) == 0
    assert all_finite(state)


def test_parameters_that_are_not_finite_are_named():
    step = gcjax.make_train_step(loss_fn, CHAINS["adam"](), mesh_of(WORKERS), max_skipped=1)
    state, _ = step(step.init(PARAMS), batch_of(0))
    state = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    for _ in range(STEPS_AHEAD):
        state, _ = step(state, batch_of(0))
    with pytest.raises(FloatingPointError, match=r"the parameters are not finite .*Go back to a checkpoint"):
        step(state, batch_of(0))


def test_bad_steps_are_skipped_and_counted_inside_a_scan():
    step = gcjax.make_train_step(loss_fn, CHAINS["adam"](), mesh_of(WORKERS), max_skipped=2)
    batches = jax.tree.map(lambda *x: np.stack(x), *[batch_of(i, "x" if i in (1, 2, 3) else "") for i in range(6)])
    state, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(step.init(PARAMS), batches)
    np.testing.assert_array_equal(metrics.skipped, [0, 1, 2, 3, 0, 0])
    single = step.init(PARAMS)
    for i in (0, 4, 5):
        single, _ = step(single, jax.tree.map(lambda x, i=i: x[i], batches))
    assert_equal(state.params, single.params)
