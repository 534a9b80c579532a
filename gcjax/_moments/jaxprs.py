"""Jaxprs: types, and facts about a variable that hold before anything runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from gcjax._jax_compat import scan_parts

ZERO_KEEPING = ("broadcast_in_dim", "pvary", "convert_element_type", "copy")


@dataclass(frozen=True)
class ScannedValue:
    """Key of a value inside the body of a scan, or of a scan inside it, stacked over the scan's steps."""

    scan: JaxprEqn
    key: "Operand"

    @property
    def aval(self) -> jax.core.ShapedArray:
        step = aval(self.key)
        return jax.core.ShapedArray((self.scan.params["length"], *step.shape), step.dtype)


Atom = Var | Literal
Operand = Var | ScannedValue


def aval(key: Atom | ScannedValue) -> jax.core.ShapedArray:
    """Shape and dtype. (The type of `Var.aval` has neither.)"""
    return cast(jax.core.ShapedArray, key.aval)


def variables(atoms: Iterable[Atom]) -> tuple[Var, ...]:
    """Those that are not literals."""
    return tuple(atom for atom in atoms if not isinstance(atom, Literal))


def read_atom(atom: Atom, read: Callable[[Var], Any]) -> Any:
    """The value of a literal, or read(variable)."""
    return atom.val if isinstance(atom, Literal) else read(atom)


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation."""
    values = [value for p in eqn.params.values() for value in (p if isinstance(p, tuple | list) else [p])]
    values = [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in values]
    return [value for value in values if isinstance(value, Jaxpr)]


class Scope:
    """An open jaxpr and facts about its variables; `shared` are its inputs that are equal for all samples."""

    def __init__(self, jaxpr: Jaxpr, shared: Sequence[Var]) -> None:
        self.jaxpr = jaxpr
        self.made_by = {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        self.shared = {*shared, *jaxpr.constvars}
        for eqn in jaxpr.eqns:
            # An effect marks a random or impure operation, or one that names the sample axis (axis_index).
            if not eqn.effects and all(map(self.is_shared, eqn.invars)):
                self.shared.update(eqn.outvars)

    def is_shared(self, atom: object) -> bool:
        """Whether the value is known to be equal for all samples."""
        return isinstance(atom, Literal) or atom in self.shared

    def is_zero(self, atom: Atom) -> bool:
        """Whether the value is known to be all zeros."""
        while not isinstance(atom, Literal):
            eqn, _ = self.made_by.get(atom, (None, 0))
            if eqn is None or eqn.primitive.name not in ZERO_KEEPING:
                return False
            atom = eqn.invars[0]
        return not np.any(atom.val)

    def uses(self, var: Var) -> int:
        """Number of times that the variable is read or returned."""
        return sum(atom is var for eqn in self.jaxpr.eqns for atom in eqn.invars) + sum(
            atom is var for atom in self.jaxpr.outvars
        )

    def body(self, scan: JaxprEqn) -> "Scope":
        """The scope of a scan's body."""
        inner = scan.params["jaxpr"].jaxpr
        consts, _, xs = scan_parts(scan, list(zip(inner.invars, scan.invars, strict=True)))
        # Not the carries: they may start equal and differ between samples after the first step.
        return Scope(inner, [var for var, outer in [*consts, *xs] if self.is_shared(outer)])
