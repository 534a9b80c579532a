"""Parameters sharded over further mesh axes, on meshes of eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, residuals
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from loops import by_gradient, by_step
from rows import methods, name_of
from selection import cases
from wire import along

import gcjax
from gcjax._hlo import collectives

STEPS = 3
ROWS = {row.name: row for row in methods()}

SHARDED = {"u": P("model"), "v": P(None, "model")}
SIZED = {"u": (16, 20), "v": (12, 24), "whole": (40,)}
PLACES = {  # shape, axes, fast axes
    "2x2x2": ((2, 2, 2), ("slow", "fast", "model"), ("fast",)),
    "2x4": ((2, 4), ("slow", "model"), ()),
}


class Sharded:
    """Steps of a row's transform for some leaves of `SIZED`, with gradients of four or two workers."""

    def __init__(self, place, row_name, names):
        shape, axes, fast = PLACES[place]
        self.mesh = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes))
        self.workers, self.shards = 2 * (shape[1] if fast else 1), shape[-1]
        self.specs = {name: SHARDED.get(name, P()) for name in names}
        tx = ROWS[row_name].make(
            "slow", inner_axis_name=fast, **({"capacity": (64,)} if ROWS[row_name].capacities else {})
        )
        params = {name: np.zeros(SIZED[name], np.float32) for name in names}
        self.start = gcjax.init_sharded(tx, params, self.mesh, self.specs)
        specs = gcjax.state_specs(self.start, params, self.specs)
        given = {name: P(("slow", *fast), *spec) for name, spec in self.specs.items()}

        def local(state, gradients):
            gradients = jax.tree.map(lambda x: x[0], gradients)
            return tx.update(gradients, state, sum_grad_squared=jax.tree.map(jnp.square, gradients))

        run = jax.shard_map(local, mesh=self.mesh, in_specs=(specs, given), out_specs=(self.specs, specs))
        rng = np.random.default_rng(0)
        sizes = {name: (self.workers, *SIZED[name]) for name in names}
        self.gradients = [
            {name: (rng.integers(-64, 64, size) / 16).astype(np.float32) for name, size in sizes.items()}
            for _ in range(STEPS)
        ]
        self.step = jax.jit(run).lower(self.start, self.gradients[0]).compile()


@cases(
    ("place", "row_name"),
    [
        ("2x2x2", "variance-paper"),
        ("2x2x2", "onebit"),
        ("2x2x2", "power_sgd-rank2"),
        ("2x4", "top_k-0.05"),
        ("2x4", "dense-float32"),
    ],
    default=2,
)
def test_each_shard_is_compressed_as_if_it_were_the_model(place, row_name):
    run, row = Sharded(place, row_name, ("u", "v")), ROWS[row_name]
    options = {"capacity": (64,)} if row.capacities else {}
    expected, flat, inner = [], None, run.workers // 2
    for shard in range(run.shards):
        parts = [shard_of(g, run.specs, shard, run.shards) for g in run.gradients]
        means = [jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]).mean(1), part) for part in parts]
        squares = [
            jax.tree.map(lambda x: np.square(x).reshape(2, -1, *x.shape[1:]).mean(1) / inner, part) for part in parts
        ]
        params = jax.tree.map(lambda x: np.zeros(x.shape[1:], np.float32), parts[0])
        flat = flat.restart() if flat else Runner(row.make("data", **options), params, 2)
        expected.append([(flat.step(g, s), gcjax.info(flat.state)) for g, s in zip(means, squares, strict=True)])
    state = run.start
    for number, gradients in enumerate(run.gradients):
        updates, state = jax.block_until_ready(run.step(state, gradients))
        info = gcjax.info(state)
        for shard in range(run.shards):
            update, of_flat = expected[shard][number]
            own = shard_of({name: x[None] for name, x in updates.items()}, run.specs, shard, run.shards)
            for name in own:
                np.testing.assert_allclose(own[name][0], update[name][0], rtol=row.rtol, atol=row.rtol)
            np.testing.assert_array_equal(info.sent.reshape(2, -1)[:, shard], of_flat.sent)
    moved = collectives(run.step.as_text())
    slow = along(moved, run.mesh, ("slow",))
    assert sum(c.ring_bytes for c in slow) == pytest.approx(info.wire_bytes)
    across = along(moved, run.mesh, ("model",))
    assert {(c.kind, c.elements) for c in across} == {("all-reduce", 1)}  # whether a step is skipped


def shard_of(tree, specs, shard, shards):
    """One shard of arrays that have an axis of workers in front."""
    cut = {name: np.asarray(x) for name, x in tree.items()}
    return {name: np.split(x, shards, axis=1 + list(specs[name]).index("model"))[shard] for name, x in cut.items()}


