"""strom_compress: its rows, the oracle and the recommended chain."""

from variance_oracle import VarianceOracle

import gcjax
from rows import Row, before_sgd, made_by


def row(name, capacity, transport="all_gather", bucket_invariant=False, rare=False):
    def make_oracle(workers, sizes):
        # The hybrid with a variance test that everything passes.
        return VarianceOracle(workers, sizes, capacity, transport, alpha=0.0, decay=1.0, threshold=0.5)

    return Row(
        f"strom-{name}",
        "strom_compress",
        made_by(gcjax.contrib.strom_compress, 0.5, capacity=capacity, transport=transport),
        make_oracle,
        conserves=True,
        capacities=capacity,
        transport=transport,
        bucket_invariant=bucket_invariant,
        rare=rare,
    )


ROWS = [
    row("capacities", (64, 160, 320, 416, 864), bucket_invariant=True),
    row("overflow", (64,), rare=True),
    row("owners", (64,), transport="two_phase", rare=True),
]
CHAINS = {"strom_compress": before_sgd(gcjax.contrib.strom_compress, 8.0, capacity=288)}
