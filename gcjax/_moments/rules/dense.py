"""Matrix products: dense layers with and without positions, einsum weights with any number of axes."""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gcjax._moments.jaxprs import aval
from gcjax._moments.rules.node import Reader, Sink, Sums, Table, accumulator_dtype, loop_moments, stacked_reader
from gcjax._types import Array

Pairs = Sequence[tuple[int, int]]  # (axis of the left operand, axis of the right operand)


@dataclass(frozen=True, eq=False)
class Product(Sink):
    """A product of one sample's activation and cotangent.

    With one position, a sample's gradient is an outer product and its square is the outer product of the squares, so
    the sum of squares is a second product. With more, a loop over samples makes each gradient once, for both sums.
    """

    def prepared(self, read: Reader) -> tuple[Array, Array]:
        """The operands, as `product` takes them."""
        lhs, rhs = map(read, self.operands)
        return lhs, rhs

    @abc.abstractmethod
    def product(self, lhs: Array, rhs: Array, dtype: jax.typing.DTypeLike | None) -> Array:
        """The equation's product, summed over the leading axis of both operands."""

    def gradient(self, read: Reader) -> Array:
        return self.product(*self.prepared(read), self.eqn.params["preferred_element_type"])

    @property
    def is_loop(self) -> bool:
        return self.positions > 1

    def moments(self, table: Table, size: int, groups: int | None) -> Sums:
        if self.is_loop:
            return loop_moments(self.gradient, table, size, groups)
        dtype = accumulator_dtype(aval(self.eqn.outvars[0]).dtype)
        lhs, rhs = self.prepared(stacked_reader(table, size))
        squares = self.product(jnp.square(lhs.astype(dtype)), jnp.square(rhs.astype(dtype)), dtype)
        return self.product(lhs, rhs, self.eqn.params["preferred_element_type"]), squares


@dataclass(frozen=True, eq=False)
class Dense(Product):
    """A `dot_general`."""

    rule = "dense"

    @property
    def positions(self) -> int:
        (contracted, _), _ = self.eqn.params["dimension_numbers"]
        return math.prod(aval(self.eqn.invars[0]).shape[d] for d in contracted)

    def product(self, lhs: Array, rhs: Array, dtype: jax.typing.DTypeLike | None) -> Array:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = self.eqn.params["dimension_numbers"]
        contract = [(0, 0), *((a + 1, b + 1) for a, b in zip(lhs_contract, rhs_contract, strict=True))]
        batch = [(a + 1, b + 1) for a, b in zip(lhs_batch, rhs_batch, strict=True)]
        return contracted_over(lhs, rhs, contract, batch, self.eqn.params["precision"], dtype)


def contracted_over(
    lhs: Array, rhs: Array, contract: Pairs, batch: Pairs, precision: Any, dtype: jax.typing.DTypeLike | None
) -> Array:
    """`dot_general` with its axes given as pairs. Contracted axes of size 1 are dropped first: they slow it down."""
    dropped = [(a, b) for a, b in contract if lhs.shape[a] == 1]
    kept = [pair for pair in contract if pair not in dropped]
    lhs, lhs_dims = _squeeze(lhs, [a for a, _ in dropped], [a for a, _ in kept], [a for a, _ in batch])
    rhs, rhs_dims = _squeeze(rhs, [b for _, b in dropped], [b for _, b in kept], [b for _, b in batch])
    dims = ((lhs_dims[0], rhs_dims[0]), (lhs_dims[1], rhs_dims[1]))
    return jax.lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)


def _squeeze(array: Array, dropped: list[int], *groups: list[int]) -> tuple[Array, list[list[int]]]:
    """Squeeze the `dropped` axes; returns the array and the new positions of the axes in each of `groups`."""
    return jnp.squeeze(array, dropped), [[d - sum(x < d for x in dropped) for d in group] for group in groups]
