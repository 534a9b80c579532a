"""A fast axis inside a slow one, on meshes of eight devices."""

import functools
import re

import jax
import numpy as np
import pytest
from harness import Runner, residuals, sample_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from row_steps import PARAMS, check_conservation, inputs
from rows import SIZES, methods
from selection import cases
from wire import along

import gcjax
from gcjax._comm.collectives import dense_mean, scatter_mean
from gcjax._hlo import collectives, totals

STEPS = 3
ROWS = {row.name: row for row in methods()}
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
RARE = ["random_k-entries", "sketch-0.5", "variance-hybrid", "qsgd-4", "sign_vote", "dense-float32"]
PAIRS = [("2x4", name) for name in EVERY_KIND]
PAIRS += [
    ("4x2", "variance-hybrid"),
    ("4x2", "top_k-0.3-owners"),
    ("fast, slow, fast", "onebit"),
    ("2x4", "ef_sign-owners"),
]


def _common(mesh_name, row_name):
    return row_name not in RARE


NAMES = ("mesh_name", "row_name")


class Nested:
    """A row's transform on a mesh with slow and fast axes, one gradient for each of the eight devices."""

    def __init__(self, mesh_name, row_name, mode="shard_map"):
        shape, axes, self.slow, self.fast = MESHES[mesh_name]
        self.mesh = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes))
        self.workers = int(np.prod([self.mesh.shape[axis] for axis in self.slow]))
        self.stripes = 8 // self.workers
        tx = ROWS[row_name].make(self.slow, inner_axis_name=self.fast)
        # Workers of one host lie side by side, as in `inner_means`.
        self.runner = Runner(tx, PARAMS, mode=mode, mesh=self.mesh, axes=self.slow + self.fast)

    def run(self, steps):
        """Every step's updates (workers, ...), the same typed as equal, infos; the last state."""
        runner, everywhere, once, infos = self.runner.restart(), [], [], []
        for gradients, squares in steps:
            everywhere.append(runner.step(gradients, squares))
            once.append(jax.tree.map(np.asarray, runner.replicated))
            infos.append(gcjax.info(runner.state))
        return everywhere, once, infos, runner.state


nested = functools.cache(Nested)


@functools.cache
def steps_of(workers):
    """Gradients and squares of some steps, arrays (workers, ...)."""
    return [(inputs(g), inputs(s)) for g, s in zip(*sample_gradients(workers, SIZES, STEPS), strict=True)]


def inner_means(steps, workers):
    """What the slow workers see: the mean over their inner workers; a sample's square counts 1 / size of that."""
    size = 8 // workers

    def mean(x):
        return x.reshape(workers, size, *x.shape[1:]).mean(axis=1, dtype=np.float32)

    return [(jax.tree.map(mean, g), jax.tree.map(lambda x: mean(x) / size, s)) for g, s in steps]


@cases(NAMES, PAIRS, default=(_common, 3))
def test_the_update_is_that_of_workers_fed_with_inner_means(mesh_name, row_name):
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
        dense_bytes = of_flat.wire_ratio * of_flat.wire_bytes
        assert info.wire_ratio * info.wire_bytes * run.stripes == pytest.approx(dense_bytes, rel=0.01)


@cases(NAMES, [pair for pair in PAIRS if ROWS[pair[1]].conserves], default=(_common, 2))
def test_nothing_is_lost(mesh_name, row_name):
    run = nested(mesh_name, row_name)
    updates, _, _, state = run.run(steps_of(8))
    check_conservation(sample_gradients(8, SIZES, STEPS)[0], updates, residuals(state, run.workers, SIZES))


@cases(NAMES, PAIRS, default=_common)
def test_inner_workers_share_what_moves_along_the_slow_axis(mesh_name, row_name):
    run, row = nested(mesh_name, row_name), ROWS[row_name]
    infos = run.run(steps_of(8))[2]
    moved = collectives(run.runner.compiled_text(*steps_of(8)[0]))
    slow, fast = (along(moved, run.mesh, axes) for axes in (run.slow, run.fast))
    assert len(slow) + len(fast) == len(moved)  # none runs along both
    for info in infos:
        assert any(info.wire_bytes == pytest.approx(total, rel=1e-6) for total in totals(slow))
    large = [c for c in slow if c.kind == "all-reduce" and c.elements >= sum(SIZES) / 2 / run.stripes]
    assert len(large) == row.dense_wire
    assert {c.dtype for c in slow} <= row.wire


def test_without_checks_of_types_the_updates_are_the_same():
    expected = nested("2x4", "onebit").run(steps_of(8))[0]
    got = Nested("2x4", "onebit", "unchecked shard_map").run(steps_of(8))[0]
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_an_inner_axis_that_is_not_bound_is_named():
    tx = gcjax.top_k_compress(0.5, axis_name="data", inner_axis_name="host")
    state = jax.tree.map(lambda x: np.stack([x] * 2), tx.init(np.zeros(4, np.float32)))
    with pytest.raises(ValueError, match=r"'host'.*not bound"):
        jax.pmap(lambda s, g: tx.update(g, s), axis_name="data")(state, np.ones((2, 4), np.float32))


def test_nan_on_one_inner_worker_is_skipped_everywhere():
    run = nested("2x4", "variance-paper")
    (g, s), *_ = steps_of(8)
    bad = {name: x.copy() for name, x in g.items()}
    bad["c"][6, 3] = np.nan
    everywhere, _, infos, _ = run.run([(bad, s), (g, s)])
    assert all(np.isnan(leaf).all() for leaf in everywhere[0].values())
    jax.tree.map(np.testing.assert_array_equal, everywhere[1], run.run([(g, s)])[0][0])
    assert infos[1].skipped == 1


def summed_dtypes(text):
    """Element types of the all-reduces and reduce-scatters of a lowered program."""
    return re.findall(r"(?:all_reduce|reduce_scatter)[^^]*\^bb0\(%arg\d+: tensor<(\w+)>", text)


def test_bfloat16_gradients_are_added_up_in_float32():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), (AxisType.Auto,) * 2)
    tx = gcjax.top_k_compress(0.5, axis_name="slow", inner_axis_name="fast")
    gradient = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    state = tx.init(np.zeros((1, 64), np.float32))

    def update(gradient, state):
        return tx.update(gradient, state)[0]

    specs = (P(("slow", "fast")), gcjax.state_specs(state))
    run = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=P())
    text = jax.jit(run).lower(gradient, jax.eval_shape(lambda: gcjax.distribute(state, mesh))).as_text()
    assert "f32" in summed_dtypes(text)
    assert "bf16" not in summed_dtypes(text)


@pytest.mark.parametrize(
    "mean", [dense_mean, lambda x, axes: scatter_mean(x, P("fast"), axes)], ids=["all-reduce", "reduce-scatter"]
)
def test_means_of_bfloat16_are_added_up_in_float32(mean):
    mesh, split = jax.make_mesh((8,), ("fast",), (AxisType.Auto,)), P("fast")
    run = jax.shard_map(lambda x: mean(x, ("fast",)), mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((64, 8), "bfloat16")).as_text()
    assert summed_dtypes(text) == ["f32"]
