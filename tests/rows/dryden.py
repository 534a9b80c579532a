"""Rows and oracle of dryden_compress."""

import math

import numpy as np
import optax
from oracle import TINY, F, first_that_fit, split

import gcjax
from rows import Row


def select(leaf, density):
    """{position: mean of its class} for the entries of one leaf that are sent."""
    means = {}
    for sign in (1, -1):
        in_class = [i for i in range(len(leaf)) if sign * leaf[i] > 0]
        if not in_class:
            continue
        k = max(1, math.ceil(F(len(in_class)) * F(density)))
        threshold = max(sorted((abs(leaf[i]) for i in in_class), reverse=True)[k - 1], TINY)
        chosen = [i for i in in_class if abs(leaf[i]) >= threshold]
        mean = F(F(np.sum([leaf[i] for i in chosen], dtype=np.float64)) / F(max(len(chosen), 1)))
        means |= dict.fromkeys(chosen, mean)
    return means


class DrydenOracle:
    def __init__(self, workers, sizes, density, capacity):
        self.sizes, self.density, self.capacity = sizes, density, capacity
        self.errors = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.first_word = [0] * workers

    def step(self, gradients, squares):
        del squares
        mean, counts = np.zeros(sum(self.sizes), F), []
        for w, leaves in enumerate(gradients):
            a = self.errors[w] + np.concatenate([np.ravel(leaf) for leaf in leaves])
            means, begin = {}, 0
            for leaf in split(a, self.sizes):
                means |= {begin + i: y for i, y in select(leaf, self.density).items()}
                begin += len(leaf)
            sent, self.first_word[w] = first_that_fit(sorted(means), self.sizes, self.capacity, self.first_word[w])
            for i in sent:
                mean[i] += means[i] / F(len(gradients))
                a[i] -= means[i]
            self.errors[w] = a
            counts.append((len(means), len(sent), 0, len(means) - len(sent)))
        return split(mean, self.sizes), counts


def dryden(name, density, capacity):
    def make(axis_name=None, **more):
        return gcjax.dryden_compress(density, **({"capacity": capacity, "axis_name": axis_name} | more))

    def make_oracle(workers, sizes):
        return DrydenOracle(workers, sizes, density, max(capacity))

    return Row(f"dryden-{name}", "dryden_compress", make, make_oracle, conserves=True, rtol=1e-6, ladder=capacity)


ROWS = [dryden("ladder", 0.05, (64, 96, 128, 416)), dryden("overflow", 0.1, (32,))]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.dryden_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"dryden_compress": chain}
