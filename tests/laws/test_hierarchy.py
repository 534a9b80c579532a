"""A fast axis inside a slow one, and parameters sharded over further axes, on meshes of eight devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, residuals, sample_gradients, stacked
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rows import SHAPES, SIZES, methods
from wire import collectives

import gcjax

STEPS = 3
ROWS = {row.name: row for row in methods()}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
MESHES = {  # shape, axes, the slow ones, the fast ones
    "2x4": ((2, 4), ("slow", "fast"), ("slow",), ("fast",)),
    "4x2": ((4, 2), ("slow", "fast"), ("slow",), ("fast",)),
    "fast, slow, fast": ((2, 2, 2), ("near", "slow", "far"), ("slow",), ("near", "far")),
}
EVERY_KIND = [  # gathers of a ladder and of a fixed size, sums, swaps, shared and own draws
    "variance-paper",
    "variance-hybrid",
    "top_k-0.05",
    "qsgd-4",
    "onebit",
    "power_sgd-rank2",
    "sign_vote",
    "random_k-entries",
    "sketch-0.5",
    "dense-float32",
]
RARE = ["random_k-entries", "sketch-0.5", "variance-hybrid", "qsgd-4", "sign_vote", "dense-float32", "variance-float32"]
PAIRS = [("2x4", name) for name in EVERY_KIND]
PAIRS += [("4x2", "variance-float32"), ("4x2", "top_k-0.3-owners"), ("fast, slow, fast", "onebit")]
CASES = [pytest.param(*pair, marks=pytest.mark.full if pair[1] in RARE else ()) for pair in PAIRS]


class Nested:
    """Steps of a row's transform on a mesh with slow and fast axes, one gradient for each of the eight devices."""

    def __init__(self, mesh_name, row, check_vma=True):
        shape, axes, slow, fast = MESHES[mesh_name]
        self.mesh = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes))
        self.slow, self.fast = slow, fast
        self.workers = int(np.prod([self.mesh.shape[axis] for axis in slow]))
        self.stripes = 8 // self.workers
        self.tx = row.make(slow, inner_axis_name=fast)
        self.start = gcjax.place(self.tx.init(PARAMS), self.mesh)
        everyone = P(slow + fast)  # workers of one host side by side, as in `inner_means`
        specs = gcjax.state_specs(self.start)
        run = jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(specs, everyone, everyone),
            out_specs=((everyone, P()), specs),
            check_vma=check_vma,
        )
        self.step = jax.jit(run).lower(self.start, *steps_of(8)[0]).compile()

    def _local(self, state, gradients, squares):
        gradients, squares = jax.tree.map(lambda x: x[0], (gradients, squares))
        updates, state = self.tx.update(gradients, state, sum_grad_squared=squares)
        return (jax.tree.map(lambda x: x[None], updates), updates), state

    def run(self, steps):
        """Every step's updates (workers, ...), the same typed as equal, infos; the last state."""
        state, everywhere, once, infos = self.start, [], [], []
        for gradients, squares in steps:
            (each, one), state = jax.block_until_ready(self.step(state, gradients, squares))
            everywhere.append(jax.tree.map(np.asarray, each))
            once.append(jax.tree.map(np.asarray, one))
            infos.append(gcjax.info(state))
        return everywhere, once, infos, state


@functools.cache
def nested(mesh_name, row_name):
    return Nested(mesh_name, ROWS[row_name])


@functools.cache
def steps_of(workers):
    """Gradients and squares of some steps, arrays (workers, ...)."""

    def tree(per_worker):
        return {name: x.reshape(-1, *SHAPES[name]) for name, x in stacked(per_worker).items()}

    return [(tree(g), tree(s)) for g, s in zip(*sample_gradients(workers, SIZES, STEPS), strict=True)]


def inner_means(steps, workers):
    """What the slow workers see: the mean over their inner workers; a sample's square counts 1 / size of that."""
    size = 8 // workers

    def mean(x):
        return x.reshape(workers, size, *x.shape[1:]).mean(axis=1, dtype=np.float32)

    return [(jax.tree.map(mean, g), jax.tree.map(lambda x: mean(x) / size, s)) for g, s in steps]


def along(text, mesh, axes):
    """The lines of a program without those collectives that do not run along `axes`."""
    numbers = np.arange(mesh.size).reshape(list(mesh.shape.values()))
    last = [list(mesh.shape).index(axis) for axis in axes]
    rows = np.moveaxis(numbers, last, range(-len(last), 0)).reshape(-1, np.prod([mesh.shape[axis] for axis in axes]))
    wanted = {frozenset(row) for row in rows.tolist()}
    lines = [line for line in text.splitlines() if replica_groups(line) in (None, wanted)]
    return "\n".join(lines)


