"""10,000 steps of every method: memory stays flat, nothing is compiled again, workers stay equal, counters count."""

import gc

import jax
import numpy as np
import pytest
from harness import sample_gradients
from row_steps import inputs, runner_of
from rows import SIZES, group_of, is_first, methods, name_of, of_each_kind
from selection import cases

import gcjax

STEPS = 10_000


@pytest.mark.full
@cases("row", [row for row in methods() if is_first(row) or of_each_kind(row)], ids=name_of, marks=group_of)
def test_ten_thousand_steps_leave_nothing_behind(row):
    gradients, squares = sample_gradients(8, SIZES, 10)
    pairs = [(inputs(g), inputs(s)) for g, s in zip(gradients, squares, strict=True)]
    pairs += [(jax.tree.map(np.negative, g), s) for g, s in pairs]  # so that what waits does not grow for ever
    runner, arrays = runner_of(row), None
    for step in range(STEPS):
        updates = runner.step(*pairs[step % len(pairs)])
        if step % 1000 == 999:
            assert all((leaf == leaf[0]).all() for leaf in updates.values())
            gc.collect()
            arrays = arrays or len(jax.live_arrays())
            assert len(jax.live_arrays()) == arrays
    assert runner.times_compiled() == 1
    seen = gcjax.info(runner.state)
    assert (seen.skipped, seen.misplaced, seen.identical, seen.saturated) == (0, 0, 0, 0)
    assert np.isfinite(seen.residual_norm).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(runner.state) if x.dtype == np.float32)
    gcjax.check_training(runner.state)
