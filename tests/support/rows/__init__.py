"""The table of methods, on which every law is tested.

Each module of this package is data of one method: `ROWS`, a list of `Row`, with the oracle that they share; and
`CHAINS`, for each public name the chain that its docstring recommends, as a function (axis_name, learning_rate) ->
transform.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# The test model: a matrix, a scalar, a vector and a kernel with three axes. No size is a multiple of 32.
SHAPES = {"a": (20, 15), "b": (), "c": (40,), "d": (3, 9, 19)}
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES.values())  # 300, 1, 40, 513


class Places(NamedTuple):
    """Where small leaves lie that share a block of 32 rows of 128, each in ceil(size / 32) columns, in C order.

    Attributes:
      columns: of each leaf.
      positions: of each leaf's entries in the flattened block.
      indices: of each leaf's entries on the wire: column by column.
    """

    columns: list[int]
    positions: list[np.ndarray]
    indices: list[np.ndarray]


def places_of(sizes):
    """The `Places` of leaves of these sizes."""
    columns = [-(-size // 32) for size in sizes]
    leaves = [
        (sum(columns[:i]) + np.arange(size) % width, np.arange(size) // width)
        for i, (size, width) in enumerate(zip(sizes, columns, strict=True))
    ]
    positions = [row * 128 + column for column, row in leaves]
    return Places(columns, positions, [column * 32 + row for column, row in leaves])


COLUMNS, POSITIONS, INDICES = places_of(SIZES)
CAPACITY = (64, 320, 416, 864)

Chain = Callable[[Any, Any], optax.GradientTransformation]


class Row(NamedTuple):
    """A method with one choice of options.

    Attributes:
      name: id of its tests.
      public: the exported name of the method.
      make: make(axis_name, **more) -> the transform.
      oracle: oracle(workers, sizes) -> an object with step(gradients, squares), which takes one list of flat leaves per
        worker and returns the mean, a list of flat leaves, and the counts (selected, sent, underflow, overflow) of each
        worker. None for a method without one.
      conserves: keeps everything that it does not send: updates plus mean residual equal the sum of the dense means.
      rtol: relative tolerance to the oracle; 0 where the bits must agree.
      capacities: capacities of the payload, ascending multiples of 32; () for a payload of fixed size.
      transport: of the sparse exchange.
      bucket_invariant: gives the same updates when the model is split into several buckets in the middle of leaves.
      uses_squares: reads `sum_grad_squared`.
      wire: dtypes of the collectives.
      dense_wire: may all-reduce as many words as there are parameters.
      infinite_at: magnitudes from here on become infinite, as documented.
      rounds_to_nearest: the last bit of a mean may decide between two updates, and with 3 workers XLA's last bits are
        not numpy's.
      rare: the other rows cover what this one has, each separately: `make test` leaves it out.
    """

    name: str
    public: str
    make: Callable[..., Any]
    oracle: Callable[..., Any] | None
    conserves: bool = False
    rtol: float = 0.0
    capacities: tuple[int, ...] = ()
    transport: str = "all_gather"
    bucket_invariant: bool = False
    uses_squares: bool = False
    wire: frozenset[str] = frozenset({"u32", "s32"})
    dense_wire: bool = False
    infinite_at: float = float("inf")
    rare: bool = False
    rounds_to_nearest: bool = False


def made_by(factory, *given, **options):
    """The `make` of a `Row`: a factory with these arguments, of which keywords may replace some."""
    return lambda axis_name=None, **more: factory(*given, **(options | more), axis_name=axis_name)


def before_sgd(factory, *given, **options) -> Chain:
    """The chain of a factory with these arguments and plain SGD."""
    return lambda axis_name, rate: optax.chain(factory(*given, **options, axis_name=axis_name), optax.sgd(rate))


def seed_words(key, step, leaf=0, begin=0, rank=None, message=None) -> np.ndarray:
    """The two words that `gcjax._kernels.hashing.hash_bits` draws from the key of one step, for numpy oracles.

    In two phases, `message` is the number of the owner that it is for, or the number of workers for that to all.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), leaf), begin)
    for number in (rank, message):
        key = key if number is None else jax.random.fold_in(key, number)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@functools.cache
def modules() -> list[ModuleType]:
    """The modules of this package. They import it, so they can only be imported when this is called."""
    return [importlib.import_module(f"rows.{found.name}") for found in pkgutil.iter_modules(__path__)]


@functools.cache
def methods() -> list[Row]:
    """All rows, in the order of the methods' names."""
    return [row for module in modules() for row in module.ROWS]


def chains() -> dict[str, Chain]:
    """Public name -> the recommended chain."""
    return {name: chain for module in modules() for name, chain in module.CHAINS.items()}


# A ladder, a fixed size, a gather of codes, sums, swaps.
KINDS = {"variance-paper", "top_k-0.05", "qsgd-4", "power_sgd-rank2", "onebit", "variance-owners"}


def usual(row) -> bool:
    """A rule of `cases`: the rows that run by default."""
    return not row.rare


def is_first(row) -> bool:
    """A rule of `cases`: the first row of each public name."""
    return row.name == next((other.name for other in methods() if other.public == row.public), row.name)


def of_each_kind(row) -> bool:
    """A rule of `cases`: one row for each kind of exchange."""
    return row.name in KINDS


def name_of(value):
    """The id of a case's value, for `cases`."""
    return value.name if isinstance(value, Row) else None


def group_of(row, *others):
    """The mark of a case for `cases`: all tests of a row run in one process, which compiles its steps once."""
    return (pytest.mark.xdist_group(row.name),)
