"""The laws on models, magnitudes and damage drawn at random. The number of a case is its seed."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import Runner, residuals
from rows import methods
from selection import cases

import gcjax

METHODS = methods()
CASES, STEPS = 1000, 4
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)


def drawn_shape(rng):
    """Scalars, vectors, matrices, kernels, some of them empty."""
    return tuple(
        int(n) for n in rng.choice([0, 1, 2, 3, 7, 31, 32, 33, 130], rng.integers(0, 4), p=[0.02] + [0.1225] * 8)
    )


class Case:
    """A method, a model and the inputs of some steps, all drawn from one seed."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.row = METHODS[rng.integers(len(METHODS))]
        self.workers = int(rng.choice([1, 2, 3, 8]))
        dtypes = [DTYPES[i] for i in rng.integers(len(DTYPES), size=rng.integers(1, 6))]
        self.params = {f"leaf{i}": jnp.zeros(drawn_shape(rng), dtype) for i, dtype in enumerate(dtypes)}
        self.bad_step = int(rng.integers(STEPS)) if rng.random() < 0.5 else None
        # Most of float32's range, below 2**80 and where the squares of float16 and float32 leaves do not vanish.
        self.magnitude = 10 ** rng.uniform(-15, min(23, np.log10(self.row.infinite_at) - 1))
        self.steps = [self.inputs(rng, step) for step in range(STEPS)]

    def inputs(self, rng, step):
        limits = {
            name: min(self.magnitude, 1e3 if x.dtype == jnp.float16 else np.inf) for name, x in self.params.items()
        }
        gradient = {
            name: (
                limits[name]
                * rng.normal(size=(self.workers, *x.shape))
                * rng.choice([0, 1e-3, 1], (self.workers, *x.shape))
            )
            for name, x in self.params.items()
        }
        squares = {
            name: np.float32(np.minimum(g**2 * rng.uniform(0, 3, g.shape), 3e38)) for name, g in gradient.items()
        }
        if step == self.bad_step and any(g.size for g in gradient.values()):
            name = rng.choice([name for name, g in gradient.items() if g.size])
            gradient[name].flat[rng.integers(gradient[name].size)] = rng.choice([np.nan, np.inf, -np.inf])
        return {name: jnp.asarray(g, self.params[name].dtype) for name, g in gradient.items()}, squares


@cases("seed", range(CASES), default=6)
def test_laws_hold_on_what_is_drawn(seed):
    case = Case(seed)
    if not sum(x.size for x in case.params.values()):
        return
    runner = Runner(case.row.make("data"), case.params, case.workers)
    sizes = [x.size for x in case.params.values()]
    given, sent, skipped = 0.0, 0.0, 0
    for step, (gradient, squares) in enumerate(case.steps):
        before = jax.tree.map(np.asarray, runner.state.buckets if hasattr(runner.state, "buckets") else runner.state)
        updates = runner.step(gradient, squares)
        assert jax.tree.structure(updates) == jax.tree.structure(gradient)
        for name, update in updates.items():
            assert update.dtype == gradient[name].dtype
            assert update.shape == gradient[name].shape
            assert all(worker.tobytes() == update[0].tobytes() for worker in update)
        if step == case.bad_step:
            skipped += 1
            assert all(np.isnan(np.float32(update)).all() for update in updates.values())
            if hasattr(runner.state, "buckets"):
                jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, runner.state.buckets), before)
            continue
        assert all(np.isfinite(np.float32(update)).all() for update in updates.values())
        given += np.concatenate([np.float64(g).mean(0).ravel() for g in gradient.values()])
        sent += np.concatenate([np.float64(u[0]).ravel() for u in updates.values()])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(runner.state) if jnp.issubdtype(x.dtype, jnp.floating))
    assert gcjax.info(runner.state).skipped == skipped
    exact = all(x.dtype == jnp.float32 for x in case.params.values())  # the updates of others are rounded
    if case.row.conserves and exact:
        left = residuals(runner.state, case.workers, sizes)
        left = np.mean([np.concatenate(leaves) for leaves in left], axis=0, dtype=np.float64)
        scale = max(
            np.abs(np.float64(g)).max(initial=0)
            for gradient, _ in case.steps
            for g in gradient.values()
            if np.isfinite(g).all()
        )
        np.testing.assert_allclose(sent + left, given, atol=1e-5 * max(scale, 1e-37), rtol=0)
