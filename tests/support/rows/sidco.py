"""Rows and oracle of sidco_compress."""

import math

import numpy as np
import optax
from oracle import TINY, SparseOracle

import gcjax
from rows import Row


def sidco(a, density, stages):
    """Positions of the entries sent: exponential fits to what exceeds the threshold of the stage before."""
    magnitudes = np.abs(a).astype(np.float64)
    ratios = [density]
    if stages > 1 and density < 0.25:
        ratios = [0.25] + [(density / 0.25) ** (1 / (stages - 1))] * (stages - 1)
    threshold = 0.0
    for ratio in ratios:
        beyond = [m - threshold for m in magnitudes if m >= threshold]
        threshold = min(threshold - math.log(ratio) * sum(beyond) / len(beyond), max(magnitudes))
    return [i for i, m in enumerate(magnitudes) if m >= threshold and m >= TINY]


def row(stages, ladder, density):
    def make(axis_name=None, **more):
        return gcjax.sidco_compress(density, stages=stages, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return SparseOracle(workers, sizes, lambda a, step: sidco(a, density, stages), max(ladder))

    return Row(f"sidco-{stages}", "sidco_compress", make, make_oracle, conserves=True, ladder=ladder)


# 59 of the 854 entries are wanted: 3/4, 5/4 and 2 times as many, in multiples of 32.
ROWS = [row(3, (64, 96, 128), density=0.07)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.sidco_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"sidco_compress": chain}
