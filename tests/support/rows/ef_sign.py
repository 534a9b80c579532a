"""Row and oracle of ef_sign_compress."""

import numpy as np
import optax
from oracle import F

import gcjax
from rows import Row


class EFSignOracle:
    def __init__(self, workers, sizes):
        self.errors = [[np.zeros(n, F) for n in sizes] for _ in range(workers)]
        self.sizes = sizes

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n, F) for n in self.sizes]
        for leaves, errors in zip(gradients, self.errors, strict=True):
            for i, g in enumerate(leaves):
                a = g + errors[i]
                scale = F(np.mean(np.abs(a), dtype=np.float64))
                sent = np.where(a < 0, -scale, scale)
                errors[i] = a - sent
                mean[i] += sent / F(len(gradients))
        entries = sum(self.sizes)
        return mean, [(entries, entries, 0, 0)] * len(gradients)


def make(axis_name=None, **more):
    return gcjax.ef_sign_compress(axis_name=axis_name, **more)


ROWS = [Row("ef_sign", "ef_sign_compress", make, EFSignOracle, conserves=True, rtol=1e-5)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.ef_sign_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"ef_sign_compress": chain}
