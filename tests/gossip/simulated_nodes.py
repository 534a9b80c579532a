"""Least squares on simulated nodes, as a problem for the simulator and as loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gcjax
from gcjax import gossip
from gcjax.gossip._simulate.clocks import Events
from gcjax.gossip._simulate.nodes import make_trainer

KEY = jax.random.key(5)
LINK = gcjax.Link(1e6, 1e-3, efficiency=1.0)
NODES, SAMPLES, SIZE = 6, 12, 3
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


@functools.cache
def trainer():
    """The nodes' program for least squares of any data of that shape: SGD with momentum, whole batches."""
    tx = optax.sgd(RATE, momentum=MOMENTUM)
    return make_trainer(loss_fn, np.zeros(SIZE, np.float32), tx, least_squares(), NODES, None, KEY)


def events_of(*rows):
    """Events from rows (node, partner, its steps, the partner's steps, whether they meet), a second apart."""
    node, partner, first, second, meets = np.array(rows).T
    steps, seconds = np.stack([first, second], 1).astype(np.int32), np.arange(1.0, len(node) + 1)
    return Events(node.astype(np.int32), partner.astype(np.int32), steps, meets.astype(bool), seconds)


def random_events(count, seed):
    rng = np.random.default_rng(seed)
    pairs = [rng.choice(NODES, 2, replace=False) for _ in range(count)]
    return events_of(*([i, j, rng.integers(4), rng.integers(4), rng.random() < 0.8] for i, j in pairs))


class Loops:
    """Nodes in NumPy, float64, one after the other."""

    def __init__(self, data, models):
        self.data, self.live = data, np.array(models, np.float64)
        self.copy, self.speed = self.live.copy(), np.zeros_like(self.live)
        self.in_flight = []  # (arrives, node, what its copy gains)

    def train(self, i, steps):
        """This node's live model after `steps` steps with momentum; the momentum stays with the node."""
        x = self.live[i].copy()
        for _ in range(steps):
            self.speed[i] = MOMENTUM * self.speed[i] + gradient(self.data, i, x)
            x -= RATE * self.speed[i]
        return x

    def meet_blocking(self, i, j, steps, meets):
        self.live[i], self.live[j] = self.train(i, steps[0]), self.train(j, steps[1])
        if meets:
            self.live[i] = self.live[j] = (self.live[i] + self.live[j]) / 2

    def meet_non_blocking(self, i, j, steps, meets, now, delay):
        for arrives, node, gain in [m for m in self.in_flight if m[0] <= now]:
            self.copy[node] += gain
            self.in_flight.remove((arrives, node, gain))
        update = self.train(i, steps[0]) - self.live[i]
        mean = (self.copy[i] + self.copy[j]) / 2 if meets else self.copy[i]
        gain = mean - self.copy[j] if meets else 0 * mean
        if delay:
            self.in_flight.append((now + delay, j, gain))
        else:
            self.copy[j] = self.copy[j] + gain
        self.copy[i] = self.live[i] = mean + update
