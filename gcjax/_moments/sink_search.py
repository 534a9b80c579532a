"""From the gradient outputs of a jaxpr back to their sinks.

The walk starts at a gradient and goes back through operations that move, scale or add entries to the equation that
makes it. What it does not recognise is cut where it stands: that value is stacked over samples by vmap.
"""

import math

import numpy as np

from gcjax import _jax_compat
from gcjax._moments.rules.combine import Joined, Mixed, ScannedLayers, ScannedSum, Stacked, Tied
from gcjax._moments.rules.conv import Conv, is_kernel_gradient
from gcjax._moments.rules.dense import Dense
from gcjax._moments.rules.embedding import Embedding, is_row_scatter
from gcjax._moments.rules.entrywise import Entrywise, Leaf, entrywise_operand

ADDITIONS = ("add", "add_any")
ZERO_KEEPING = ("broadcast_in_dim", "pvary", "convert_element_type", "copy")
# A product with one operand shared by all samples counts as a sink when it is that much larger than the other operand.
EXPANSION = 8
# Primitives by the operands in which they are linear when the others are fixed.
LINEAR = {
    "dot_general": (0, 1),
    "conv_general_dilated": (0, 1),
    "reduce_sum": (0,),
    "broadcast_in_dim": (0,),
    "cumsum": (0,),
    "gather": (0,),
    "scatter-add": (2,),
    "triangular_solve": (1,),
    "reduce_window_sum": (0,),
}


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
            # An effect is that of a random or impure operation, or of naming the sample axis (axis_index).
            if not eqn.effects and all(map(self.is_shared, eqn.invars)):
                self.shared.update(eqn.outvars)

    def is_shared(self, atom) -> bool:
        """Whether the value is known to be equal for all samples."""
        return _jax_compat.is_literal(atom) or atom in self.shared

    def is_zero(self, atom) -> bool:
        """Whether the value is known to be all zeros."""
        while not _jax_compat.is_literal(atom):
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
    """The node of a gradient: a tree of sinks below linear operations, or a `Leaf`."""
    if _jax_compat.is_literal(var) or var not in scope.made_by:
        return Leaf(var)
    eqn, index = scope.made_by[var]
    name = eqn.primitive.name
    leaf = Leaf(var, name)
    if name in ADDITIONS:
        return _addition(scope, eqn, leaf)
    if name == "scan":
        return _scan(scope, eqn, index, leaf)
    if name == "concatenate":
        parts = tuple(find(scope, atom) for atom in eqn.invars)
        return leaf if all(isinstance(part, Leaf) for part in parts) else Joined(eqn, parts)
    operand = entrywise_operand(eqn, scope)
    if operand is not None:
        child = find(scope, eqn.invars[operand])
        return Leaf(var, child.made_by) if isinstance(child, Leaf) else Entrywise(eqn, index, operand, child)
    return _mixed(scope, eqn) or _sink(scope, eqn) or leaf


def _sink(scope, eqn):
    """The sink that the equation is, or None."""
    name = eqn.primitive.name
    if name == "scatter-add":
        return Embedding(eqn) if is_row_scatter(eqn, scope.is_zero) else None
    if name not in ("dot_general", "conv_general_dilated") or any(map(_jax_compat.is_literal, eqn.invars)):
        return None
    varying = [atom.aval.size for atom in eqn.invars if not scope.is_shared(atom)]
    if len(varying) == 1 and eqn.outvars[0].aval.size <= EXPANSION * varying[0]:
        # Most likely an activation or a cotangent on its way through a layer, not a weight's gradient.
        return None
    if name == "dot_general":
        return Dense(eqn)
    return Conv(eqn) if name == "conv_general_dilated" and is_kernel_gradient(eqn) else None


def _mixed(scope, eqn):
    """A node for an equation that is linear in a weight's gradient and otherwise equal for all samples, or None."""
    if eqn.primitive.name not in LINEAR:
        return None
    varying = [i for i, atom in enumerate(eqn.invars) if not scope.is_shared(atom)]
    if len(varying) != 1 or varying[0] not in LINEAR[eqn.primitive.name]:
        return None
    source = eqn.invars[varying[0]]
    child = find(scope, source)
    if isinstance(child, Leaf) or any(map(scope.is_shared, _sink_operands(child))):
        return None
    # A product of two activations (in attention) is no larger than they are: stacking it costs nothing new.
    held = sum(key_size(key) for key in child.operands if not scope.is_shared(key))
    return Mixed(eqn, varying[0], child) if _has_mixed(child) or source.aval.size >= held else None


def _has_mixed(node) -> bool:
    match node:
        case Mixed():
            return True
        case Entrywise():
            return _has_mixed(node.child)
        case Tied() | Joined():
            return any(map(_has_mixed, node.children))
    return False


def _sink_operands(node) -> tuple:
    """Operands of the node's products; a shared one tells a cotangent passed on through a layer's weight."""
    match node:
        case Dense() | Conv():
            return node.operands
        case Entrywise() | Mixed():
            return _sink_operands(node.child)
        case Tied() | Joined():
            return tuple(atom for child in node.children for atom in _sink_operands(child))
    return ()


def key_size(key) -> int:
    """Number of entries per sample of an operand."""
    if isinstance(key, Stacked):
        return key.scan.params["length"] * key_size(key.key)
    return math.prod(key.aval.shape)


def _addition(scope, eqn, leaf):
    shape = eqn.outvars[0].aval.shape
    if any(_jax_compat.is_literal(atom) or atom.aval.shape != shape for atom in eqn.invars):
        return leaf
    return _tied([find(scope, atom) for atom in eqn.invars], leaf)


def _tied(children, leaf):
    if all(isinstance(child, Leaf) for child in children):
        return leaf
    flat = [part for child in children for part in (child.children if isinstance(child, Tied) else [child])]
    return Tied(tuple(flat)) if len(flat) > 1 else flat[0]


def _scan(scope, eqn, index, leaf):
    body = scope.body(eqn)
    carries = eqn.params["num_carry"]
    if index >= carries:
        child = find(body, body.jaxpr.outvars[index])
        return Leaf(leaf.key, child.made_by) if isinstance(child, Leaf) else ScannedLayers(eqn, child)
    carry = body.jaxpr.invars[eqn.params["num_consts"] + index]
    if body.uses(carry) != 1 or not scope.is_zero(eqn.invars[eqn.params["num_consts"] + index]):
        return leaf
    terms = _added_to(body, carry, body.jaxpr.outvars[index])
    if not terms:
        return leaf
    child = _tied([find(body, term) for term in terms], leaf)
    return ScannedSum(eqn, child) if _can_stack(child) else leaf


def _can_stack(node) -> bool:
    """Whether time may join the positions: no whole gradient per step, no factor that may change with time."""
    if isinstance(node, Tied):
        return all(map(_can_stack, node.children))
    if isinstance(node, Entrywise):
        return not node.shared and _can_stack(node.child)
    if isinstance(node, Mixed | Joined):
        return False
    if isinstance(node, ScannedLayers | ScannedSum):
        return _can_stack(node.child)
    return not isinstance(node, Leaf)


def _added_to(body, carry, var):
    """The terms whose sum with `carry` is `var`, or None if `var` is anything else."""
    if _jax_compat.is_literal(var) or var not in body.made_by:
        return [] if var is carry else None
    eqn, _ = body.made_by[var]
    if eqn.primitive.name not in ADDITIONS:
        return None
    for this, other in (eqn.invars, reversed(eqn.invars)):
        terms = _added_to(body, carry, this)
        if terms is not None and not _jax_compat.is_literal(other):
            return [*terms, other]
    return None
