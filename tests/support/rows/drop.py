"""drop_compress: its rows, the oracle and the recommended chain."""

import math

import numpy as np
from oracle import TINY, SparseOracle

import gcjax
from rows import Row, before_sgd, made_by


def reaching_quantile(magnitudes, density):
    """Positions of the entries that reach the ceil(density * n)-th largest magnitude; never zeros."""
    threshold = sorted(magnitudes, reverse=True)[math.ceil(density * len(magnitudes)) - 1]
    return [i for i, m in enumerate(magnitudes) if m >= threshold and m >= TINY]


CAPACITIES = (32, 64, 96)  # 1/2, 5/4 and 2 times 42 of the 854 entries, or 44 layer-wise, in multiples of 32


def row(name, layer_wise):
    density = 0.05

    def make_oracle(workers, sizes):
        def select(a, step):
            # The sample of such a small model has all entries.
            if not layer_wise:
                return reaching_quantile(np.abs(a), density)
            chosen, begin = [], 0
            for size in sizes:
                chosen += [begin + i for i in reaching_quantile(np.abs(a[begin : begin + size]), density)]
                begin += size
            return chosen

        return SparseOracle(workers, sizes, select, max(CAPACITIES))

    return Row(
        f"drop-{name}",
        "drop_compress",
        made_by(gcjax.contrib.drop_compress, density, layer_wise=layer_wise, transport="all_gather"),
        make_oracle,
        conserves=True,
        capacities=CAPACITIES,
        rare=layer_wise,
    )


ROWS = [row("global", False), row("layer_wise", True)]
CHAINS = {"drop_compress": before_sgd(gcjax.contrib.drop_compress, 0.1)}
