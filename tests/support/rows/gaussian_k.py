"""gaussian_k_compress: its rows, the oracle and the recommended chain."""

import math
from statistics import NormalDist

import numpy as np
from oracle import TINY, SparseOracle

import gcjax
from rows import Row, before_sgd, made_by


def expected_entries(a, density):
    """Positions of the entries sent, by the authors' rounds: count, then change the threshold."""
    k = max(1, math.floor(density * len(a)))
    threshold = a.mean(dtype=np.float64) - NormalDist().inv_cdf(density / 2) * a.std(dtype=np.float64)
    return np.flatnonzero(paper_rounds(np.abs(a), threshold, k))


def paper_rounds(x, threshold, k):
    """Which magnitudes pass, by the rounds as the source lists them."""
    for _ in range(3):
        chosen = (x > threshold) & (x >= TINY)
        if chosen.sum() < 2 * k / 3:
            threshold = threshold * 0.5
        elif chosen.sum() > 4 * k / 3:
            threshold = threshold * 1.5
        else:
            break
    return chosen


CAPACITIES = (32, 64, 192)  # 1/2, 4/3 and 4 times 42 in multiples of 32


def make_oracle(workers, sizes):
    return SparseOracle(workers, sizes, lambda a, step: expected_entries(a, 0.05), max(CAPACITIES))


MAKE = made_by(gcjax.contrib.gaussian_k_compress, 0.05, transport="all_gather")
ROWS = [Row("gaussian_k", "gaussian_k_compress", MAKE, make_oracle, conserves=True, capacities=CAPACITIES)]
CHAINS = {"gaussian_k_compress": before_sgd(gcjax.contrib.gaussian_k_compress, 0.1)}
