"""The laws, for every row of the table of methods, and for the method of docs/extend.md.

Most look at one compiled step of 8 workers in shard_map. Those that compile more run by default on the first row of
each public name, and the costliest on one row for each kind of exchange.
"""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import own_method
import pytest
from harness import Runner, compress_state, limited_buckets, residuals, sample_gradients
from row_steps import PARAMS, check_conservation, inputs, ran, run, runner_of
from rows import SHAPES, SIZES, group_of, is_first, methods, name_of, of_each_kind, usual
from selection import cases

import gcjax
from gcjax._hlo import collectives

METHODS = [*methods(), *own_method.ROWS]
LAWS = functools.partial(cases, short=lambda row, *others: is_first(row), ids=name_of, marks=group_of)
EVERY_ROW = LAWS("row", METHODS, default=usual)
EVERY_METHOD = LAWS("row", METHODS, default=is_first)


def _is_gradient_sized(collective):
    return collective.kind == "all-reduce" and collective.elements >= sum(SIZES) / 2


PLACES = [
    *((workers, "shard_map") for workers in (8, 1, 2, 3)),
    *((workers, "pmap") for workers in (3, 1, 2, 8)),
    (3, "unchecked shard_map"),
    (8, "two axes"),
]


def _runs_by_default(row, workers, mode):
    place = (workers, mode)
    return (
        (usual(row) and place == (8, "shard_map"))
        or (of_each_kind(row) and usual(row) and place == (3, "pmap"))
        or (row.name == "variance-paper" and place == (8, "two axes"))
    )


@LAWS(
    ("row", "workers", "mode"),
    [(row, *place) for row in METHODS if row.oracle for place in PLACES],
    default=_runs_by_default,
)
def test_updates_and_counts_equal_the_numpy_oracle(row, workers, mode):
    if row.rounds_to_nearest and workers == 3:
        pytest.skip("the last bit of a mean decides between two levels")
    _, gradients, squares, updates, infos = ran(row, workers, mode)
    truth = row.oracle(workers, SIZES)
    for g, s, update, info in zip(gradients, squares, updates, infos, strict=True):
        if row.transport == "two_phase":
            truth.wire.allow(info.capacity, np.concatenate([leaf[0].ravel() for leaf in update.values()]))
        mean, counts = truth.step(g, s)
        for name, leaf in zip(PARAMS, mean, strict=True):
            largest = np.abs(leaf).max()
            for worker in range(workers):
                got = update[name][worker].ravel()
                if row.rtol == 0 and workers != 3:  # XLA multiplies by a rounded 1/3
                    np.testing.assert_array_equal(got, leaf)
                else:
                    rtol = max(row.rtol, 1e-6)
                    np.testing.assert_allclose(got, leaf, rtol=rtol, atol=rtol * max(largest, 0.1))
        ours = np.stack([info.selected, info.sent, info.underflow, info.overflow], axis=1)
        np.testing.assert_array_equal(ours, counts)


@EVERY_ROW
def test_nothing_is_lost(row):
    if not row.conserves:
        pytest.skip("does not keep all that it does not send")
    runner, gradients, _, updates, _ = ran(row)
    check_conservation(gradients, updates, residuals(runner.state, 8, SIZES))


@EVERY_ROW
def test_the_update_is_bit_equal_on_all_workers(row):
    updates = ran(row)[3]
    for update in updates:
        for leaf in update.values():
            for worker in range(1, 8):
                np.testing.assert_array_equal(leaf[worker].view(np.uint32), leaf[0].view(np.uint32))


@EVERY_ROW
def test_the_update_is_typed_as_replicated(row):
    runner, _, _, updates, _ = ran(row)  # compiled with check_vma=True, once more with out_specs=P()
    assert {k: v.shape for k, v in runner.replicated.items()} == SHAPES
    jax.tree.map(lambda once, each: np.testing.assert_array_equal(once, each[0]), runner.replicated, updates[-1])


@LAWS(("row", "workers"), itertools.product(METHODS, (8, 3)), default=lambda row, workers: usual(row) and workers == 8)
def test_wire_bytes_equal_the_compiled_collectives(row, workers):
    runner, gradients, squares, _, infos = ran(row, workers)
    found = collectives(runner.compiled_text(inputs(gradients[0]), inputs(squares[0])))
    always = sum(c.ring_bytes for c in found if not c.computation)
    bytes_of = collections.Counter()  # of each branch, which holds one collective: to owners, or to all
    for c in found:
        bytes_of[c.kind, c.computation] += c.ring_bytes if c.computation else 0
    to_owners, to_all = (
        sorted(moved for (kind, branch), moved in bytes_of.items() if kind == wanted and branch)
        for wanted in ("all-to-all", "all-gather")
    )
    by_capacity = to_all if row.transport == "all_gather" else to_owners
    assert len(by_capacity) == (len(row.capacities) if len(row.capacities) > 1 else 0)
    assert len(to_owners) + len(to_all) == len({branch for _, branch in bytes_of if branch})
    rung_of = {slots: rung for rung, slots in enumerate(sorted({info.capacity for info in infos}))}
    for info in infos:
        if row.transport == "all_gather":
            firsts = [by_capacity[row.capacities.index(info.capacity)]] if by_capacity else [0.0]
            seconds = [0.0]
        else:
            firsts = by_capacity[rung_of[info.capacity] :] or [0.0]  # larger ones may not have been needed
            seconds = to_all or [0.0]
        moved = [always + first + second for first in firsts for second in seconds]
        assert any(info.wire_bytes == pytest.approx(total, rel=1e-6) for total in moved)


