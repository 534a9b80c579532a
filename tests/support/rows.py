"""The table of methods, on which every law is tested.

Each tests/methods/test_<method>.py declares `ROWS`, a list of `Row`, and `CHAINS`: for each public name the chain that
its docstring recommends, as a function (axis_name, learning_rate) -> transform.
"""

import functools
import importlib
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# The test model: a matrix, a scalar, a vector and a kernel with three axes. No size is a multiple of 32.
SHAPES = {"a": (20, 15), "b": (), "c": (40,), "d": (3, 9, 19)}
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES.values())  # 300, 1, 40, 513
# These leaves are small, so they share a block of 32 rows of 128. Each takes ceil(size / 32) columns, in C order.
COLUMNS = [-(-size // 32) for size in SIZES]
_FIRST = [sum(COLUMNS[:i]) for i in range(len(SIZES))]
POSITIONS = [  # of each leaf's entries in the flattened block
    np.arange(size) // width * 128 + first + np.arange(size) % width
    for size, width, first in zip(SIZES, COLUMNS, _FIRST, strict=True)
]
INDICES = [  # of each leaf's entries on the wire: column by column
    (first + np.arange(size) % width) * 32 + np.arange(size) // width
    for size, width, first in zip(SIZES, COLUMNS, _FIRST, strict=True)
]
CAPACITY = (64, 320, 416, 864)

METHOD_TESTS = pathlib.Path(__file__).parents[1] / "methods"

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
      capacities: capacities of the payload, ascending; () for a payload of fixed size.
      transport: of the sparse exchange.
      bucket_invariant: gives the same updates when the model is split into several buckets in the middle of leaves.
      uses_squares: reads `sum_grad_squared`.
      wire: dtypes of the collectives.
      dense_wire: may all-reduce as many words as there are parameters.
      infinite_at: magnitudes from here on become infinite, as documented.
      rare: the other rows cover what this one has, each separately: it only runs with the marker `full`.
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

    def reported_capacities(self, workers: int) -> tuple[int, ...]:
        """The capacities as `gcjax.info` reports them: with owners, slots per owner (at least 32) times workers."""
        if self.transport == "all_gather":
            return self.capacities
        return tuple(sorted({max(-(-slots // workers), 32) * workers for slots in self.capacities}))


def seed_words(key, step, leaf=0, begin=0, rank=None) -> np.ndarray:
    """The two words that `gcjax._kernels.hashing.hash_bits` draws from the key of one step, for numpy oracles."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), leaf), begin)
    key = key if rank is None else jax.random.fold_in(key, rank)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@functools.cache
def modules() -> list[ModuleType]:
    """The test modules of the methods. They import this module, so they can only be imported when this is called."""
    return [importlib.import_module(path.stem) for path in sorted(METHOD_TESTS.glob("test_*.py"))]


def methods() -> list[Row]:
    """All rows, in the order of the methods' names."""
    return [row for module in modules() for row in module.ROWS]


def chains() -> dict[str, Chain]:
    """Public name -> the recommended chain."""
    return {name: chain for module in modules() for name, chain in module.CHAINS.items()}
