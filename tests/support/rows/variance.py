"""variance_compress: its rows, the oracle and the recommended chain."""

import optax
from variance_oracle import VarianceOracle

import gcjax
from rows import CAPACITY, Row, made_by


def row(name, *, capacity=CAPACITY, transport="all_gather", rare=False, **options):
    settings = {"alpha": 1.5, "decay": 0.5, "capacity": capacity, "transport": transport, **options}

    def make_oracle(workers, sizes):
        return VarianceOracle(workers, sizes, **{k: settings[k] for k in settings if k != "wire"})

    hybrid = "threshold" in options
    return Row(
        f"variance-{name}",
        "variance_compress",
        made_by(gcjax.variance_compress, **settings),
        make_oracle,
        conserves=hybrid,
        capacities=capacity,
        transport=transport,
        bucket_invariant=hybrid and capacity == CAPACITY and transport == "all_gather",
        uses_squares=True,
        rare=rare,
    )


OWNERS = {"transport": "two_phase"}
ROWS = [
    row("paper"),
    row("drop", underflow="drop", rare=True),
    row("hybrid", threshold=0.5),
    row("words", wire="word", rare=True),
    row("owners-words", wire="word", capacity=(320,), **OWNERS, rare=True),
    row("overflow", capacity=(64,)),
    row("owners", alpha=4.0, capacity=(64, 160, 864), **OWNERS),
    row("owners-overflow", capacity=(64,), **OWNERS, rare=True),
    row("owners-hybrid-overflow", capacity=(64,), threshold=0.5, **OWNERS, rare=True),
    row("hybrid-overflow", capacity=(64,), threshold=0.5, rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.variance_compress(alpha=1.5, axis_name=axis_name), optax.adam(learning_rate))


CHAINS = {"variance_compress": chain}
