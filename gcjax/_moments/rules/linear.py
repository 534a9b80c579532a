"""Linear operations between a sink and its parameter.

An `Entrywise` operation moves or scales single entries, so it commutes with squaring: it is applied to the sum as it
is, and to the sum of squares with its factor squared. A `RealPart` and a `Mixed` operation, which adds entries, do not
commute with it, and must see each sample's gradient.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.jaxprs import JaxprEqn, Literal, Operand, Scope, Var, aval, variables
from gcjax._moments.rules.node import Key, Node, Reader, Samples, Sums, accumulator_dtype
from gcjax._types import Array

MOVES = {
    *("transpose", "reshape", "squeeze", "expand_dims", "rev", "slice", "split"),
    *("copy", "copy_p", "name", "pvary", "reshard", "sharding_constraint"),
}
KEEPS_SQUARE = {"neg", "convert_element_type", "reduce_precision"}


@dataclass(frozen=True, eq=False)
class Operation(Node):
    """An equation that is linear in the child's gradient. Its other operands are equal for all samples."""

    eqn: JaxprEqn
    index: int  # of the operand that is the child's gradient
    output: int = 0  # index of the result that is this node's gradient

    @property
    def shared(self) -> tuple[Var, ...]:
        """The other operands that are not literals."""
        return variables(self.eqn.invars[: self.index] + self.eqn.invars[self.index + 1 :])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (*self.child.operands, *self.shared)

    def gradient(self, read: Reader) -> Array:
        return self.apply(
            self.child.gradient(read), lambda atom: atom.val if isinstance(atom, Literal) else read(atom)[0]
        )

    def apply(self, gradient: Array, read: Reader) -> Array:
        """The equation, for a gradient of the child; `read` gives the other operands."""
        values = [gradient if i == self.index else read(atom) for i, atom in enumerate(self.eqn.invars)]
        return _jax_compat.bind(self.eqn, values)[self.output]


@dataclass(frozen=True, eq=False)
class Entrywise(Operation):
    """An operation that moves or scales entries."""

    @property
    def rule(self) -> str:
        return self.child.rule

    @property
    def needs(self) -> tuple[Key, ...]:
        return (*self.child.needs, *self.shared)

    @property
    def is_loop(self) -> bool:
        return self.child.is_loop

    def moments_under_vmap(self, read: Reader, samples: Samples) -> Sums:
        total, squares = self.child.moments_under_vmap(read, samples)
        return self.apply(total, read), self._apply_squared(squares, read)

    def _apply_squared(self, squares: Array, read: Reader) -> Array:
        name = self.eqn.primitive.name
        if name in KEEPS_SQUARE:
            return squares.astype(jnp.promote_types(squares.dtype, accumulator_dtype(aval(self.eqn.outvars[0]).dtype)))

        def changed(atom):  # zeros and factors take the dtype of the squares; indices and masks stay as they are
            x = jnp.asarray(read(atom))
            x = x.astype(squares.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
            return jnp.square(x) if name in ("mul", "div") else x

        return self.apply(squares, changed)


@dataclass(frozen=True, eq=False)
class RealPart(Operation):
    """The real or imaginary part of a complex gradient, of which the squares are taken, sample by sample."""

    @property
    def rule(self) -> str:
        return f"complex {self.child.rule}"


@dataclass(frozen=True, eq=False)
class Mixed(Operation):
    """An operation that mixes the entries of a weight's gradient, as in the gradient of a low-rank factor.

    Squares do not pass through it, but each sample's gradient does: the loop over samples applies it to one gradient at
    a time, so no array of batch x weight is made.
    """

    @property
    def rule(self) -> str:
        return f"mixed {self.child.rule}"


def is_real_part(eqn: JaxprEqn) -> bool:
    """Whether the equation makes real numbers of complex ones, entry by entry and linearly."""
    if eqn.primitive.name not in ("convert_element_type", "real", "imag"):
        return False
    before, after = (jnp.issubdtype(aval(x).dtype, jnp.complexfloating) for x in (eqn.invars[0], eqn.outvars[0]))
    return before and not after


def entrywise_operand(eqn: JaxprEqn, scope: Scope) -> int | None:
    """Index of the operand whose entries the equation moves or scales; None if it does anything else."""
    name, atoms = eqn.primitive.name, eqn.invars
    if not atoms:
        return None
    out, first = aval(eqn.outvars[0]), aval(atoms[0])
    match name:
        case _ if name in MOVES or name in KEEPS_SQUARE:
            return 0 if len(atoms) == 1 else None
        case "reduce_sum" | "broadcast_in_dim":
            return 0 if first.size == out.size and len(atoms) == 1 else None
        case "pad":
            return 0 if scope.is_zero(atoms[1]) else None
        case "dynamic_slice":
            return 0 if all(map(scope.is_shared, atoms[1:])) else None
        case "dynamic_update_slice":
            return 1 if scope.is_zero(atoms[0]) and all(map(scope.is_shared, atoms[2:])) else None
        case "select_n" if len(atoms) == 3 and scope.is_shared(atoms[0]):
            return next((3 - i for i in (1, 2) if scope.is_zero(atoms[i])), None)
        case "div":
            return 0 if scope.is_shared(atoms[1]) and first.shape == out.shape else None
        case "mul":
            shared = (i for i in (1, 0) if scope.is_shared(atoms[1 - i]) and aval(atoms[i]).shape == out.shape)
            return next(shared, None)
    return None
