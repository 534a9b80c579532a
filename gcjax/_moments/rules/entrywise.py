"""Operations between a sink and the parameter that move or scale single entries, and gradients cut as they are.

Such an operation commutes with squaring: it is applied to the sum as it stands, and to the sum of squares with its
factor squared.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.per_sample import accumulator_dtype, square_sum
from gcjax._moments.reduce import reduced, stacked_reader

MOVES = {"transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "copy_p", "pvary", "slice", "name", "split"}
KEEPS_SQUARE = {"neg", "convert_element_type", "reduce_precision"}


@dataclass(frozen=True, eq=False)
class Leaf:
    """The gradient itself, stacked over samples by vmap: right for everything, cheap for biases and scales.

    Attributes:
        key: the variable.
        made_by: name of the primitive at which the walk stopped, below moves and scales; "input" if there is none.
    """

    key: Any
    made_by: str = "input"
    rule = "leaf"
    positions = 1

    @property
    def operands(self):
        return () if _jax_compat.is_literal(self.key) else (self.key,)

    @property
    def needs(self):
        return self.operands

    def summed(self, read):
        # A literal (the zero gradient of an unused scalar) stands only at the top, where one sample is read.
        return jnp.asarray(self.key.val) if _jax_compat.is_literal(self.key) else jnp.sum(read(self.key), axis=0)

    def moments(self, table, size):
        if not self.operands:
            value = self.summed(None)
            return size * value, size * jnp.square(value.astype(accumulator_dtype(value.dtype)))
        dtype = table[self.key][0].dtype
        total, squares = square_sum(stacked_reader(table, size)(self.key))
        return total.astype(dtype), squares

    def pair(self, read, token):
        return reduced(self, read, token)


@dataclass(frozen=True, eq=False)
class Entrywise:
    """One equation that moves or scales entries of `child`; its other operands are the same for all samples.

    Attributes:
        eqn: the equation.
        output: which of its results.
        index: which of its operands `child` is.
    """

    eqn: Any
    output: int
    index: int
    child: Any

    @property
    def rule(self):
        return self.child.rule

    @property
    def positions(self):
        return self.child.positions

    @property
    def others(self):
        return self.eqn.invars[: self.index] + self.eqn.invars[self.index + 1 :]

    @property
    def shared(self):
        return tuple(atom for atom in self.others if not _jax_compat.is_literal(atom))

    @property
    def operands(self):
        return (*self.child.operands, *self.shared)

    @property
    def needs(self):
        return (*self.child.needs, *self.shared)

    def summed(self, read):
        return self._apply(self.child.summed(read), self._other_values(lambda key: read(key)[0]))

    def moments(self, table, size):
        total, squares = self.child.moments(table, size)
        others = self._other_values(lambda key: table[key][0])
        return self._apply(total, others), self._apply_squared(squares, others)

    def pair(self, read, token):
        total, squares = self.child.pair(read, token)
        others = self._other_values(read)
        return self._apply(total, others), self._apply_squared(squares, others)

    def _other_values(self, read):
        return [atom.val if _jax_compat.is_literal(atom) else read(atom) for atom in self.others]

    def _apply(self, value, others):
        return _jax_compat.bind(self.eqn, [*others[: self.index], value, *others[self.index :]])[self.output]

    def _apply_squared(self, squares, others):
        name = self.eqn.primitive.name
        if name in KEEPS_SQUARE:
            return squares.astype(jnp.promote_types(squares.dtype, accumulator_dtype(self.eqn.outvars[0].aval.dtype)))
        # Zeros and factors follow the dtype of the squares; indices and masks stay as they are.
        others = [jnp.asarray(v) for v in others]
        others = [v.astype(squares.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else v for v in others]
        return self._apply(squares, [jnp.square(v) for v in others] if name in ("mul", "div") else others)


def entrywise_operand(eqn, scope) -> int | None:
    """Index of the operand whose entries the equation moves or scales, or None if it does anything else."""
    name, atoms = eqn.primitive.name, eqn.invars
    if not atoms:
        return None
    same_size = atoms[0].aval.size == eqn.outvars[0].aval.size
    shape = eqn.outvars[0].aval.shape
    match name:
        case _ if name in MOVES or name in KEEPS_SQUARE:
            return 0 if len(atoms) == 1 else None
        case "reduce_sum" | "broadcast_in_dim":
            return 0 if same_size and len(atoms) == 1 else None
        case "pad":
            return 0 if scope.is_zero(atoms[1]) else None
        case "dynamic_slice":
            return 0 if all(map(scope.is_shared, atoms[1:])) else None
        case "dynamic_update_slice":
            return 1 if scope.is_zero(atoms[0]) and all(map(scope.is_shared, atoms[2:])) else None
        case "select_n" if len(atoms) == 3 and scope.is_shared(atoms[0]):
            return next((3 - i for i in (1, 2) if scope.is_zero(atoms[i])), None)
        case "div":
            return 0 if scope.is_shared(atoms[1]) and atoms[0].aval.shape == shape else None
        case "mul":
            return next((i for i in (1, 0) if scope.is_shared(atoms[1 - i]) and atoms[i].aval.shape == shape), None)
    return None
