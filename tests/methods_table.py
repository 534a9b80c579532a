"""The table of methods: one row each, and every law runs over all rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import oracle

import gcjax

SIZES = (300, 1, 40, 513)  # entries of the test model's leaves: one of one entry, none a multiple of 32 but by chance
CAPACITY = (64, 320, 416, 864)


class Row(NamedTuple):
    """name: for the test's id.  make(axis_name, **more) -> the transform.  oracle(workers, sizes) or None.

    public: the exported name.  conserves: keeps all that it does not send.  exact_sum: the oracle's order of summation
    is the package's.  ladder: capacities, ascending; () for dense.
    """

    name: str
    public: str
    make: Callable[..., Any]
    oracle: Callable[..., Any] | None
    conserves: bool = False
    exact_sum: bool = True
    ladder: tuple[int, ...] = ()


def variance(name, *, capacity=CAPACITY, key=None, conserves=False, has_oracle=True, alpha=1.5, **options):
    def make(axis_name=None, **more):
        extra = {} if key is None else {"key": jax.random.key(key)}
        settings = {"capacity": capacity, "axis_name": axis_name, "decay": 0.5} | options | extra | more
        return gcjax.variance_compress(alpha, **settings)

    def make_oracle(workers, sizes):
        return oracle.VarianceOracle(workers, sizes, max(capacity), alpha=alpha, decay=0.5, **options)

    row_oracle = make_oracle if has_oracle else None
    return Row(f"variance-{name}", "variance_compress", make, row_oracle, conserves, ladder=capacity)


def dense(dtype):
    def make(axis_name=None, **more):
        return gcjax.dense_compress(dtype, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return oracle.DenseOracle(workers, sizes, dtype)

    conserves = dtype == "float32"
    return Row(f"dense-{dtype}", "dense_compress", make, make_oracle, conserves, exact_sum=False)


def strom(name, capacity, threshold=0.5):
    def make(axis_name=None, **more):
        return gcjax.strom_compress(threshold, **({"capacity": capacity, "axis_name": axis_name} | more))

    def make_oracle(workers, sizes):
        # The hybrid whose variance test lets everything pass.
        return oracle.VarianceOracle(workers, sizes, max(capacity), alpha=0.0, decay=1.0, threshold=threshold)

    return Row(f"strom-{name}", "strom_compress", make, make_oracle, conserves=True, ladder=capacity)


METHODS = [
    dense("float32"),
    dense("bfloat16"),
    dense("float16"),
    variance("paper"),
    variance("drop", underflow="drop"),
    variance("feedback", feedback=True, conserves=True),
    variance("float32", values="float32", conserves=True),
    variance("float16", values="float16"),
    variance("float16-feedback", values="float16", feedback=True, conserves=True),
    variance("levels", values="levels", key=7, has_oracle=False),
    variance("hybrid", threshold=0.5, conserves=True),
    variance("overflow", capacity=(64,), values="float32", conserves=True),
    variance("paper-overflow", capacity=(64,)),
    variance("hybrid-overflow", capacity=(64,), threshold=0.5, conserves=True),
    strom("ladder", (64, 160, 320, 416, 864)),
    strom("overflow", (64,)),
]
