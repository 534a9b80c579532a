"""Rows and oracle of demo_compress."""

import math

import numpy as np
import optax

import gcjax
from rows import SHAPES, Row


def cosines(n):
    """The orthonormal DCT-II as a matrix, by its definition."""
    matrix = np.array([[math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)] for k in range(n)])
    return matrix * np.array([[math.sqrt((1 if k == 0 else 2) / n)] for k in range(n)])


def parts(length, chunk):
    """An axis in the fewest parts of equal length up to `chunk`: (number, length)."""
    number = math.ceil(length / chunk)
    return number, math.ceil(length / number)


class LeafOracle:
    """One leaf of one worker: delta as a matrix, filled up to whole chunks."""

    def __init__(self, shape, top_k, chunk, decay):
        size = math.prod(shape)
        if len(shape) > 1:
            self.rows, self.columns = size // shape[-1], shape[-1]
        elif size <= chunk**2:
            self.rows, self.columns = 1, size
        else:
            self.rows, self.columns = math.ceil(size / chunk), chunk
        (down, self.height), (across, self.width) = parts(self.rows, chunk), parts(self.columns, chunk)
        self.size, self.decay = size, decay
        self.k = min(top_k, self.height * self.width)
        self.corners = [(i * self.height, j * self.width) for i in range(down) for j in range(across)]
        self.delta = np.zeros((down * self.height, across * self.width))

    def step(self, g):
        """Returns what the receivers see."""
        taken = np.zeros(self.rows * self.columns)
        taken[: self.size] = g
        self.delta *= self.decay
        self.delta[: self.rows, : self.columns] += taken.reshape(self.rows, self.columns)
        sent = np.zeros_like(self.delta)
        down, across = cosines(self.height), cosines(self.width)
        for i, j in self.corners:
            part = slice(i, i + self.height), slice(j, j + self.width)
            coefficients = down @ self.delta[part] @ across.T
            kept = np.argsort(-np.abs(coefficients), axis=None, kind="stable")[: self.k]
            q = np.zeros(coefficients.size)
            q[kept] = coefficients.reshape(-1)[kept]
            sent[part] = down.T @ q.reshape(coefficients.shape) @ across
        self.delta -= sent
        return sent[: self.rows, : self.columns].reshape(-1)[: self.size]


class DemoOracle:
    def __init__(self, workers, sizes, **options):
        del sizes
        self.workers = [[LeafOracle(shape, **options) for shape in SHAPES.values()] for _ in range(workers)]

    def step(self, gradients, squares):
        del squares
        seen = [
            [leaf.step(g) for leaf, g in zip(leaves, own, strict=True)]
            for leaves, own in zip(self.workers, gradients, strict=True)
        ]
        mean = [np.mean(leaf, axis=0).astype(np.float32) for leaf in zip(*seen, strict=True)]
        count = sum(leaf.k * len(leaf.corners) for leaf in self.workers[0])
        return mean, [(count, count, 0, 0)] * len(gradients)


def demo(name, **options):
    def make(axis_name=None, **more):
        return gcjax.demo_compress(**options, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return DemoOracle(workers, sizes, **options)

    return Row(f"demo-{name}", "demo_compress", make, make_oracle, conserves=options["decay"] == 1, rtol=1e-5)


ROWS = [demo("padded", top_k=3, chunk=6, decay=1.0), demo("decay", top_k=8, chunk=64, decay=0.5)]


# Without the sign that DeMo takes: each step of that is as large as the learning rate, so that it ends a few of them
# away from the optimum, see tests/test_demo.py.
def chain(axis_name, learning_rate):
    return optax.chain(gcjax.demo_compress(axis_name=axis_name), optax.scale_by_learning_rate(learning_rate))


CHAINS = {"demo_compress": chain}
