"""Gossip transforms on a mesh, and draws of their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax._hlo import collectives
from gcjax.gossip._matchings import matchings

KEY = jax.random.key(7)
SHAPES = {"a": (40,), "b": (3, 5)}  # of 2 + 1 mask words
BUCKET = 55
DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Workers:
    """Steps of a gossip transform on a mesh; params and updates are dicts of numpy arrays (workers, *shape).

    The step is compiled once, ahead of time, so a state of other shapes, dtypes or shardings raises.
    """

    def __init__(self, tx, workers):
        mesh = mesh_of(workers)
        state = tx.init({k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()})
        self.start = self.state = gcjax.distribute(state, mesh)
        specs = (P("data"), P("data"), gcjax.state_specs(state))

        def step(params, updates, state):
            params, updates = jax.tree.map(lambda x: x[0], (params, updates))
            new, state = tx.update(updates, state, params)
            return jax.tree.map(lambda x: x[None], optax.apply_updates(params, new)), state

        sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"), specs[2]))
        zeros = stacks(workers, np.zeros)
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        self._compiled = jax.jit(sharded, in_shardings=shardings).lower(zeros, zeros, self.state).compile()

    def restart(self):
        self.state = self.start
        return self

    def step(self, params, updates=None):
        updates = jax.tree.map(np.zeros_like, params) if updates is None else updates
        params, self.state = jax.block_until_ready(self._compiled(params, updates, self.state))
        return jax.tree.map(np.asarray, params)

    def info(self):
        return gcjax.info(self.state)

    def text(self):
        """The compiled program."""
        return self._compiled.as_text()

    def collectives(self):
        """Collectives of the compiled program."""
        return collectives(self.text())


def stacks(workers, draw):
    return {k: draw((workers, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def dyadic(workers, seed=0):
    """Numbers whose sums and halves float32 holds exactly."""
    rng = np.random.default_rng(seed)
    return stacks(workers, lambda size: rng.integers(-512, 513, size) / 64)


def normal(workers, seed=0, mean=0.0, size=1.0):
    rng = np.random.default_rng(seed)
    return stacks(workers, lambda shape: mean + size * rng.normal(size=shape))


def totals(params):
    return {k: x.astype(np.float64).sum(0) for k, x in params.items()}


def mean_of_all(params):
    return {k: np.broadcast_to(x.mean(0, dtype=np.float64), x.shape) for k, x in params.items()}


def assert_same(got, expected, **tolerance):
    for k in SHAPES:
        np.testing.assert_allclose(got[k], expected[k], **{"rtol": 0, "atol": 0, **tolerance})


def partner_of(workers, number, key=KEY):
    """Each worker's partner in an exchange of `swarm_average` on the complete graph."""
    family = matchings("complete", workers)
    return family[int(jax.random.randint(jax.random.fold_in(key, number), (), 0, len(family)))]


def trace_update(tx, workers, params_spec, **options):
    """Trace an update on a mesh, with parameters placed by `params_spec`, with options of `jax.shard_map`."""
    params = {"w": np.ones((workers, 3), np.float32)}
    state = tx.init({"w": np.ones(3, np.float32)})
    specs = (params_spec, gcjax.state_specs(state))
    run = jax.shard_map(
        lambda p, s: tx.update(p, s, p), mesh=mesh_of(workers), in_specs=specs, out_specs=specs, **options
    )
    jax.eval_shape(run, params, gcjax.distribute(state, mesh_of(workers)))


def least_squares(workers=8, samples=12, size=5):
    """Data with a different solution for each worker, and the solution of all data together."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(workers, samples, size))
    y = np.einsum("wsi,wi->ws", x, 1 + rng.normal(size=(workers, size)))
    solution = np.linalg.lstsq(x.reshape(-1, size), y.reshape(-1), rcond=None)[0]
    return x.astype(np.float32), y.astype(np.float32), solution


def loss_fn(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2