def replica_groups(line):
    """The sets of devices that exchange something in a line of a program, None where it has none."""
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        groups = [map(int, group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        groups = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    else:
        return None
    return {frozenset(group) for group in groups}


def test_replica_groups_are_read_in_both_of_their_forms():
    rows, columns = {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}, {frozenset({i, i + 4}) for i in range(4)}
    assert replica_groups("replica_groups={{0,1,2,3},{4,5,6,7}}, x={1}") == rows
    assert replica_groups("replica_groups=[2,4]<=[8], dimensions={0}") == rows
    assert replica_groups("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}") == columns
    assert replica_groups("ROOT add = f32[2] add(a, b)") is None
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), (AxisType.Auto,) * 2)
    text = "replica_groups={{0,4},{1,5},{2,6},{3,7}}\nreplica_groups=[2,4]<=[8]"
    assert along(text, mesh, ("slow",)) == text.splitlines()[0]
    assert along(text, mesh, ("fast",)) == text.splitlines()[1]


@pytest.mark.parametrize(("mesh_name", "row_name"), CASES)
def test_the_update_is_that_of_the_slow_workers_fed_with_inner_means_and_equal_everywhere(mesh_name, row_name):
    run, row = nested(mesh_name, row_name), ROWS[row_name]
    everywhere, once, infos, _ = run.run(steps_of(8))
    flat = Runner(row.make("data"), PARAMS, run.workers)
    for (g, s), each, one, info in zip(inner_means(steps_of(8), run.workers), everywhere, once, infos, strict=True):
        expected = flat.step(g, s)
        for name in PARAMS:
            assert (each[name].view(np.uint32) == one[name].view(np.uint32)).all()
            np.testing.assert_allclose(one[name], expected[name][0], rtol=row.rtol, atol=row.rtol)
        of_flat = gcjax.info(flat.state)
        np.testing.assert_array_equal(info.sent, of_flat.sent)
        np.testing.assert_allclose(info.residual_norm, of_flat.residual_norm, rtol=1e-5)
        assert of_flat.wire_bytes / run.stripes <= info.wire_bytes < of_flat.wire_bytes / run.stripes + 100
        assert info.wire_ratio == pytest.approx(of_flat.wire_ratio, rel=0.5)


@pytest.mark.parametrize(("mesh_name", "row_name"), [case for case in CASES if ROWS[case.values[1]].conserves])
def test_nothing_is_lost(mesh_name, row_name):
    run = nested(mesh_name, row_name)
    _, once, _, state = run.run(steps_of(8))
    left = residuals(state, run.workers, SIZES)
    for leaf, name in enumerate(PARAMS):
        dense = sum(g[name].mean(axis=0, dtype=np.float64) for g, _ in steps_of(8)).ravel()
        sent = sum(update[name].astype(np.float64) for update in once).ravel()
        kept = np.mean([worker[leaf] for worker in left], axis=0, dtype=np.float64)
        np.testing.assert_allclose(sent + kept, dense, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("mesh_name", "row_name"), CASES)
def test_a_stripe_of_the_payload_moves_along_the_slow_axis_and_nothing_else(mesh_name, row_name):
    run, row = nested(mesh_name, row_name), ROWS[row_name]
    infos = run.run(steps_of(8))[2]
    text = run.step.as_text()
    slow = collectives(along(text, run.mesh, run.slow), run.workers)
    fast = collectives(along(text, run.mesh, run.fast), run.stripes)
    assert len(slow) + len(fast) == len(collectives(text, 8))  # none runs along both
    by_branch = {c.branch: 0.0 for c in slow}
    for c in slow:
        by_branch[c.branch] += c.ring_bytes
    always = by_branch.pop("", 0.0)
    by_capacity = sorted(by_branch.values())
    for info in infos:
        on_this_step = by_capacity[row.capacities.index(info.capacity)] if by_capacity else 0.0
        assert info.wire_bytes == pytest.approx(always + on_this_step, rel=1e-6)
    large = [c for c in slow if c.kind == "all-reduce" and c.elements >= sum(SIZES) / 2 / run.stripes]
    assert len(large) == row.dense_wire
    assert {c.dtype for c in slow} <= row.wire


def test_without_checks_of_types_the_updates_are_the_same():
    expected = nested("2x4", "onebit").run(steps_of(8))[0]
    got = Nested("2x4", ROWS["onebit"], check_vma=False).run(steps_of(8))[0]
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_an_inner_axis_that_is_not_bound_is_named():
    tx = gcjax.top_k_compress(0.5, axis_name="data", inner_axis_name="host")
    state = jax.tree.map(lambda x: np.stack([x] * 2), tx.init(np.zeros(4, np.float32)))
    with pytest.raises(ValueError, match=r"'host'.*not bound"):
        jax.pmap(lambda s, g: tx.update(g, s), axis_name="data")(state, np.ones((2, 4), np.float32))


