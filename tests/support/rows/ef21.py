"""Row and oracle of ef21_compress."""

import numpy as np
import optax
from oracle import F, largest, split

import gcjax
from rows import Row

DENSITY = 0.05


class EF21Oracle:
    def __init__(self, workers, sizes):
        self.sizes, self.k = sizes, max(1, int(DENSITY * sum(sizes)))
        self.known = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.mean = np.zeros(sum(sizes), F)

    def step(self, gradients, squares):
        del squares
        total, counts = np.zeros(sum(self.sizes), F), []
        for leaves, known in zip(gradients, self.known, strict=True):
            change = np.concatenate([np.ravel(leaf) for leaf in leaves]) - known
            chosen = largest(np.abs(change), self.k)
            for i in sorted(chosen):
                known[i] += change[i]
                total[i] += change[i] / F(len(gradients))
            counts.append((len(chosen), len(chosen), 0, 0))
        self.mean = self.mean + total
        return split(self.mean, self.sizes), counts


def make(axis_name=None, **more):
    return gcjax.ef21_compress(DENSITY, axis_name=axis_name, **more)


ROWS = [Row("ef21", "ef21_compress", make, EF21Oracle)]


def chain(axis_name, learning_rate):
    return optax.chain(
        gcjax.per_worker(optax.ema(0.9), axis_name),
        gcjax.ef21_compress(0.2, axis_name=axis_name),
        optax.sgd(learning_rate),
    )


CHAINS = {"ef21_compress": chain}
