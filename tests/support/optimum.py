"""A problem on which workers disagree, and how far from its optimum a transform ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax

WORKERS, STEPS = 4, 1500
SHAPES = {"matrix": (12, 9), "kernel": (3, 5, 8), "vector": (33,), "scalar": ()}


def problem():
    """Worker w has the loss sum h_w (x - c_w)^2 / 2. Returns curvatures, centres and the optimum of the mean loss."""
    rng = np.random.default_rng(0)
    curvature = {k: rng.uniform(0.5, 2.0, (WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
    centre = {k: rng.normal(size=(WORKERS, *s)).astype(np.float32) * 2 for k, s in SHAPES.items()}
    optimum = {k: (curvature[k] * centre[k]).sum(0) / curvature[k].sum(0) for k in SHAPES}
    return curvature, centre, optimum


def distance_after_training(tx, steps=STEPS):
    """Distance of the trained parameters to the optimum, relative to that of the start, which is 0."""
    curvature, centre, optimum = problem()
    mesh = mesh_of(WORKERS)
    params = jax.tree.map(jnp.zeros_like, optimum)
    opt_state = gcjax.distribute(tx.init(params), mesh)
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