@EVERY_ROW
def test_the_capacity_follows_the_data(row):
    if len(row.capacities) < 2:
        pytest.skip("fixed size")
    infos = ran(row)[4]
    for info in infos:
        if row.transport == "all_gather":
            assert info.capacity == next(slots for slots in row.capacities if slots >= info.sent.max())
        assert info.capacity >= info.sent.max()
    used = {info.capacity for info in infos}
    assert len(used) > 1 or row.transport == "two_phase"  # there see tests/laws/test_transports.py
    assert all(info.capacity == max(used) for info in infos if info.overflow.any())


@EVERY_ROW
def test_the_wire_carries_only_the_payload_dtypes(row):
    runner, gradients, squares, _, _ = ran(row)
    found = collectives(runner.compiled_text(inputs(gradients[0]), inputs(squares[0])))
    assert sum(map(_is_gradient_sized, found)) == row.dense_wire
    assert {c.dtype for c in found} <= row.wire


@EVERY_ROW
def test_payload_bits_do_not_exceed_wire_bytes(row):
    for info in ran(row)[4]:
        # A gather moves it 7 times, a sum 2 * 7 / 8 times, a swap 7 / 8 times.
        assert (info.payload_bits > 0).all()
        assert (info.payload_bits / 8 * 7 / 8 <= info.wire_bytes).all()


@EVERY_ROW
def test_two_steps_trace_once(row):
    runner = ran(row)[0]
    assert runner.times_compiled() == 1


@EVERY_METHOD
def test_init_works_on_shapes_alone(row):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    tx = row.make(None)
    abstract = jax.eval_shape(tx.init, shapes)
    concrete = tx.init(PARAMS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), concrete)


@LAWS("row", methods(), default=(is_first, 6))
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_unknown_extra_arguments_are_ignored(row):
    tx = row.make(None)
    state = tx.init(PARAMS)

    def program(update):
        return re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(update)(PARAMS, state)))  # addresses of functions differ

    with_extra = program(lambda g, state: tx.update(g, state, PARAMS, value=1.0, grad=g))
    assert with_extra == program(lambda g, state: tx.update(g, state))


@LAWS(
    ("row", "bad"),
    itertools.product(METHODS, (np.nan, np.inf, -np.inf)),
    default=lambda row, bad: usual(row) and np.isnan(bad),
)
def test_a_non_finite_step_leaves_no_trace(row, bad):
    gradients, squares = sample_gradients(8, SIZES, 4)
    clean, dirty = runner_of(row), runner_of(row)
    for step, (g, s) in enumerate(zip(gradients, squares, strict=True)):
        expected = clean.step(inputs(g), inputs(s))
        got = dirty.step(inputs(g), inputs(s))
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        if step == 1:
            poisoned = inputs(gradients[0])
            poisoned["d"][5, 1, 2, 3] = bad
            update = dirty.step(poisoned, inputs(squares[0]))
            assert all(np.isnan(leaf).all() for leaf in update.values())
    assert gcjax.info(dirty.state).skipped == 1
    assert gcjax.info(clean.state).skipped == 0


LARGEST = np.nextafter(np.float32(2.0**80), np.float32(0))  # what still counts as finite


@EVERY_METHOD
def test_finite_gradients_of_any_size_never_spoil_the_state(row):
    if row.infinite_at < LARGEST:
        pytest.skip("infinite, as documented")
    rng = np.random.default_rng(0)

    def everywhere(draw):
        return {name: draw((8, *shape)).astype(np.float32) for name, shape in SHAPES.items()}

    steps = [
        everywhere(lambda shape: np.full(shape, LARGEST)),
        everywhere(lambda shape: LARGEST * rng.choice([-1, 1], shape)),
        everywhere(lambda shape: LARGEST * 10 ** rng.uniform(-68, 0, shape) * rng.choice([-1, 1], shape)),
        everywhere(lambda shape: np.full(shape, -1e-40)),
        everywhere(lambda shape: rng.normal(size=shape)),
    ]
    runner, updates = runner_of(row), []
    for g in steps:
        squares = {name: np.float32(np.minimum(x.astype(np.float64) ** 2, 3e38)) for name, x in g.items()}
        update = runner.step(g, squares)
        updates.append(update)
        assert all(np.isfinite(leaf).all() for leaf in update.values())
        assert all((leaf == leaf[0]).all() for leaf in update.values())
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(runner.state))
    assert gcjax.info(runner.state).skipped == 0
    assert np.isfinite(gcjax.info(runner.state).residual_norm).all()
    if row.conserves:
        gradients = [[[leaf[worker].ravel() for leaf in g.values()] for worker in range(8)] for g in steps]
        check_conservation(gradients, updates, residuals(runner.state, 8, SIZES), LARGEST)


