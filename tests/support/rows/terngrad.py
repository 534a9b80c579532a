"""terngrad_compress: its rows, the oracle and the recommended chain."""

import jax
import numpy as np
from codec_oracle import CodecOracle
from oracle import F, uniform

import gcjax
from rows import POSITIONS, Row, before_sgd, made_by, seed_words

KEY = jax.random.key(17)


def clipped_to(clip, x):
    limit = F(clip * np.sqrt((x.astype(np.float64) ** 2).mean()))
    return np.clip(x, -limit, limit)


def ternary(x, scale, draws):
    return np.where(draws * scale < np.abs(x), np.copysign(scale, x), F(0))


class SumOracle:
    def __init__(self, workers, sizes, clip):
        self.workers, self.sizes, self.clip, self.steps = workers, sizes, clip, 0

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n, F) for n in self.sizes]
        for leaf in range(len(self.sizes)):
            clipped = [clipped_to(self.clip, g[leaf]) for g in gradients]
            scale = np.abs(clipped).max()
            for w, x in enumerate(clipped):
                draws = uniform(seed_words(KEY, self.steps, rank=w), POSITIONS[leaf])
                mean[leaf] += ternary(x, scale, draws) / F(self.workers)
        self.steps += 1
        return mean, [(sum(self.sizes),) * 2 + (0, 0)] * self.workers


def code(leaves, places, words):
    draws = [uniform(words, positions) for positions in places.positions]
    return [ternary(x, np.abs(x).max(), u) for x, u in zip(leaves, draws, strict=True)]


def code_mean(leaves, places, words):
    """The nearest of the three values."""
    del places, words
    return [ternary(x, np.abs(x).max(), F(0.5)) for x in leaves]


def row(name, aggregate, clip, wire, transport="all_gather", rare=False):
    def code_clipped(leaves, places, words):
        return code([clipped_to(clip, x) for x in leaves], places, words)

    def make_oracle(workers, sizes):
        if aggregate == "sum":
            return SumOracle(workers, sizes, clip)
        return CodecOracle(workers, sizes, code_clipped, key=KEY, transport=transport, code_mean=code_mean)

    make = made_by(gcjax.contrib.terngrad_compress, clip, aggregate=aggregate, transport=transport, key=KEY)
    return Row(name, "terngrad_compress", make, make_oracle, rtol=1e-6, wire=frozenset(wire), rare=rare)


# A clip of 1.5 clips many entries.
ROWS = [
    row("terngrad-sum", "sum", 2.5, {"u32", "s32", "f32"}),
    row("terngrad-gather", "gather", 1.5, {"u32", "s32"}, "all_gather", rare=True),
    row("terngrad-owners", "gather", 1.5, {"u32", "s32"}, "two_phase", rare=True),
]
# Without clipping, because clipping moves the point where the workers' mean gradient is zero.
CHAINS = {"terngrad_compress": before_sgd(gcjax.contrib.terngrad_compress, None, key=KEY)}
