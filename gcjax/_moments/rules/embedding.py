"""Look-ups of rows (embeddings): the gradient is a scatter-add of rows."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.jaxprs import JaxprEqn, Operand, Scope, aval, variables
from gcjax._moments.rules.node import Reader, Sink, Sums, Table, stacked_reader, widened
from gcjax._types import Array

ROWS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


@dataclass(frozen=True, eq=False)
class Embedding(Sink):
    """A `scatter-add` of whole rows into zeros.

    Rows of a token that occurs twice in a sample are added before the square: a sample's rows are sorted by token, and
    the runs of equal tokens are summed, squared and scattered. No array of batch x table is made.
    """

    rule = "embedding"
    is_loop = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return variables(self.eqn.invars[1:])

    @property
    def positions(self) -> int:
        return math.prod(aval(self.eqn.invars[1]).shape[:-1])

    def gradient(self, read: Reader) -> Array:
        ids, rows = self._flat(*map(read, self.operands))
        return self._scatter(ids, rows)

    def moments(self, table: Table, size: int, groups: int | None) -> Sums:
        ids, rows = self._flat(*map(stacked_reader(table, size), self.operands))
        rows = widened(rows)
        total = self._scatter(ids, rows)
        ids, rows = jax.vmap(sum_of_runs)(ids, rows)
        squares = self._scatter(ids, jnp.square(rows))
        return total.astype(aval(self.eqn.outvars[0]).dtype), squares

    def _flat(self, ids: Array, rows: Array) -> tuple[Array, Array]:
        """`[N, ..., 1]` and `[N, ..., row]` -> ids `[N, T]` and rows `[N, T, features]`."""
        count = ids.shape[0]
        ids = ids.reshape(count, -1)
        if ids.dtype.itemsize < 4:
            ids = ids.astype(jnp.int32)  # the number of the table's last row may not fit into fewer bits
        if self.eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            # Clipped before the sort, so that all ids beyond the table's end count as its last row.
            ids = jnp.clip(ids, 0, aval(self.eqn.outvars[0]).shape[0] - 1)
        return ids, rows.reshape(count, ids.shape[1], -1)

    def _scatter(self, ids: Array, rows: Array) -> Array:
        """Rows `[N, T, features]` added up by their ids: the table's gradient."""
        shape = aval(self.eqn.outvars[0]).shape
        ids, rows = ids.reshape(-1), rows.reshape(-1, rows.shape[-1])
        zeros = _jax_compat.zeros((shape[0], rows.shape[-1]), rows.dtype, [ids, rows])
        out = jax.lax.scatter_add(zeros, ids[:, None], rows, ROWS, mode=self.eqn.params["mode"])
        return out.reshape(shape)


def sum_of_runs(ids: Array, rows: Array) -> tuple[Array, Array]:
    """Add the rows of equal ids: `[T]`, `[T, d]` -> the same shapes, each id once, zero rows at the unused end."""
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    run = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (ids[1:] != ids[:-1]).astype(jnp.int32)]))
    sums = jnp.zeros_like(rows).at[run].add(rows, indices_are_sorted=True)
    # Unused runs keep id 0, where their zero rows change nothing.
    return jnp.zeros_like(ids).at[run].set(ids, indices_are_sorted=True), sums


def is_row_scatter(eqn: JaxprEqn, scope: Scope) -> bool:
    """Whether the equation scatters whole rows along axis 0 into zeros."""
    numbers = eqn.params["dimension_numbers"]
    into, ids, rows = map(aval, eqn.invars)
    leading = rows.ndim - into.ndim + 1
    return (
        scope.is_zero(eqn.invars[0])
        and into.ndim >= 1
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and ids.shape == (*rows.shape[:leading], 1)
        and tuple(numbers.update_window_dims) == tuple(range(leading, rows.ndim))
        and rows.shape[leading:] == into.shape[1:]
    )
