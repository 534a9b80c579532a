"""Rows and oracle of qsgd_compress."""

import jax
import numpy as np
import optax
from oracle import F, uniform

import gcjax
from rows import OFFSETS, Row, seed_words

KEY = jax.random.key(11)


class QSGDOracle:
    def __init__(self, workers, sizes, bits, bucket_size, norm):
        self.workers, self.sizes, self.steps = workers, sizes, 0
        self.levels, self.bucket_size, self.norm = 2 ** (bits - 1) - 1, bucket_size, norm

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n, F) for n in self.sizes]
        for w, leaves in enumerate(gradients):
            words = seed_words(KEY, self.steps, rank=w)
            for leaf, x in enumerate(leaves):
                for begin in range(0, len(x), self.bucket_size):
                    block = x[begin : begin + self.bucket_size]
                    draws = uniform(words, OFFSETS[leaf] + begin + np.arange(len(block)))
                    mean[leaf][begin : begin + len(block)] += self.quantised(block, draws) / F(self.workers)
        self.steps += 1
        return mean, [(sum(self.sizes),) * 2 + (0, 0)] * self.workers

    def quantised(self, block, draws):
        exact = block.astype(np.float64)
        norm = F(np.abs(block).max() if self.norm == "max" else np.sqrt((exact**2).sum()))
        sent = np.zeros(len(block), F)
        for i, x in enumerate(block):
            if x != 0:
                position = F(self.levels) * (abs(x) / norm)
                level = np.floor(position)
                level += draws[i] < position - level
                sent[i] = np.copysign(norm * (level / F(self.levels)), x)
        return sent


def qsgd(name, bits, bucket_size, norm, **options):
    def make(axis_name=None, **more):
        return gcjax.qsgd_compress(bits, bucket_size, norm=norm, key=KEY, axis_name=axis_name, **options, **more)

    def make_oracle(workers, sizes):
        return QSGDOracle(workers, sizes, bits, bucket_size, norm)

    return Row(name, "qsgd_compress", make, make_oracle, rtol=1e-6)


ROWS = [qsgd("qsgd-4", 4, 512, "max"), qsgd("qsgd-3-elias", 3, 64, "l2", encoding="elias")]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.qsgd_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"qsgd_compress": chain}
