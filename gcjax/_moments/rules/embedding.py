"""Look-ups of rows (embeddings): the gradient is a scatter-add of rows."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.per_sample import accumulator_dtype
from gcjax._moments.reduce import reduced, stacked_reader

ROWS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A `scatter-add` of whole rows into zeros.

    Tokens that occur twice in a sample are added before the square: the sample's rows are sorted by token, the runs of
    equal tokens summed, squared and scattered. No array of batch x table is made.
    """

    eqn: Any
    rule = "embedding"

    @property
    def operands(self):
        return tuple(self.eqn.invars[1:])

    @property
    def positions(self) -> int:
        return math.prod(self.eqn.invars[1].aval.shape[:-1])

    def summed(self, read):
        ids, rows = self._flat(*(read(key) for key in self.operands))
        return self._scatter(ids.reshape(-1), rows.reshape(-1, rows.shape[-1]), rows.dtype)

    def moments(self, table, size):
        ids, rows = self._flat(*map(stacked_reader(table, size), self.operands))
        dtype = accumulator_dtype(rows.dtype)
        rows = rows.astype(dtype)
        total = self._scatter(ids.reshape(-1), rows.reshape(-1, rows.shape[-1]), dtype)
        ids, rows = jax.vmap(sum_of_runs)(ids, rows)
        squares = self._scatter(ids.reshape(-1), jnp.square(rows).reshape(-1, rows.shape[-1]), dtype)
        return total.astype(self.eqn.outvars[0].aval.dtype), squares

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)

    def _flat(self, ids, rows):
        """`[N, ..., 1]` and `[N, ..., row]` -> ids `[N, T]` and rows `[N, T, features]`."""
        count = ids.shape[0]
        ids = ids.reshape(count, -1)
        if self.eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            # Clipped first, so that different ids beyond the table's end count as the one row that they mean.
            ids = jnp.clip(ids, 0, self.eqn.outvars[0].aval.shape[0] - 1)
        return ids, rows.reshape(count, ids.shape[1], -1)

    def _scatter(self, ids, rows, dtype):
        shape = self.eqn.outvars[0].aval.shape
        zeros = _jax_compat.zeros((shape[0], rows.shape[-1]), dtype, [ids, rows])
        out = jax.lax.scatter_add(zeros, ids[:, None], rows, ROWS, mode=self.eqn.params["mode"])
        return out.reshape(shape)


def sum_of_runs(ids, rows):
    """Add the rows of equal ids: `[T]`, `[T, d]` -> the same shapes, each id once, zero rows at the unused end."""
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    run = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (ids[1:] != ids[:-1]).astype(jnp.int32)]))
    sums = jnp.zeros_like(rows).at[run].add(rows, indices_are_sorted=True)
    # Unused runs keep id 0, where their zero rows do no harm.
    return jnp.zeros_like(ids).at[run].set(ids, indices_are_sorted=True), sums


def is_row_scatter(eqn, is_zero) -> bool:
    """Whether the equation scatters whole rows along axis 0 into zeros."""
    numbers = eqn.params["dimension_numbers"]
    into, ids, rows = (atom.aval for atom in eqn.invars)
    leading = rows.ndim - into.ndim + 1
    return (
        is_zero(eqn.invars[0])
        and into.ndim >= 1
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and ids.shape == (*rows.shape[:leading], 1)
        and tuple(numbers.update_window_dims) == tuple(range(leading, rows.ndim))
        and rows.shape[leading:] == into.shape[1:]
    )
