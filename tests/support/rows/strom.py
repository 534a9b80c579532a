"""Rows of strom_compress."""

import optax

import gcjax
from rows import Row
from rows.variance import VarianceOracle


def strom(name, capacity, threshold=0.5, joins=False, transport="all_gather"):
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
        ladder=capacity,
        transport=transport,
        joins=joins,
    )


ROWS = [
    strom("ladder", (64, 160, 320, 416, 864), joins=True),
    strom("overflow", (64,)),
    strom("owners", (64,), transport="reduce_scatter"),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.strom_compress(8.0, capacity=288, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"strom_compress": chain}
