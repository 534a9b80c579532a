"""Rows and oracle of drop_compress."""

import math

import numpy as np
import optax
from oracle import TINY, SparseOracle

import gcjax
from rows import Row


def reaching_quantile(magnitudes, density):
    """Positions of the entries that reach the magnitude of number ceil(density * n) from above; never zeros."""
    threshold = sorted(magnitudes, reverse=True)[math.ceil(density * len(magnitudes)) - 1]
    return [i for i, m in enumerate(magnitudes) if m >= threshold and m >= TINY]


def drop(name, layer_wise, ladder, density=0.05):
    def make(axis_name=None, **more):
        return gcjax.drop_compress(density, layer_wise=layer_wise, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        def select(a, step):
            # All entries are in the sample of so small a model.
            if not layer_wise:
                return reaching_quantile(np.abs(a), density)
            chosen, begin = [], 0
            for size in sizes:
                chosen += [begin + i for i in reaching_quantile(np.abs(a[begin : begin + size]), density)]
                begin += size
            return chosen

        return SparseOracle(workers, sizes, select, max(ladder))

    return Row(f"drop-{name}", "drop_compress", make, make_oracle, conserves=True, ladder=ladder)


# 42 of the 854 entries are wanted: 1/2, 5/4 and 2 times as many, in multiples of 32. The leaves want 15, 1, 2 and 26.
ROWS = [drop("global", False, (32, 64, 96)), drop("layer_wise", True, (32, 64, 96))]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.drop_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"drop_compress": chain}
