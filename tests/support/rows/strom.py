"""strom_compress: its rows, the oracle and the recommended chain."""

import optax
from variance_oracle import VarianceOracle

import gcjax
from rows import Row


def row(name, capacity, transport="all_gather", bucket_invariant=False, rare=False):
    threshold = 0.5

    def make(axis_name=None, **more):
        settings = {"capacity": capacity, "transport": transport, "axis_name": axis_name}
        return gcjax.contrib.strom_compress(threshold, **(settings | more))

    def make_oracle(workers, sizes):
        # The hybrid with a variance test that everything passes.
        return VarianceOracle(workers, sizes, capacity, transport, alpha=0.0, decay=1.0, threshold=threshold)

    return Row(
        f"strom-{name}",
        "strom_compress",
        make,
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


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.strom_compress(8.0, capacity=288, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"strom_compress": chain}
