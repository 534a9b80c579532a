"""Rows of strom_compress."""

import optax
from rows import Row
from variance_oracle import VarianceOracle

import gcjax


def row(name, capacity, threshold=0.5, bucket_invariant=False, transport="all_gather", rare=False):
    def make(axis_name=None, **more):
        return gcjax.strom_compress(
            threshold, **({"capacity": capacity, "transport": transport, "axis_name": axis_name} | more)
        )

    def make_oracle(workers, sizes):
        # The hybrid whose variance test lets everything pass.
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
    row("owners", (64,), transport="reduce_scatter", rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.strom_compress(8.0, capacity=288, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"strom_compress": chain}
