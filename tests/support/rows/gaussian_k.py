"""Row and oracle of gaussian_k_compress."""

import math
from statistics import NormalDist

import numpy as np
import optax
from oracle import TINY, SparseOracle

import gcjax
from rows import Row


def gaussian_k(a, density):
    """Positions of the entries sent: the authors' rounds, a threshold counted before it is changed."""
    k = max(1, math.floor(density * len(a)))
    threshold = a.mean(dtype=np.float64) - NormalDist().inv_cdf(density / 2) * a.std(dtype=np.float64)
    for _ in range(3):
        passed = [i for i in range(len(a)) if abs(a[i]) > threshold and abs(a[i]) >= TINY]
        if len(passed) < 2 * k / 3:
            threshold *= 0.5
        elif len(passed) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return passed


def make(axis_name=None, **more):
    return gcjax.gaussian_k_compress(0.05, axis_name=axis_name, **more)


LADDER = (32, 64, 192)  # 1/2, 4/3 and 4 times 42 in multiples of 32; 168 is the last


def make_oracle(workers, sizes):
    return SparseOracle(workers, sizes, lambda a, step: gaussian_k(a, 0.05), max(LADDER))


ROWS = [Row("gaussian_k", "gaussian_k_compress", make, make_oracle, conserves=True, ladder=LADDER)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.gaussian_k_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"gaussian_k_compress": chain}
