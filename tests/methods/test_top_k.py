"""Rows and oracle of top_k_compress."""

import numpy as np
import optax
from oracle import SparseOracle, largest
from rows import Row

import gcjax


def row(density, bucket_invariant=False, transport="all_gather", rare=False):
    def make(axis_name=None, **more):
        return gcjax.top_k_compress(density, transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        k = max(1, int(density * sum(sizes)))
        return SparseOracle(workers, sizes, lambda a, step: largest(np.abs(a), k), k, transport)

    name = f"top_k-{density}" + "-owners" * (transport == "reduce_scatter")
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


ROWS = [row(0.05), row(1.0, bucket_invariant=True, rare=True), row(0.3, transport="reduce_scatter")]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.top_k_compress(0.1, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"top_k_compress": chain}
