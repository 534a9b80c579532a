"""Operations between a sink and the parameter that move or scale single entries.

Such an operation commutes with squaring: it is applied to the sum as it stands, and to the sum of squares with its
factor squared. Biases and other small leaves, cut at the gradient itself, are here too.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from gcjax._moments import _compat
from gcjax._moments._naive import accumulator_dtype, square_sum
from gcjax._moments._reduce import reduced, stacked_reader

MOVES = {"transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "copy_p", "pvary", "slice", "name"}
KEEPS_SQUARE = {"neg", "convert_element_type", "reduce_precision"}


@dataclass(frozen=True, eq=False)
class Leaf:
    """The gradient itself, stacked over samples by vmap: right for everything, cheap for biases and scales."""

    key: Any
    rule = "leaf"
    positions = 1

    @property
    def operands(self):
        return (self.key,)

    def summed(self, read):
        return jnp.sum(read(self.key), axis=0)

    def moments(self, table, size):
        dtype = table[self.key][0].dtype
        total, squares = square_sum(stacked_reader(table, size)(self.key))
        return total.astype(dtype), squares

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)


@dataclass(frozen=True, eq=False)
class Entrywise:
    """One equation that moves or scales entries; its operands other than `child` are the same for all samples."""

    eqn: Any
    index: int
    child: Any

    @property
    def rule(self):
        return self.child.rule

    @property
    def positions(self):
        return self.child.positions

    @property
    def shared(self):
        return tuple(v for i, v in enumerate(self.eqn.invars) if i != self.index and not _compat.is_literal(v))

    @property
    def operands(self):
        return (*self.child.operands, *self.shared)

    def summed(self, read):
        def first(key):
            return read(key)[0]

        return self._apply(self.child.summed(read), first)

    @property
    def needs(self):
        return (*self.child.needs, *self.shared)

    def pair(self, read, token):
        total, squares = self.child.pair(read, token)
        return self._apply(total, read), self._apply_squared(squares, read)

    def _values(self, value, read):
        rest = [atom.val if _compat.is_literal(atom) else read(atom) for atom in self.others]
        return [*rest[: self.index], value, *rest[self.index :]]

    @property
    def others(self):
        return [atom for i, atom in enumerate(self.eqn.invars) if i != self.index]

    def _apply(self, value, read):
        return _compat.bind(self.eqn, self._values(value, read))[0]

    def _apply_squared(self, squares, read):
        name = self.eqn.primitive.name
        if name in KEEPS_SQUARE:
            return squares.astype(jnp.promote_types(squares.dtype, accumulator_dtype(self.eqn.outvars[0].aval.dtype)))
        values = self._values(squares, read)
        if name in ("mul", "div"):
            factor = jnp.square(jnp.asarray(values[1 - self.index]).astype(squares.dtype))
            return squares * factor if name == "mul" else squares / factor
        values = [jnp.asarray(v).astype(squares.dtype) for v in values]
        return _compat.bind(self.eqn, values)[0]


def entrywise_operand(eqn, is_shared) -> int | None:
    """Index of the operand whose entries the equation moves or scales, or None if it does anything else."""
    name = eqn.primitive.name
    if not eqn.invars:
        return None
    if name in MOVES or name in KEEPS_SQUARE:
        return 0 if len(eqn.invars) == 1 else None
    source, target = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "reduce_sum":
        return 0 if source.size == target.size else None
    if name == "broadcast_in_dim":
        return 0 if source.size == target.size and len(eqn.invars) == 1 else None
    if name == "pad":
        return 0 if _compat.is_literal(eqn.invars[1]) and not np.any(eqn.invars[1].val) else None
    if name == "div":
        return 0 if is_shared(eqn.invars[1]) and source.shape == target.shape else None
    if name == "mul":
        return next(
            (i for i in (1, 0) if is_shared(eqn.invars[1 - i]) and eqn.invars[i].aval.shape == target.shape), None
        )
    return None
