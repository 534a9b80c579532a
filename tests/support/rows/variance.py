"""variance_compress: its rows, the oracle and the recommended chain."""

import math

import optax
from variance_oracle import VarianceOracle

import gcjax
from rows import CAPACITY, SIZES, Row


def row(name, *, capacity=CAPACITY, transport="all_gather", rare=False, **options):
    settings = {"alpha": 1.5, "decay": 0.5, "capacity": capacity, "transport": transport, **options}
    slots = capacity or (max(1, math.floor(options["density"] * sum(SIZES))),)

    def make(axis_name=None, **more):
        return gcjax.variance_compress(**(settings | {"axis_name": axis_name} | more))

    def make_oracle(workers, sizes):
        return VarianceOracle(
            workers, sizes, **({k: settings[k] for k in settings if k != "wire"} | {"capacity": slots})
        )

    hybrid, exact = "threshold" in options, options.get("values") == "float32"
    return Row(
        f"variance-{name}",
        "variance_compress",
        make,
        make_oracle,
        conserves=hybrid or exact or options.get("feedback", False),
        capacities=slots,
        transport=transport,
        bucket_invariant=(hybrid or exact) and capacity == CAPACITY and transport == "all_gather",
        uses_squares=True,
        rare=rare,
    )


OWNERS = {"transport": "two_phase"}
ROWS = [
    row("paper"),
    row("drop", underflow="drop", rare=True),
    row("feedback", feedback=True),
    row("float32", values="float32", rare=True),
    row("float16", values="float16", rare=True),
    row("float16-feedback", values="float16", feedback=True, rare=True),
    row("hybrid", threshold=0.5),
    row("density", density=0.15, feedback=True, capacity=None),
    row("words", wire="word", rare=True),
    row("owners-words", wire="word", capacity=(320,), **OWNERS, rare=True),
    row("owners-density", density=0.15, feedback=True, capacity=None, **OWNERS, rare=True),
    row("overflow", capacity=(64,), values="float32"),
    row("paper-overflow", capacity=(64,), rare=True),
    row("owners", alpha=5.0, feedback=True, capacity=(64, 160, 864), **OWNERS),
    row("owners-paper-overflow", capacity=(64,), **OWNERS, rare=True),
    row("owners-hybrid-overflow", capacity=(64,), threshold=0.5, **OWNERS, rare=True),
    row("owners-float16", values="float16", capacity=(320,), **OWNERS, rare=True),
    row("hybrid-overflow", capacity=(64,), threshold=0.5, rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(
        gcjax.variance_compress(alpha=1.5, feedback=True, axis_name=axis_name), optax.adam(learning_rate)
    )


CHAINS = {"variance_compress": chain}
