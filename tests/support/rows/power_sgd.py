"""power_sgd_compress: its rows, the oracle and the recommended chain."""

import jax
import numpy as np
import optax
from oracle import F

import gcjax
from rows import SHAPES, Row

SEED = 3


def first_factor(leaf, step, rank, columns):
    """The Q (columns, rank) that is drawn for a leaf in its first compressed step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), step), leaf)
    return np.asarray(jax.random.normal(key, (rank, columns)), np.float64).T


def orthogonalised(p):
    """Gram-Schmidt, in float64, of columns that are independent."""
    p = p.copy()
    for k in range(p.shape[1]):
        for j in range(k):
            p[:, k] -= (p[:, j] @ p[:, k]) * p[:, j]
        p[:, k] /= np.linalg.norm(p[:, k])
    return p


class PowerSGDOracle:
    """Algorithms 1 and 2 of the paper, in float64, one matrix at a time."""

    def __init__(self, workers, sizes, rank=2):
        self.rank, self.steps = rank, 0
        self.shapes = []
        for shape, size in zip(SHAPES.values(), sizes, strict=True):
            m = shape[-1] if shape else 1
            n = size // m
            self.shapes.append((n, m) if size >= 2 * rank * (n + m) else None)
        self.errors = [[np.zeros(size) for size in sizes] for _ in range(workers)]
        self.q = {}

    def step(self, gradients, squares):
        del squares
        mean, floats = [], 0
        for leaf, shape in enumerate(self.shapes):
            taken = [g[leaf] + e[leaf] for g, e in zip(gradients, self.errors, strict=True)]
            if shape is None:
                out = np.mean(taken, axis=0)
                floats += out.size
            else:
                out = self.low_rank(leaf, [x.reshape(shape) for x in taken]).ravel()
                floats += self.rank * sum(shape)
                for error, x in zip(self.errors, taken, strict=True):
                    error[leaf] = x - out
            mean.append(out.astype(F))
        self.steps += 1
        return mean, [(floats, floats, 0, 0)] * len(gradients)

    def low_rank(self, leaf, matrices):
        q = self.q.get(leaf)
        if q is None:
            q = first_factor(leaf, self.steps, self.rank, matrices[0].shape[1])
        p = orthogonalised(np.mean([m @ q for m in matrices], axis=0))
        self.q[leaf] = np.mean([m.T @ p for m in matrices], axis=0)
        return p @ self.q[leaf].T


def make(axis_name=None, **more):
    return gcjax.power_sgd_compress(rank=2, key=jax.random.key(SEED), axis_name=axis_name, **more)


ROWS = [
    Row(
        "power_sgd-rank2",
        "power_sgd_compress",
        make,
        PowerSGDOracle,
        conserves=True,
        rtol=1e-5,
        wire=frozenset({"s32", "f32"}),
    )
]


def chain(axis_name, learning_rate):
    return optax.chain(
        gcjax.power_sgd_compress(rank=2, key=jax.random.key(0), axis_name=axis_name),
        optax.sgd(learning_rate, momentum=0.9, nesterov=True),
    )


CHAINS = {"power_sgd_compress": chain}
