"""From the gradient outputs of a jaxpr back to their sinks.

The walk starts at a gradient and goes back through operations that move, scale or add entries to the equation that
makes it. What it does not recognise is cut where it stands: that value is stacked over samples by vmap.
"""

import numpy as np

from gcjax._moments import _compat
from gcjax._moments._combine import ScannedLayers, ScannedSum, Tied
from gcjax._moments._conv import Conv, is_kernel_gradient
from gcjax._moments._dense import Dense
from gcjax._moments._embedding import Embedding, is_row_scatter
from gcjax._moments._entrywise import Entrywise, Leaf, entrywise_operand

ADDITIONS = ("add", "add_any")
ZERO_KEEPING = ("broadcast_in_dim", "pvary", "convert_element_type", "copy")


class Scope:
    """One jaxpr with what the walk asks about it.

    Args:
        jaxpr: an open jaxpr.
        shared: those of its inputs that are equal for all samples.
    """

    def __init__(self, jaxpr, shared):
        self.jaxpr = jaxpr
        self.made_by = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
        self.shared = set(shared) | set(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            if not eqn.effects and eqn.primitive.name != "axis_index" and all(map(self.is_shared, eqn.invars)):
                self.shared.update(eqn.outvars)

    def is_shared(self, atom) -> bool:
        """Whether the value is known to be equal for all samples."""
        return _compat.is_literal(atom) or atom in self.shared

    def is_zero(self, atom) -> bool:
        """Whether the value is known to be all zeros."""
        while not _compat.is_literal(atom):
            eqn, _ = self.made_by.get(atom, (None, 0))
            if eqn is None or eqn.primitive.name not in ZERO_KEEPING:
                return False
            atom = eqn.invars[0]
        return not np.any(atom.val)

    def uses(self, var) -> int:
        return sum(atom is var for eqn in self.jaxpr.eqns for atom in eqn.invars) + sum(
            atom is var for atom in self.jaxpr.outvars
        )

    def body(self, scan) -> "Scope":
        """The scope of a scan's body."""
        inner = scan.params["jaxpr"].jaxpr
        first, last = scan.params["num_consts"], scan.params["num_consts"] + scan.params["num_carry"]
        pairs = list(zip(inner.invars, scan.invars, strict=True))
        # A carry may differ between samples after the first step though it starts equal.
        return Scope(inner, [v for v, outer in pairs[:first] + pairs[last:] if self.is_shared(outer)])


def find(scope, var):
    """The node of a gradient: a tree of sinks below operations on entries, or a `Leaf`."""
    if _compat.is_literal(var) or var not in scope.made_by:
        return Leaf(var)
    eqn, index = scope.made_by[var]
    name = eqn.primitive.name
    if name in ADDITIONS:
        return _addition(scope, eqn, var)
    if name == "scan":
        return _scan(scope, eqn, index, var)
    if any(map(_compat.is_literal, eqn.invars)) and name in ("dot_general", "conv_general_dilated"):
        return Leaf(var)
    if name == "dot_general":
        return Dense(eqn)
    if name == "conv_general_dilated" and is_kernel_gradient(eqn):
        return Conv(eqn)
    if name == "scatter-add" and is_row_scatter(eqn, scope.is_zero):
        return Embedding(eqn)
    operand = entrywise_operand(eqn, scope.is_shared)
    if operand is not None:
        child = find(scope, eqn.invars[operand])
        if not isinstance(child, Leaf):
            return Entrywise(eqn, operand, child)
    return Leaf(var)


def _addition(scope, eqn, var):
    if any(_compat.is_literal(atom) or atom.aval.shape != var.aval.shape for atom in eqn.invars):
        return Leaf(var)
    return _tied([find(scope, atom) for atom in eqn.invars], var)


def _tied(children, var):
    if all(isinstance(child, Leaf) for child in children):
        return Leaf(var)
    flat = [part for child in children for part in (child.children if isinstance(child, Tied) else [child])]
    return Tied(tuple(flat)) if len(flat) > 1 else flat[0]


def _scan(scope, eqn, index, var):
    body = scope.body(eqn)
    carries = eqn.params["num_carry"]
    if index >= carries:
        child = find(body, body.jaxpr.outvars[index])
        return Leaf(var) if isinstance(child, Leaf) else ScannedLayers(eqn, child)
    carry = body.jaxpr.invars[eqn.params["num_consts"] + index]
    if body.uses(carry) != 1 or not scope.is_zero(eqn.invars[eqn.params["num_consts"] + index]):
        return Leaf(var)
    terms = _added_to(body, carry, body.jaxpr.outvars[index])
    if not terms:
        return Leaf(var)
    child = _tied([find(body, term) for term in terms], None)
    return ScannedSum(eqn, child) if _can_stack(child) else Leaf(var)


def _can_stack(node) -> bool:
    """Whether time may join the positions: no whole gradient per step, no factor that may change with time."""
    if isinstance(node, Tied):
        return all(map(_can_stack, node.children))
    if isinstance(node, Entrywise):
        return not node.shared and _can_stack(node.child)
    if isinstance(node, ScannedLayers | ScannedSum):
        return _can_stack(node.child)
    return not isinstance(node, Leaf)


def _added_to(body, carry, var):
    """The terms whose sum with `carry` is `var`, or None if `var` is anything else."""
    if _compat.is_literal(var) or var not in body.made_by:
        return [] if var is carry else None
    eqn, _ = body.made_by[var]
    if eqn.primitive.name not in ADDITIONS:
        return None
    for this, other in (eqn.invars, reversed(eqn.invars)):
        terms = _added_to(body, carry, this)
        if terms is not None and not _compat.is_literal(other):
            return [*terms, other]
    return None
