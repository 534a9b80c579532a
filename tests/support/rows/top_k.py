"""top_k_compress: its rows, the oracle and the recommended chain."""

import numpy as np
from oracle import SparseOracle, largest

import gcjax
from rows import Row, before_sgd, made_by


def row(name, density, transport="all_gather", bucket_invariant=False, rare=False):
    def make_oracle(workers, sizes):
        k = max(1, int(density * sum(sizes)))
        return SparseOracle(workers, sizes, lambda a, step: largest(np.abs(a), k), k, transport)

    return Row(
        name,
        "top_k_compress",
        made_by(gcjax.top_k_compress, density, transport=transport),
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
CHAINS = {"top_k_compress": before_sgd(gcjax.top_k_compress, 0.1)}
