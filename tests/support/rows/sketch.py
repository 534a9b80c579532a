"""sketch_compress: its rows, the oracle and the recommended chain."""

import functools

import jax
import numpy as np
from oracle import INDEX, F, hash_bits, largest, quick_bits, split

import gcjax
from rows import POSITIONS, Row, before_sgd, made_by, seed_words

KEY = jax.random.key(12)


class SketchOracle:
    def __init__(self, workers, sizes, *, density, rows, columns, momentum):
        self.sizes, self.k, self.rows, self.columns = sizes, max(1, int(density * sum(sizes))), rows, columns
        self.momentum = F(momentum)
        self.u = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.v = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.position = np.concatenate(POSITIONS)
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        workers = F(len(gradients))
        for leaves, u, v in zip(gradients, self.u, self.v, strict=True):
            u[:] = self.momentum * u + np.concatenate([np.ravel(leaf) for leaf in leaves])
            v[:] = v + u
        total = sum(self.v)
        words = seed_words(KEY, self.steps)
        stretches = 4096 // self.columns
        estimates = np.zeros((self.rows, len(total)), F)
        for row in range(self.rows):
            rotation = hash_bits(words, self.rows + row * stretches + np.arange(stretches)) % np.uint32(self.columns)
            cell = [(at + int(rotation[at // self.columns])) % self.columns for at in self.position]
            negative = quick_bits(hash_bits(words, [row])[0], self.position) >= 2**31
            table = np.zeros(self.columns, F)
            for i, x in enumerate(total):
                table[cell[i]] += -x if negative[i] else x
            table /= workers
            estimates[row] = np.where(negative, -table[cell], table[cell])
        candidates = sorted(largest(np.abs(np.median(estimates, axis=0)), 4 * self.k), key=lambda i: INDEX[i])
        w = total[candidates] / workers
        mean = np.zeros_like(total)
        sent = [candidates[i] for i in largest(np.abs(w), self.k, range(len(w)))]
        for i in sent:
            mean[i] = total[i] / workers
            for u, v in zip(self.u, self.v, strict=True):
                u[i] = v[i] = 0
        self.steps += 1
        return split(mean, self.sizes), [(len(sent), len(sent), 0, 0)] * len(gradients)


def row(momentum):
    options = {"density": 0.02, "rows": 3, "columns": 64, "momentum": momentum}
    return Row(
        f"sketch-{momentum}",
        "sketch_compress",
        made_by(gcjax.contrib.sketch_compress, **options, key=KEY),
        functools.partial(SketchOracle, **options),
        conserves=momentum == 0,
        wire=frozenset({"s32", "f32"}),
        rare=momentum > 0,
    )


ROWS = [row(0.0), row(0.5)]
CHAINS = {"sketch_compress": before_sgd(gcjax.contrib.sketch_compress, 0.1, 5, 128, key=jax.random.key(0))}
