"""Steps of a row's transform on eight devices, compiled once for all laws."""

import functools

import numpy as np
from harness import Runner, axes_of, sample_gradients, stacked
from rows import SHAPES, SIZES

import gcjax

STEPS = 6
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


@functools.cache
def _compiled(row, workers, mode):
    return Runner(row.make(axes_of(mode)), PARAMS, workers, mode)


def runner_of(row, workers=8, mode="shard_map"):
    """A runner with fresh state; the compiled step is shared by all laws."""
    return _compiled(row, workers, mode).restart()


def inputs(per_worker):
    """One list of flat leaves per worker -> the tree that the step takes, leaves (workers, *shape)."""
    return {name: x.reshape(-1, *SHAPES[name]) for name, x in stacked(per_worker).items()}


def run(row, workers=8, mode="shard_map"):
    """A runner after `STEPS` steps, with every step's inputs, updates and infos."""
    runner = runner_of(row, workers, mode)
    gradients, squares = sample_gradients(workers, SIZES, STEPS)
    updates, infos = [], []
    for g, s in zip(gradients, squares, strict=True):
        updates.append(runner.step(inputs(g), inputs(s)))
        infos.append(gcjax.info(runner.state))
    return runner, gradients, squares, updates, infos


ran = functools.cache(run)  # most laws look at the same steps and change nothing


def check_conservation(gradients, updates, left, unit=1.0):
    """The sum of the updates and the mean residual make up the sum of the dense means, but for rounding of `unit`."""
    for leaf, name in enumerate(PARAMS):
        dense = sum(np.mean([g[leaf] for g in step], axis=0, dtype=np.float64) for step in gradients)
        sent = sum(u[name][0].astype(np.float64) for u in updates).ravel()
        kept = np.mean([worker[leaf] for worker in left], axis=0, dtype=np.float64)
        np.testing.assert_allclose((sent + kept) / unit, dense / unit, rtol=1e-6, atol=1e-5)
