"""Gradients that vmap stacks over samples: right for every parameter, cheap for biases and scales."""

from dataclasses import dataclass

import jax.numpy as jnp

from gcjax._moments.jaxprs import Atom, Literal, Operand
from gcjax._moments.rules.node import Node, Reader, Sums, Table, accumulator_dtype, stacked_reader
from gcjax._types import Array


@dataclass(frozen=True, eq=False)
class PerSample(Node):
    """The gradient itself, or a part of it, cut where no rule goes further back.

    Attributes:
      key: the variable, or the literal zero that is the gradient of an unused scalar.
      made_by: name of the primitive at which the search stopped, below moves and scales; "input" if there is none.
    """

    key: Atom
    made_by: str = "input"
    rule = "vmap"
    positions = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        return () if isinstance(self.key, Literal) else (self.key,)

    def gradient(self, read: Reader) -> Array:
        # A literal is never inside a loop, where there would be several samples to sum over.
        return jnp.asarray(self.key.val) if isinstance(self.key, Literal) else jnp.sum(read(self.key), axis=0)

    def moments(self, table: Table, size: int) -> Sums:
        if isinstance(self.key, Literal):
            value = jnp.asarray(self.key.val)
            return size * value, size * jnp.square(value.astype(accumulator_dtype(value.dtype)))
        dtype = table[self.key][0].dtype
        total, squares = stacked_moments(stacked_reader(table, size)(self.key))
        return total.astype(dtype), squares


def stacked_moments(gradients: Array) -> Sums:
    """Sum over axis 0 and sum of squares over axis 0, both in `accumulator_dtype`."""
    wide = gradients.astype(accumulator_dtype(gradients.dtype))
    return jnp.sum(wide, axis=0), jnp.sum(wide * wide, axis=0)
