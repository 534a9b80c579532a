"""The exchange one step late: the same updates as without, one step later; nothing lost, kept or mixed up between."""

import functools

import jax
import numpy as np
import pytest
from harness import Runner, compress_state, residuals, sample_gradients
from rows import SHAPES, SIZES
from test_laws import EVERY_KIND, PARAMS, check_conservation, inputs, runner_of

import gcjax
from gcjax._hlo import collectives

STEPS = 4
NOTHING = {name: np.zeros((8, *shape), np.float32) for name, shape in SHAPES.items()}


def fixed(row):
    """The options that give a row's messages a fixed length."""
    more = {"capacity": max(row.capacities)} if len(row.capacities) > 1 else {}
    return more | ({"transport": "all_gather"} if row.transport == "two_phase" else {})


def late(row):
    return Runner(row.make("data", overlap="next_step", **fixed(row)), PARAMS, 8)


def steps():
    gradients, squares = sample_gradients(8, SIZES, STEPS)
    return [(inputs(g), inputs(s)) for g, s in zip(gradients, squares, strict=True)]


def run(runner, pairs):
    return [runner.step(g, s) for g, s in pairs]


def check_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def compiled():
    """Row -> its compiled runner, for all tests of a row."""
    return {}


def late_of(row, compiled):
    if row.name not in compiled:
        compiled[row.name] = late(row)
    return compiled[row.name].restart()


@EVERY_KIND
def test_updates_are_those_of_the_step_before(row, compiled):
    plain = Runner(row.make("data", **fixed(row)), PARAMS, 8) if fixed(row) else runner_of(row)
    runner = late_of(row, compiled)
    at_once = run(plain, steps())
    one_late = run(runner, [*steps(), (NOTHING, NOTHING)])
    check_equal(one_late[1:], at_once)
    assert all((leaf == 0).all() for leaf in one_late[0].values())
    ours, theirs = gcjax.info(runner.state), gcjax.info(plain.state)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(lambda once, each: np.testing.assert_array_equal(once, each[0]), runner.replicated, one_late[-1])


@EVERY_KIND
def test_what_waits_is_not_lost(row, compiled):
    if not row.conserves:
        pytest.skip("does not keep all that it does not send")
    runner = late_of(row, compiled)
    updates = run(runner, steps())
    gradients = sample_gradients(8, SIZES, STEPS)[0]
    waiting = compress_state(runner.state).waiting.stacked().taken.gradients
    left = residuals(runner.state, 8, SIZES)
    for worker, leaves in enumerate(left):
        leaves[:] = [kept + np.ravel(x[worker]) for kept, x in zip(leaves, waiting[0], strict=True)]
    check_conservation(gradients, updates, left)


@EVERY_KIND
def test_a_non_finite_gradient_spoils_the_next_update_alone(row, compiled):
    clean, dirty = late_of(row, compiled), late_of(row, compiled)
    pairs = steps()
    poisoned = {name: x.copy() for name, x in pairs[0][0].items()}
    poisoned["d"][5, 1, 2, 3] = np.nan
    expected = run(clean, pairs)
    got = run(dirty, [*pairs[:2], (poisoned, pairs[0][1]), *pairs[2:]])
    assert all(np.isnan(leaf).all() for leaf in got.pop(3).values())
    check_equal(got, expected)
    assert (gcjax.info(dirty.state).skipped, gcjax.info(clean.state).skipped) == (1, 0)


@EVERY_KIND
def test_it_resumes_with_a_gradient_waiting(row, compiled):
    runner = late_of(row, compiled)
    whole = run(runner, steps())
    resumed = runner.restart()
    run(resumed, steps()[:2])
    shardings = jax.tree.map(lambda x: x.sharding, resumed.state)
    resumed.state = jax.device_put(jax.tree.map(np.asarray, resumed.state), shardings)
    check_equal(run(resumed, steps()[2:]), whole[2:])


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_squares_wait_with_their_gradient():
    """Without squares, the gradient's own stand for them, as without overlap."""
    runner = Runner(
        gcjax.variance_compress(capacity=320, transport="all_gather", axis_name="data", overlap="next_step"), PARAMS, 8
    )
    plain = Runner(gcjax.variance_compress(capacity=320, transport="all_gather", axis_name="data"), PARAMS, 8)
    gradients = [g for g, _ in steps()]
    at_once = [plain.step(g) for g in gradients]
    check_equal([runner.step(g) for g in [*gradients, NOTHING]][1:], at_once)


def test_a_state_without_waiting_gradient_is_refused():
    grads = {"a": np.ones(40, np.float32)}
    plain, ahead = (gcjax.top_k_compress(0.1, overlap=overlap) for overlap in (None, "next_step"))
    with pytest.raises(ValueError, match="its overlap is None, that of this transform 'next_step'"):
        ahead.update(grads, plain.init(grads))
    with pytest.raises(ValueError, match="its overlap is 'next_step', that of this transform None"):
        plain.update(grads, ahead.init(grads))


def test_an_unknown_overlap_is_refused():
    with pytest.raises(ValueError, match="overlap must be one of None, 'next_step', got 'backward'"):
        gcjax.top_k_compress(0.1, overlap="backward")


TWO_PHASES = {"capacity": 320, "transport": "two_phase"}


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(gcjax.variance_compress),
        functools.partial(gcjax.variance_compress, capacity=(64, 320)),
        functools.partial(gcjax.variance_compress, **TWO_PHASES),
        functools.partial(gcjax.top_k_compress, 0.1, transport="two_phase"),
        functools.partial(gcjax.drop_compress, 0.5),
    ],
    ids=["default", "two capacities", "two phases", "top-k", "drop"],
)
def test_messages_whose_length_follows_the_data_are_refused(make):
    """On accelerators nothing would overlap."""
    gradient, square = steps()[0]
    tx = make(axis_name="data", overlap="next_step")
    with pytest.raises(ValueError, match="overlap='next_step' needs messages of a fixed length, and these have one of"):
        Runner(tx, PARAMS, 8).step(gradient, square)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (functools.partial(gcjax.variance_compress, **TWO_PHASES, owner_density=0.125), {"all-to-all", "all-gather"}),
        (functools.partial(gcjax.top_k_compress, 0.1), {"all-gather"}),  # two phases would have several lengths
    ],
    ids=["owner density", "auto"],
)
def test_messages_of_a_fixed_length_move_outside_of_conditionals(make, kinds):
    runner = Runner(make(axis_name="data", overlap="next_step"), PARAMS, 8)
    found = collectives(runner.compiled_text(*steps()[0]))
    assert kinds | {"all-reduce"} == {c.kind for c in found}
    assert not any(c.computation for c in found)
