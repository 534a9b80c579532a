"""The table of methods: a module for each public method, with a row for each setting and its numpy oracle.

Every law runs over all rows. A module has `ROWS`, a list of `Row`, and `CHAINS`, for each public name the chain that
its docstring recommends: a function (axis_name, learning_rate) -> transform.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The test model: a matrix, a scalar, a vector, a kernel of three axes; no size is a multiple of 32 but by chance.
SHAPES = {"a": (20, 15), "b": (), "c": (40,), "d": (3, 9, 19)}
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES.values())  # 300, 1, 40, 513
OFFSETS = (0, 320, 352, 416)  # where the leaves begin in the flat bucket of 929 entries
CAPACITY = (64, 320, 416, 864)


# What these rows have, others have too, each by itself: they only run with the marker `full`.
RARE = {
    *("demo-decay", "dense-bfloat16", "dgc-overflow", "drop-layer_wise", "dryden-overflow", "power_sgd-start"),
    *("qsgd-3-elias", "random_k-unbiased", "sketch-0.5", "strom-overflow", "terngrad-gather", "top_k-1.0"),
    *("variance-drop", "variance-float16", "variance-float16-feedback", "variance-paper-overflow"),
    *("variance-owners-paper-overflow", "variance-owners-float16", "variance-owners-levels"),
    *("variance-hybrid-overflow", "variance-levels", "variance-float32", "dense-float16", "dgc-nesterov-warm-up"),
    *("drive-3-feedback", "random_k-blocks", "variance-owners-density", "variance-owners-hybrid-overflow"),
    *("dgc-owners", "dryden-owners", "strom-owners"),
}


class Row(NamedTuple):
    """name: for the test's id.  public: the exported name.  make(axis_name, **more) -> the transform.

    oracle(workers, sizes): an object whose step(gradients, squares), one list of flat leaves per worker, returns (mean,
      a list of flat leaves; counts, (selected, sent, underflow, overflow) of each worker); None where there is none.
    conserves: keeps all that it does not send: the sum of the updates and the mean residual make up the dense sum.
    rtol: relative tolerance to the oracle; 0 where it must agree to the bit.
    ladder: capacities of the payload, ascending; () where the size is fixed.  transport: of the sparse exchange.
    joins: gives the same updates when the model is cut into several buckets in the middle of leaves.
    uses_squares: reads `sum_grad_squared`.
    wire: dtypes of the collectives.  dense_wire: may all-reduce as many words as there are parameters.
    infinite_at: magnitudes from here on become infinite, as documented.
    """

    name: str
    public: str
    make: Callable[..., Any]
    oracle: Callable[..., Any] | None
    conserves: bool = False
    rtol: float = 0.0
    ladder: tuple[int, ...] = ()
    transport: str = "all_gather"
    joins: bool = False
    uses_squares: bool = False
    wire: frozenset[str] = frozenset({"u32", "s32"})
    dense_wire: bool = False
    infinite_at: float = float("inf")

    def capacities(self, workers: int) -> tuple[int, ...]:
        """The ladder as `workers` see it: through owners, every one of them has as many slots, at least 32."""
        if self.transport == "all_gather":
            return self.ladder
        return tuple(sorted({max(-(-slots // workers), 32) * workers for slots in self.ladder}))


def seed_words(key, step, leaf=0, begin=0, rank=None):
    """The two words that `gcjax._kernels.hashing.hash_bits` draws from the key of one step, for numpy oracles."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), leaf), begin)
    key = key if rank is None else jax.random.fold_in(key, rank)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@functools.cache
def modules():
    return [importlib.import_module(f"rows.{found.name}") for found in pkgutil.iter_modules(__path__)]


def methods() -> list[Row]:
    rows = [row for module in modules() for row in module.ROWS]
    if unknown := RARE - {row.name for row in rows}:
        raise ValueError(f"RARE names rows that there are not: {unknown}")
    return rows


def chains() -> dict[str, Callable[..., Any]]:
    """Public name -> the recommended chain."""
    return {name: chain for module in modules() for name, chain in module.CHAINS.items()}