@LAWS(
    ("row", "too_large"),
    itertools.product(METHODS, (2.0**80, -3e38)),
    default=lambda row, too_large: is_first(row) and too_large > 0,
)
def test_gradients_too_large_to_add_up_count_as_not_finite(row, too_large):
    gradients, squares = sample_gradients(8, SIZES, 1)
    runner = runner_of(row)
    g = inputs(gradients[0])
    g["d"][5, 1, 2, 3] = too_large
    update = runner.step(g, inputs(squares[0]))
    assert all(np.isnan(leaf).all() for leaf in update.values())
    assert gcjax.info(runner.state).skipped == 1


@LAWS("row", METHODS, default=(of_each_kind, 3))
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_float16_updates_saturate_and_are_counted(row):
    g = {name: jnp.full(shape, 6e4, jnp.float16) for name, shape in {**SHAPES, "e": (300,)}.items()}
    wide = {name: x.astype(jnp.float32) for name, x in g.items()}
    tx = row.make(None, **({"capacity": 64} if len(row.capacities) > 1 else {}))
    step, state, wide_state = jax.jit(tx.update), tx.init(g), tx.init(wide)
    for _ in range(5):
        update, state = step(g, state)
        exact, wide_state = step(wide, wide_state)
        for got, want in zip(jax.tree.leaves(update), jax.tree.leaves(exact), strict=True):
            np.testing.assert_array_equal(got, jnp.clip(want, -65504, 65504).astype(jnp.float16))
        beyond = sum(int((jnp.abs(leaf) > 65504).sum()) for leaf in exact.values())
        assert (gcjax.info(state).skipped, gcjax.info(state).saturated) == (0, beyond)
    assert np.isfinite(gcjax.info(state).residual_norm).all()


@EVERY_METHOD
def test_bad_squares_count_as_non_finite(row):
    if not row.uses_squares:
        pytest.skip("checked, but not used")
    gradients, squares = sample_gradients(8, SIZES, 1)
    for bad in (np.nan, np.inf, -1.0):
        runner = runner_of(row)
        poisoned = inputs(squares[0])
        poisoned["a"][1, 3, 4] = bad
        update = runner.step(inputs(gradients[0]), poisoned)
        assert all(np.isnan(leaf).all() for leaf in update.values())


@EVERY_METHOD
def test_same_inputs_give_the_same_bits(row):
    first, second = ran(row)[3], run(row)[3]
    for a, b in zip(first, second, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


EDGES = {
    "empty tree": {},
    "no entries": {"x": np.zeros((0, 3), np.float32)},
    "many": {
        "scalar": np.float32(2.5),
        "one entry": np.ones(1, np.float32),
        "zeros": np.zeros(100, np.float32),
        "constants and ties": np.full(2000, -0.75, np.float32),
        "tiny": np.full(40, 1e-38, np.float32),
        "huge": np.array([1e24, -1e24, 1.0], np.float32),
        "empty": np.zeros(0, np.float32),
        "more dimensions": np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 4, 5),
        "bfloat16": np.linspace(-1, 1, 64).astype(jnp.bfloat16),
        "float16": np.linspace(-1, 1, 64).astype(np.float16),
    },
}


@LAWS(
    ("row", "edge"),
    [(row, edge) for edge in EDGES for row in METHODS],
    default=(lambda row, edge: of_each_kind(row), 8),
)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_edge_inputs_keep_structure_and_stay_finite(row, edge):
    g = {name: jnp.asarray(x) for name, x in EDGES[edge].items()}
    if row.infinite_at < 1e24:
        g.pop("huge", None)
    tx = row.make(None, **({"capacity": (64,)} if len(row.capacities) > 1 else {}))
    state = tx.init(g)
    step = jax.jit(tx.update)
    for _ in range(3):
        updates, state = step(g, state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(lambda x: (x.shape, x.dtype), g)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(updates))
    assert np.isfinite(gcjax.info(state).residual_norm).all()


@LAWS("row", METHODS, default=(of_each_kind, 2))
def test_several_buckets_work_like_one(row):
    gradients, squares = sample_gradients(2, SIZES, 3)
    runs = []
    for limit in (1 << 28, 320) if row.bucket_invariant else (320,):
        with limited_buckets(limit):
            runner = Runner(row.make("data", **({"capacity": 864} if len(row.capacities) > 1 else {})), PARAMS, 2)
            runs.append([runner.step(inputs(g), inputs(s)) for g, s in zip(gradients, squares, strict=True)])
    assert len(compress_state(runner.state).buckets.value) == 3
    assert all(np.isfinite(leaf).all() for update in runs[-1] for leaf in update.values())
    if row.conserves:
        check_conservation(gradients, runs[-1], residuals(runner.state, 2, SIZES))
    if row.bucket_invariant:
        for a, b in zip(*runs, strict=True):
            jax.tree.map(np.testing.assert_array_equal, a, b)