def test_a_gradient_that_is_not_finite_on_one_inner_worker_is_skipped_everywhere():
    run = nested("2x4", "variance-paper")
    (g, s), *_ = steps_of(8)
    bad = {name: x.copy() for name, x in g.items()}
    bad["c"][6, 3] = np.nan
    everywhere, _, infos, _ = run.run([(bad, s), (g, s)])
    assert all(np.isnan(leaf).all() for leaf in everywhere[0].values())
    jax.tree.map(np.testing.assert_array_equal, everywhere[1], run.run([(g, s)])[0][0])
    assert infos[1].skipped == 1


# Parameters that are sharded over a further axis.

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


@pytest.mark.parametrize(
    ("place", "row_name"),
    [
        ("2x2x2", "variance-paper"),
        ("2x2x2", "onebit"),
        ("2x2x2", "power_sgd-rank2"),
        ("2x4", "top_k-0.05"),
        ("2x4", "dense-float32"),
    ],
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
    text = run.step.as_text()
    slow = collectives(along(text, run.mesh, ("slow",)), 2)
    assert sum(c.ring_bytes for c in slow) == pytest.approx(info.wire_bytes)
    across = collectives(along(text, run.mesh, ("model",)), run.shards)
    assert {(c.kind, c.elements) for c in across} == {("all-reduce", 1)}  # whether a step is skipped


def shard_of(tree, specs, shard, shards):
    """One shard of arrays that have an axis of workers in front."""
    cut = {name: np.asarray(x) for name, x in tree.items()}
    return {name: np.split(x, shards, axis=1 + list(specs[name]).index("model"))[shard] for name, x in cut.items()}


@pytest.mark.parametrize(("place", "row_name"), [("2x2x2", "variance-float32"), ("2x4", "top_k-0.05")])
def test_a_leaf_that_is_not_sharded_stays_equal_on_all_shards_and_loses_nothing(place, row_name):
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


def test_what_is_not_finite_in_one_shard_is_skipped_in_all_of_them():
    run = Sharded("2x2x2", "variance-float32", ("u", "v"))
    gradients = run.gradients[0]
    bad = gradients | {"u": np.where(np.arange(16)[:, None] == 15, np.inf, gradients["u"]).astype(np.float32)}
    updates, state = jax.block_until_ready(run.step(run.start, bad))
    assert all(np.isnan(leaf).all() for leaf in updates.values())
    assert gcjax.info(state).skipped == 1
    updates, _ = jax.block_until_ready(run.step(state, gradients))
    expected, _ = jax.block_until_ready(run.step(run.start, gradients))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_state_is_sharded_like_the_parameter_whose_path_and_shape_it_has():
    params = {"u": np.zeros((4, 6)), "deep": {"u": np.zeros((6, 4))}}
    specs = {"u": P("model"), "deep": {"u": P(None, "model")}}
    state = {"moment": params, "row_means": {"u": np.zeros(4), "deep": {"u": np.zeros(6)}}, "count": np.int32(0)}
    none = {"u": P(), "deep": {"u": P()}}
    assert gcjax.state_specs(state, params, specs) == {"moment": specs, "row_means": none, "count": P()}
    assert gcjax.state_specs(state, params, P("model"))["moment"]["deep"]["u"] == P("model")
    assert gcjax.state_specs((params["u"], 1.0), params["u"], P("model")) == (P("model"), P())


# The step: every sample's gradient is the sample, and all arithmetic is exact.


def dot_loss(params, batch):
    return sum(jnp.sum(params[name] * batch[name], axis=tuple(range(1, batch[name].ndim))) for name in params).mean()


def trained(mesh, tx, axis_name, **options):
    """Parameters after some steps, losses, info."""
    params = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 64 for name, shape in SIZED.items()}
    step = gcjax.make_train_step(
        dot_loss, optax.chain(tx, optax.trace(0.5), optax.sgd(0.5)), mesh, axis_name=axis_name, **options
    )
    state = step.init(params, key=None)
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        batch = {name: rng.integers(-4, 5, (16, *shape)).astype(np.float32) for name, shape in SIZED.items()}
        state, metrics = step(state, batch)
    return jax.device_get(state.params), np.asarray(metrics.loss), gcjax.info(state.opt_state), state


