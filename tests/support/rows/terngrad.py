"""Rows and oracle of terngrad_compress."""

import jax
import numpy as np
import optax
from oracle import F, uniform

import gcjax
from rows import OFFSETS, Row, seed_words

KEY = jax.random.key(17)


class TernGradOracle:
    def __init__(self, workers, sizes, clip, shared):
        self.workers, self.sizes, self.clip, self.shared, self.steps = workers, sizes, clip, shared, 0

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n, F) for n in self.sizes]
        for leaf in range(len(self.sizes)):
            clipped = [self.clipped(g[leaf]) for g in gradients]
            scales = [np.abs(x).max() for x in clipped]
            if self.shared:
                scales = [max(scales)] * self.workers
            for w, (x, scale) in enumerate(zip(clipped, scales, strict=True)):
                draws = uniform(seed_words(KEY, self.steps, rank=w), OFFSETS[leaf] + np.arange(len(x)))
                for i in np.flatnonzero(x):
                    if draws[i] < abs(x[i]) / scale:
                        mean[leaf][i] += np.copysign(scale, x[i]) / F(self.workers)
        self.steps += 1
        return mean, [(sum(self.sizes),) * 2 + (0, 0)] * self.workers

    def clipped(self, x):
        limit = F(self.clip * np.sqrt((x.astype(np.float64) ** 2).mean()))
        return np.clip(x, -limit, limit)


def terngrad(aggregate, clip, wire):
    def make(axis_name=None, **more):
        return gcjax.terngrad_compress(clip, aggregate=aggregate, key=KEY, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return TernGradOracle(workers, sizes, clip, shared=aggregate == "sum")

    return Row(f"terngrad-{aggregate}", "terngrad_compress", make, make_oracle, rtol=1e-6, wire=frozenset(wire))


# 1.5 for 2.5, so that much is clipped.
ROWS = [terngrad("sum", 2.5, {"u32", "s32", "f32"}), terngrad("gather", 1.5, {"u32", "s32"})]


def chain(axis_name, learning_rate):
    """Without clipping, which moves the point where the mean of gradients that disagree is zero."""
    return optax.chain(gcjax.terngrad_compress(None, key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"terngrad_compress": chain}
