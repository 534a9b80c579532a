"""Least squares on simulated nodes, as a problem for the simulator and as loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gcjax
from gcjax import gossip
from gcjax.gossip._simulate.algorithms import algorithm_of
from gcjax.gossip._simulate.nodes import make_trainer

KEY = jax.random.key(5)
LINK = gcjax.Link(1e6, 1e-3, efficiency=1.0)
NODES, SAMPLES, SIZE, STEPS = 6, 12, 3, 2
RATE, MOMENTUM = 0.05, 0.5


def least_squares(nodes=NODES, seed=0):
    """Rows and targets of every node, each with its own solution."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(nodes, SAMPLES, SIZE)).astype(np.float32)
    solutions = rng.normal(size=(nodes, SIZE, 1)) + 1
    return a, (a @ solutions)[..., 0].astype(np.float32)


def loss_fn(x, batch):
    a, b = batch
    return jnp.mean((a @ x - b) ** 2) / 2


def gradient(data, node, x):
    a, b = (leaf[node].astype(np.float64) for leaf in data)
    return a.T @ (a @ x - b) / SAMPLES


def simulate(**options):
    """A simulation of least squares; the metric is the mean model."""
    nodes = options.get("nodes", NODES)
    given = {"nodes": NODES, "steps": 40, "evaluate": lambda x: x, "key": KEY, "moments": 2}
    given |= {"data": least_squares(nodes), "tx": optax.sgd(RATE), "params": np.zeros(SIZE, np.float32)}
    return gossip.simulate(loss_fn, **(given | options))


class Units:
    """An algorithm on least squares, SGD with momentum and whole batches, unit by unit."""

    def __init__(self, name, models=None, blocking=False, local_steps=STEPS):
        tx = optax.sgd(RATE, momentum=MOMENTUM)
        arguments = (loss_fn, np.zeros(SIZE, np.float32), tx, least_squares(), NODES, local_steps, None, None, KEY)
        self.state, unit = algorithm_of(make_trainer(*arguments), NODES, name, blocking)
        self._unit = jax.jit(unit)
        if models is not None:
            self.state = self.state._replace(models=np.tile(models, (len(self.state.models) // NODES, 1)))

    def run(self, data, plan, number):
        self.state = self._unit(self.state, data, plan, number)
        return self.state


class Loops:
    """Nodes in NumPy, float64, one after the other."""

    def __init__(self, data, models):
        self.data, self.live = data, np.array(models, np.float64)
        self.copy, self.speed = self.live.copy(), np.zeros_like(self.live)

    def train(self, i):
        """This node's live model after its local steps with momentum; the momentum stays with the node."""
        x = self.live[i].copy()
        for _ in range(STEPS):
            self.speed[i] = MOMENTUM * self.speed[i] + gradient(self.data, i, x)
            x -= RATE * self.speed[i]
        return x

    def meet_blocking(self, i, j):
        self.live[i] = self.live[j] = (self.train(i) + self.train(j)) / 2

    def meet_non_blocking(self, i, j):
        update, mean = self.train(i) - self.live[i], (self.copy[i] + self.copy[j]) / 2
        self.copy[i] = self.live[i] = mean + update
        self.copy[j] = mean