def test_sharding_parameters_over_an_axis_of_the_batch_changes_no_bit():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    options = {"values": "float32", "capacity": 2048}
    inner = gcjax.variance_compress(2.0, axis_name="slow", inner_axis_name="fast", **options)
    expected, losses, whole, _ = trained(mesh, inner, ("slow", "fast"), accumulate=2)
    specs = {"u": P("fast"), "v": P(None, "fast"), "whole": P()}
    shards = gcjax.variance_compress(2.0, axis_name="slow", **options)
    params, loss, info, state = trained(mesh, shards, ("slow", "fast"), accumulate=2, param_specs=specs)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    np.testing.assert_array_equal(loss, losses)
    momentum = state.opt_state[1].trace
    assert momentum["v"].sharding.spec == P(None, "fast")
    assert state.params["u"].addressable_shards[0].data.shape == (4, 20)
    assert len(info.sent) == 8
    assert len(whole.sent) == 2
    assert 0 < info.sent.sum() < 8 * 192  # each of the eight has a quarter of u and v, and all of the rest


def model_loss(params, batch):
    """A matrix product whose inner dimension is sharded."""
    return jnp.mean(jnp.square(jax.lax.psum(batch @ params["v"] @ params["u"], "model") + params["whole"][:20] - 1.0))


def test_a_loss_with_collectives_of_its_own_trains_shards():
    mesh = jax.make_mesh((2, 2, 2), ("slow", "fast", "model"))
    specs = {"u": P("model"), "v": P(None, "model"), "whole": P()}
    shapes = SIZED | {"u": (24, 20)}
    start = {name: np.random.default_rng(2).normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    batch = np.random.default_rng(3).normal(size=(16, 12)).astype(np.float32)
    tx = gcjax.variance_compress(0.5, axis_name="slow", inner_axis_name="fast")
    step = gcjax.make_train_step(
        model_loss,
        optax.chain(tx, optax.adam(0.01)),
        mesh,
        axis_name=("slow", "fast"),
        moments=None,
        accumulate=2,
        param_specs=specs,
    )
    state, losses = step.init(start), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < 0.8 * losses[0]
    for name, spec in specs.items():
        assert state.params[name].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), len(shapes[name]))
    copies = [np.asarray(shard.data) for shard in state.params["whole"].addressable_shards]
    assert all((copy == copies[0]).all() for copy in copies)


def test_a_loss_over_shards_gives_the_gradient_of_the_whole_model():
    mesh = jax.make_mesh((2, 4), ("slow", "model"))
    shapes = SIZED | {"u": (24, 20)}
    start = {name: np.random.default_rng(2).normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    batch = np.random.default_rng(3).normal(size=(16, 12)).astype(np.float32)
    specs = {"u": P("model"), "v": P(None, "model"), "whole": P()}
    tx = optax.chain(gcjax.dense_compress(axis_name="slow"), optax.sgd(1.0))
    step = gcjax.make_train_step(model_loss, tx, mesh, axis_name="slow", moments=None, param_specs=specs)
    state, _ = step(step.init(start), batch)

    def whole_loss(p):
        return jnp.mean(jnp.square(batch @ p["v"] @ p["u"] + p["whole"][:20] - 1.0))

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
        gcjax.make_train_step(dot_loss, optax.sgd(0.1), mesh, axis_name=axis_name, param_specs={"u": specs})


@pytest.mark.parametrize("option", ["axis_name", "inner_axis_name"])
def test_an_axis_over_which_shards_would_be_averaged_is_named(option):
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    tx = gcjax.top_k_compress(0.1, **({"axis_name": "slow"} | {option: "fast"}))
    step = gcjax.make_train_step(dot_loss, tx, mesh, axis_name=("slow", "fast"), param_specs=P("fast"))
    with pytest.raises(ValueError, match=r"sharded over \['fast'\], over which the gradient is to be averaged"):
        step.init({"u": np.zeros((16, 20), np.float32)})


def test_a_method_that_cannot_take_shards_says_so():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"))
    with pytest.raises(ValueError, match="ef21_compress takes no parameters that are sharded over"):
        gcjax.init_sharded(gcjax.ef21_compress(0.1, axis_name="slow"), np.zeros(16, np.float32), mesh, P("fast"))


LOOPS = ["demo-decay", "onebit", "power_sgd-start", "drive-3-feedback"]  # loops and branches whose types must fit
ONE_OF_EACH = {row.public: row for row in methods() if row.public != "ef21_compress"}.values()
WITH_SHARDS = [
    pytest.param(row, marks=() if row.name in LOOPS else pytest.mark.full, id=row.name) for row in ONE_OF_EACH
]


@pytest.mark.parametrize("row", WITH_SHARDS)
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
