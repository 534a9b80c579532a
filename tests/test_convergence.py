"""Every method, in the chain that its docstring recommends, reaches the common optimum of workers that disagree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from rows import chains

import gcjax

WORKERS, STEPS = 4, 1500
SHAPES = {"matrix": (12, 9), "kernel": (3, 5, 8), "vector": (33,), "scalar": ()}

# By design: a vote ends at the entrywise median of what the workers want, and moves by steps of the learning rate.
STALLS = {"sign_vote_compress", "signum_compress"}

# Unbiased, but of so much variance that it takes this many times the steps to average it out.
LONGER = {"terngrad_compress": 16}


def problem(seed=0):
    """Worker w has the loss sum h_w (x - c_w)^2 / 2. Returns curvatures, centres and the optimum of the mean loss."""
    rng = np.random.default_rng(seed)
    curvature = {k: rng.uniform(0.5, 2.0, (WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
    centre = {k: rng.normal(size=(WORKERS, *s)).astype(np.float32) * 2 for k, s in SHAPES.items()}
    optimum = {k: (curvature[k] * centre[k]).sum(0) / curvature[k].sum(0) for k in SHAPES}
    return curvature, centre, optimum


def distance_after_training(tx, steps=STEPS):
    """Distance of the trained parameters to the optimum, relative to that of the start, which is 0."""
    curvature, centre, optimum = problem()
    mesh = mesh_of(WORKERS)
    params = jax.tree.map(jnp.zeros_like, optimum)
    opt_state = gcjax.place(tx.init(params), mesh)
    specs = gcjax.state_specs(opt_state)

    def train(params, opt_state, curvature, centre):
        curvature, centre = jax.tree.map(lambda x: x[0], (curvature, centre))

        def step(carry, _):
            params, opt_state = carry
            gradient = jax.tree.map(lambda x, h, c: h * (x - c), params, curvature, centre)
            updates, opt_state = tx.update(gradient, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(step, (params, opt_state), length=steps)[0][0]

    run = jax.shard_map(train, mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=P())
    trained = jax.jit(run)(params, opt_state, curvature, centre)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained))
    return float(optax.tree.norm(optax.tree.sub(trained, optimum)) / optax.tree.norm(optimum))


def decaying(t):
    return 0.2 / (1 + t / 20)


# Entries, a ladder of them, signs, levels, low rank, momentum inside; the others with the marker `full`.
USUAL = {f"{name}_compress" for name in ("top_k", "variance", "ef_sign", "qsgd", "power_sgd", "dgc")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.full) for name in sorted(chains())]
)
def test_the_recommended_chain_reaches_the_common_optimum_of_workers_that_disagree(name):
    distance = distance_after_training(chains()[name]("data", decaying), STEPS * LONGER.get(name, 1))
    if name in STALLS:
        assert distance > 0.1
    else:
        assert distance < 0.02


def test_entries_that_owners_send_back_reach_the_optimum_too():
    # Every worker selects half of the entries, and owners pass on as many in all: most sums come back, many times.
    tx = gcjax.top_k_compress(0.5, transport="reduce_scatter", axis_name="data")
    assert distance_after_training(optax.chain(tx, optax.sgd(decaying))) < 0.02


def test_rounding_without_feedback_stalls_away_from_the_optimum():
    biased = gcjax.variance_compress(alpha=1.5, capacity=160, axis_name="data")
    assert distance_after_training(optax.chain(biased, optax.adam(decaying))) > 0.1
