"""Row and oracle of natural_compress."""

import jax
import numpy as np
import optax
from oracle import F, floor_log2, hash_bits

import gcjax
from rows import OFFSETS, Row, seed_words

KEY = jax.random.key(13)


class NaturalOracle:
    def __init__(self, workers, sizes):
        self.workers, self.sizes, self.steps = workers, sizes, 0

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n, F) for n in self.sizes]
        for w, leaves in enumerate(gradients):
            words = seed_words(KEY, self.steps, rank=w)
            for leaf, x in enumerate(leaves):
                draws = (hash_bits(words, OFFSETS[leaf] + np.arange(len(x))) >> np.uint32(9)) * 2.0**-23
                for i in np.flatnonzero(x):
                    power = 2.0 ** floor_log2(x[i])
                    up = draws[i] >= 2 - abs(float(x[i])) / power  # as likely as the mantissa
                    mean[leaf][i] += F(np.copysign(2 * power if up else power, x[i]) / self.workers)
        self.steps += 1
        return mean, [(sum(self.sizes),) * 2 + (0, 0)] * self.workers


def make(axis_name=None, **more):
    return gcjax.natural_compress(key=KEY, axis_name=axis_name, **more)


ROWS = [Row("natural", "natural_compress", make, NaturalOracle)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.natural_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"natural_compress": chain}