@pytest.mark.parametrize(("place", "row_name"), [("2x2x2", "variance-hybrid"), ("2x4", "top_k-0.05")])
def test_an_unsharded_leaf_stays_equal_on_all_shards(place, row_name):
    run = Sharded(place, row_name, ("u", "v", "whole"))
    state, sent = run.start, 0
    for gradients in run.gradients:
        updates, state = jax.block_until_ready(run.step(state, gradients))
        copies = [np.asarray(shard.data) for shard in updates["whole"].addressable_shards]
        assert len(copies) == 8
        assert all((copy == copies[0]).all() for copy in copies)
        sent = sent + copies[0].astype(np.float64)
    dense = sum(g["whole"].mean(axis=0, dtype=np.float64) for g in run.gradients)
    sizes = [np.prod(SIZED[name]) // (run.shards if name in SHARDED else 1) for name in sorted(SIZED)]
    kept = np.mean([left[-1] for left in residuals(state, 2 * run.shards, sizes)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(sent + kept, dense, rtol=1e-5, atol=1e-5)
    if row_name == "top_k-0.05":
        assert (kept != 0).any()  # some shards did not send what others sent


def test_nan_in_one_shard_is_skipped_in_all():
    run = Sharded("2x2x2", "variance-hybrid", ("u", "v"))
    gradients = run.gradients[0]
    bad = gradients | {"u": np.where(np.arange(16)[:, None] == 15, np.inf, gradients["u"]).astype(np.float32)}
    updates, state = jax.block_until_ready(run.step(run.start, bad))
    assert all(np.isnan(leaf).all() for leaf in updates.values())
    assert gcjax.info(state).skipped == 1
    updates, _ = jax.block_until_ready(run.step(state, gradients))
    expected, _ = jax.block_until_ready(run.step(run.start, gradients))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_state_is_sharded_like_its_parameter():
    params = {"u": np.zeros((4, 6)), "deep": {"u": np.zeros((6, 4))}}
    specs = {"u": P("model"), "deep": {"u": P(None, "model")}}
    state = {"moment": params, "row_means": {"u": np.zeros(4), "deep": {"u": np.zeros(6)}}, "count": np.int32(0)}
    none = {"u": P(), "deep": {"u": P()}}
    assert gcjax.state_specs(state, params, specs) == {"moment": specs, "row_means": none, "count": P()}
    assert gcjax.state_specs(state, params, P("model"))["moment"]["deep"]["u"] == P("model")
    assert gcjax.state_specs((params["u"], 1.0), params["u"], P("model")) == (P("model"), P())


def model_loss(params, batch):
    """A matrix product whose inner dimension is sharded."""
    return jnp.mean(jnp.square(jax.lax.psum(batch @ params["v"] @ params["u"], "model") + params["whole"] - 1.0))


def start_and_batches():
    """Parameters of a small network, and the batches of some steps."""
    shapes = {"u": (24, 20), "v": (12, 24), "whole": (20,)}
    rng = np.random.default_rng(2)
    start = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    return start, [rng.normal(size=(16, 12)).astype(np.float32) for _ in range(STEPS)]


def test_a_loss_over_shards_gives_the_whole_gradient():
    mesh, (start, (batch, *_)) = jax.make_mesh((2, 4), ("slow", "model")), start_and_batches()
    specs = {"u": P("model"), "v": P(None, "model"), "whole": P()}
    tx = optax.chain(gcjax.dense_compress(axis_name="slow"), optax.sgd(1.0))
    step = gcjax.make_train_step(model_loss, tx, mesh, axis_name="slow", moments=None, param_specs=specs)
    state, _ = step(step.init(start), batch)

    def whole_loss(p):
        return jnp.mean(jnp.square(batch @ p["v"] @ p["u"] + p["whole"] - 1.0))

    gradient = jax.grad(whole_loss)(start)
    for name in start:
        np.testing.assert_allclose(start[name] - state.params[name], gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("specs", "axis_name", "named"),
    [
        (P("other"), ("slow", "fast"), "no axis \\['other'\\]"),
        (P(("model", "fast")), ("slow", "fast"), r"over \('model', 'fast'\), some of them axes of the batch"),
    ],
)
def test_wrong_specs_are_named(specs, axis_name, named):
    mesh = jax.make_mesh((2, 2, 2), ("slow", "fast", "model"))
    with pytest.raises(ValueError, match=named):
        gcjax.make_train_step(squares_loss, optax.sgd(0.1), mesh, axis_name=axis_name, param_specs={"u": specs})


@pytest.mark.parametrize("option", ["axis_name", "inner_axis_name"])
def test_averaging_over_a_sharded_axis_raises(option):
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    tx = gcjax.top_k_compress(0.1, **({"axis_name": "slow"} | {option: "fast"}))
    step = gcjax.make_train_step(squares_loss, tx, mesh, axis_name=("slow", "fast"), param_specs=P("fast"))
    with pytest.raises(ValueError, match=r"sharded over \['fast'\], over which the gradient is to be averaged"):
        step.init({"u": np.zeros((16, 20), np.float32)})


# Loops, branches and parts of owners, whose types must fit.
LOOPS = ["demo-decay", "onebit", "power_sgd-rank2", "ef_sign-owners"]
LAST_OF_EACH = {row.public: row for row in methods()}.values()


@cases("row", LAST_OF_EACH, default=lambda row: row.name in LOOPS, ids=name_of)
def test_every_method_takes_shards(row):
    mesh = jax.make_mesh((2, 2, 2), ("slow", "fast", "model"), (AxisType.Auto,) * 3)
    tx = row.make("slow", inner_axis_name="fast")
    params = {name: np.zeros(SIZED[name], np.float32) for name in SHARDED}
    state = jax.eval_shape(lambda params: gcjax.init_sharded(tx, params, mesh, SHARDED), params)
    specs = gcjax.state_specs(state, params, SHARDED)

    def local(state, gradients):
        gradients = gcjax.local_gradients(lambda g: g, ("slow", "fast"))(gradients)
        return tx.update(gradients, state, sum_grad_squared=jax.tree.map(jnp.square, gradients))

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, SHARDED), out_specs=(SHARDED, specs))
    jax.eval_shape(run, state, params)  # raises where a type does not fit


# Clipping by the global norm after the compressor: with shards as without.

MOMENTUM = optax.sgd(0.5, momentum=0.9)
CLIPPED = {"dense": gcjax.dense_compress, "top_k": lambda axis_name: gcjax.top_k_compress(1.0, axis_name=axis_name)}


def squares_loss(params, batch):
    hidden = jnp.tanh(batch @ params["v"])
    return jnp.mean(jnp.sum(jnp.square(hidden @ params["u"] + params["whole"] - 1.0), -1))


def clipped_by_step(compress, mesh, axis_name, optimiser, **options):
    tx = optax.chain(CLIPPED[compress](axis_name="slow"), optax.clip_by_global_norm(0.05), optimiser)
    state, metrics = by_step(squares_loss, tx, *start_and_batches(), mesh, axis_name=axis_name, **options)
    return jax.device_get(state.params), [float(one.grad_norm) for one in metrics], state


def clipped_by_gradient(compress, mesh, optimiser, specs):
    tx = optax.chain(CLIPPED[compress](axis_name="slow"), optax.clip_by_global_norm(0.05))
    start, batches = start_and_batches()
    start = jax.device_put(start, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
    options = {"axis_name": "slow", "param_specs": specs}
    return jax.device_get(by_gradient(squares_loss, tx, optimiser, start, batches, mesh, **options)[0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("compress", CLIPPED)
def test_clipping_by_the_global_norm_takes_shards_for_the_whole(compress, kind):
    specs = {"u": P("fast"), "v": P(None, "fast"), "whole": P()}
    flat = jax.make_mesh((2,), ("slow",), (kind,), devices=jax.devices()[:2])
    expected, norms, _ = clipped_by_step(compress, flat, "slow", MOMENTUM)
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), (kind, kind))
    found, found_norms, state = clipped_by_step(compress, mesh, ("slow", "fast"), MOMENTUM, param_specs=specs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found, expected)
    np.testing.assert_allclose(found_norms, norms, rtol=1e-4)
    assert norms[0] > 0.05  # clipped
    assert state.opt_state[2][0].trace["v"].sharding.shard_shape((12, 24)) == (12, 6)
    assert state.params["v"].sharding.shard_shape((12, 24)) == (12, 6)
    if kind == AxisType.Auto:
        found = clipped_by_gradient(compress, mesh, MOMENTUM, specs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found, expected)


def test_muon_sees_whole_matrices_of_sharded_parameters():
    specs = {"u": P("fast"), "v": P(None, "fast"), "whole": P()}
    flat = jax.make_mesh((2,), ("slow",), devices=jax.devices()[:2])
    expected, _, _ = clipped_by_step("dense", flat, "slow", optax.contrib.muon(0.01))
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    found, _, _ = clipped_by_step("dense", mesh, ("slow", "fast"), optax.contrib.muon(0.01), param_specs=specs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)
