"""demo_compress: its rows, the oracle and the recommended chain."""

import functools
import math

import numpy as np
from chunk_oracle import ChunkedLeaf

import gcjax
from rows import SHAPES, Row, before_sgd, made_by


def cosines(n):
    """The orthonormal DCT-II as a matrix, by its definition."""
    matrix = np.array([[math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)] for k in range(n)])
    return matrix * np.array([[math.sqrt((1 if k == 0 else 2) / n)] for k in range(n)])


class LeafOracle(ChunkedLeaf):
    """One leaf of one worker: delta as a matrix, padded to whole chunks."""

    def __init__(self, shape, top_k, chunk, decay):
        super().__init__(shape, chunk)
        self.k, self.decay = min(top_k, self.height * self.width), decay
        self.delta = self.matrix(0.0)

    def step(self, g):
        """What the receivers see of the gradient g."""
        self.delta = self.decay * self.delta + self.matrix(g)
        sent = np.zeros_like(self.delta)
        down, across = cosines(self.height), cosines(self.width)
        for part in self.chunks:
            coefficients = down @ self.delta[part] @ across.T
            kept = np.argsort(-np.abs(coefficients), axis=None, kind="stable")[: self.k]
            q = np.zeros(coefficients.size)
            q[kept] = coefficients.reshape(-1)[kept]
            sent[part] = down.T @ q.reshape(coefficients.shape) @ across
        self.delta -= sent
        return self.flat(sent)


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
        count = sum(leaf.k * len(leaf.chunks) for leaf in self.workers[0])
        return mean, [(count, count, 0, 0)] * len(gradients)


def row(name, rare=False, **options):
    return Row(
        f"demo-{name}",
        "demo_compress",
        made_by(gcjax.contrib.demo_compress, **options),
        functools.partial(DemoOracle, **options),
        conserves=options["decay"] == 1,
        rtol=1e-5,
        rare=rare,
    )


ROWS = [row("padded", top_k=3, chunk=6, decay=1.0), row("decay", rare=True, top_k=8, chunk=64, decay=0.5)]
# Without DeMo's sign, with which every step is as long as the learning rate: see the last test of training.
CHAINS = {"demo_compress": before_sgd(gcjax.contrib.demo_compress)}
