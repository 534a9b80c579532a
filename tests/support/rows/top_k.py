"""top_k_compress: its rows, the oracle and the recommended chain."""

import numpy as np
import optax
from oracle import SparseOracle, largest

import gcjax
from rows import Row


def row(name, density, transport="all_gather", bucket_invariant=False, rare=False):
    def make(axis_name=None, **more):
        return gcjax.top_k_compress(density, transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        k = max(1, int(density * sum(sizes)))
        return SparseOracle(workers, sizes, lambda a, step: largest(np.abs(a), k), k, transport)

    return Row(
        name,
        "top_k_compress",
        make,
        make_oracle,
        conserves=True,
        transport=transport,
        bucket_invariant=bucket_invariant,
        rare=rare,
    )


ROWS = [
    row("top_k-0.05", 0.05),
    row("top_k-1.0", 1.0, bucket_invariant=True, rare=True),
    row("top_k-0.3-owners", 0.3, transport="two_phase", rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.top_k_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"top_k_compress": chain}
