"""Matrix products: dense layers with and without positions, einsum weights with any number of axes."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gcjax._moments.per_sample import accumulator_dtype
from gcjax._moments.reduce import loop_moments, reduced, stacked_reader


@dataclass(frozen=True, eq=False)
class Dense:
    """A `dot_general` of one sample's activation and cotangent.

    With one position a sample's gradient is an outer product, and its square the outer product of the squares: a
    second matrix product over samples. With more, a loop over samples makes each gradient once, for both sums.
    """

    eqn: Any
    rule = "dense"

    @property
    def operands(self):
        return tuple(self.eqn.invars)

    @property
    def positions(self) -> int:
        (contracted, _), _ = self.eqn.params["dimension_numbers"]
        return math.prod(self.eqn.invars[0].aval.shape[d] for d in contracted)

    def summed(self, read):
        lhs, rhs = (read(key) for key in self.eqn.invars)
        return self._product(lhs, rhs, self.eqn.params["preferred_element_type"])

    def _product(self, lhs, rhs, dtype):
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = self.eqn.params["dimension_numbers"]
        contract = [(0, 0), *((a + 1, b + 1) for a, b in zip(lhs_contract, rhs_contract, strict=True))]
        batch = [(a + 1, b + 1) for a, b in zip(lhs_batch, rhs_batch, strict=True)]
        return product(lhs, rhs, contract, batch, self.eqn.params["precision"], dtype)

    def moments(self, table, size):
        if self.positions > 1:
            return loop_moments(self.summed, table, size)
        read = stacked_reader(table, size)
        dtype = accumulator_dtype(self.eqn.outvars[0].aval.dtype)
        squares = self._product(*(jnp.square(read(key).astype(dtype)) for key in self.eqn.invars), dtype)
        return self.summed(read), squares

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)


def product(lhs, rhs, contract, batch, precision, dtype):
    """`dot_general` with its axes given as pairs; contracted axes of size 1, which slow it down, are dropped first."""
    dropped = [(a, b) for a, b in contract if lhs.shape[a] == 1]
    kept = [pair for pair in contract if pair not in dropped]
    lhs, lhs_dims = _without([a for a, _ in dropped], lhs, [a for a, _ in kept], [a for a, _ in batch])
    rhs, rhs_dims = _without([b for _, b in dropped], rhs, [b for _, b in kept], [b for _, b in batch])
    dims = ((lhs_dims[0], rhs_dims[0]), (lhs_dims[1], rhs_dims[1]))
    return jax.lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)


def _without(dropped, array, *axes):
    """Squeeze the `dropped` axes away; returns the array and the other axes' new positions."""
    return jnp.squeeze(array, dropped), [[d - sum(x < d for x in dropped) for d in group] for group in axes]
