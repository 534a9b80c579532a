"""From the gradients in a backward pass back to their sinks.

The search starts at a gradient and goes back through operations that move, scale or add entries, to the equation that
makes it. A value that no rule covers is cut where it stands: vmap stacks it over samples.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gcjax._jax_compat import scan_parts
from gcjax._moments.jaxprs import Atom, JaxprEqn, Literal, Scope, Var, aval
from gcjax._moments.problem import Problem
from gcjax._moments.program import BackwardPass, trace
from gcjax._moments.rules.combine import Concatenated, Scanned, ScannedLayers, ScannedSum, Tied
from gcjax._moments.rules.conv import Conv
from gcjax._moments.rules.dense import Dense
from gcjax._moments.rules.embedding import Embedding, is_row_scatter
from gcjax._moments.rules.linear import Entrywise, Mixed, RealPart, entrywise_operand, is_real_part
from gcjax._moments.rules.node import Node, PerSample

ADDITIONS = ("add", "add_any")
# A product with an operand that all samples share counts as a sink if it is this many times larger than the other
# operand. A smaller one is most likely an activation or a cotangent on its way through a layer.
EXPANSION = 8
# Primitives by the operands in which they are linear if the others are fixed.
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


class SinkSearch(NamedTuple):
    """The backward pass of one group, and the node of every leaf of its gradient.

    `stacked_bytes` are the bytes per group of the gradients that no rule covers, which vmap stacks.
    """

    program: BackwardPass
    nodes: list[Node]
    stacked_bytes: int


def search_sinks(problem: Problem) -> SinkSearch:
    """Trace the problem and find the sinks of every gradient."""
    program = trace(problem)
    scope = Scope(program.closed.jaxpr, program.shared)
    nodes = [find_node(scope, var) for var in program.gradients]
    parts = [part for node in nodes for part in outside_scans(node) if isinstance(part, PerSample)]
    stacked = {key for part in parts for key in part.operands if not scope.is_shared(key)}
    types = [aval(key) for key in stacked]
    return SinkSearch(program, nodes, sum(type.size * type.dtype.itemsize for type in types))


def outside_scans(node: Node) -> Iterator[Node]:
    """The node and its descendants, without those inside the body of a scan."""
    yield node
    if not isinstance(node, Scanned):
        for child in node.children:
            yield from outside_scans(child)


def find_node(scope: Scope, var: Atom) -> Node:
    """The node of a gradient: a tree of sinks below linear operations, or a `PerSample`."""
    if isinstance(var, Literal) or var not in scope.made_by:
        return PerSample(var)
    eqn, index = scope.made_by[var]
    name = eqn.primitive.name
    cut = PerSample(var, name)
    if name in ADDITIONS:
        if any(isinstance(atom, Literal) or aval(atom).shape != aval(var).shape for atom in eqn.invars):
            return cut
        return _tied([find_node(scope, atom) for atom in eqn.invars], cut)
    if name == "scan":
        return _scan(scope, eqn, index, cut)
    if name == "concatenate":
        parts = tuple(find_node(scope, atom) for atom in eqn.invars)
        return cut if all(isinstance(part, PerSample) for part in parts) else Concatenated(eqn, children=parts)
    operation, operand = (RealPart, 0) if is_real_part(eqn) else (Entrywise, entrywise_operand(eqn, scope))
    if operand is not None:
        child = find_node(scope, eqn.invars[operand])
        if isinstance(child, PerSample):
            return PerSample(var, child.made_by)
        return operation(eqn, operand, index, children=(child,))
    return _mixed(scope, eqn) or _sink(scope, eqn) or cut


def _sink(scope: Scope, eqn: JaxprEqn) -> Node | None:
    """The sink that the equation is, or None."""
    name = eqn.primitive.name
    if name == "scatter-add":
        return Embedding(eqn) if is_row_scatter(eqn, scope) else None
    if name not in ("dot_general", "conv_general_dilated") or any(isinstance(atom, Literal) for atom in eqn.invars):
        return None
    varying = [aval(atom).size for atom in eqn.invars if not scope.is_shared(atom)]
    if len(varying) == 1 and aval(eqn.outvars[0]).size <= EXPANSION * varying[0]:
        return None
    if name == "dot_general":
        return Dense(eqn)
    # Under a forward batch_group_count the contracted axis is grouped, which the rule does not cover.
    return Conv(eqn) if eqn.params["feature_group_count"] == 1 else None


def _mixed(scope: Scope, eqn: JaxprEqn) -> Node | None:
    """A node for an equation that is linear in a weight's gradient and otherwise equal for all samples, or None."""
    if eqn.primitive.name not in LINEAR:
        return None
    varying = [i for i, atom in enumerate(eqn.invars) if not scope.is_shared(atom)]
    if len(varying) != 1 or varying[0] not in LINEAR[eqn.primitive.name]:
        return None
    source = eqn.invars[varying[0]]
    child = find_node(scope, source)
    nodes = list(outside_scans(child))
    # A product with a shared operand is a cotangent on its way through a layer's weight.
    products = [node for node in nodes if isinstance(node, Dense | Conv)]
    if isinstance(child, PerSample) or any(scope.is_shared(key) for node in products for key in node.operands):
        return None
    # A product of two activations (in attention) is no larger than they are: stacking it costs nothing more.
    held = sum(aval(key).size for key in child.operands if not scope.is_shared(key))
    if aval(source).size < held and not any(isinstance(node, Mixed) for node in nodes):
        return None
    return Mixed(eqn, varying[0], children=(child,))


def _tied(children: Sequence[Node], cut: PerSample) -> Node:
    """The sum of gradients; `cut` if no child has a rule."""
    if all(isinstance(child, PerSample) for child in children):
        return cut
    flat = [part for child in children for part in (child.children if isinstance(child, Tied) else [child])]
    return Tied(children=tuple(flat)) if len(flat) > 1 else flat[0]


def _scan(scope: Scope, eqn: JaxprEqn, index: int, cut: PerSample) -> Node:
    """The node of result `index` of a scan."""
    body = scope.body(eqn)
    out = body.jaxpr.outvars[index]
    carries, starts = scan_parts(eqn, body.jaxpr.invars)[1], scan_parts(eqn, eqn.invars)[1]
    if index >= len(carries):
        child = find_node(body, out)
        if isinstance(child, PerSample):
            return PerSample(cut.key, child.made_by)
        return ScannedLayers(eqn, children=(child,))
    carry = carries[index]
    if body.uses(carry) != 1 or not scope.is_zero(starts[index]):
        return cut
    terms = _added_to(body, carry, out)
    if not terms:
        return cut
    child = _tied([find_node(body, term) for term in terms], cut)
    return ScannedSum(eqn, children=(child,)) if _can_stack(child) else cut


def _can_stack(node: Node) -> bool:
    """Whether time may join the positions: no whole gradient per step, and no factor that may change with time."""
    if isinstance(node, PerSample | Mixed | Concatenated) or (isinstance(node, Entrywise) and node.shared):
        return False
    return all(map(_can_stack, node.children))


def _added_to(body: Scope, carry: Var, var: Atom) -> list[Atom] | None:
    """The terms whose sum with `carry` is `var`; None if `var` is anything else."""
    if isinstance(var, Literal) or var not in body.made_by:
        return [] if var is carry else None
    eqn, _ = body.made_by[var]
    if eqn.primitive.name not in ADDITIONS:
        return None
    for this, other in (eqn.invars, reversed(eqn.invars)):
        terms = _added_to(body, carry, this)
        if terms is not None and not isinstance(other, Literal):
            return [*terms, other]
    return None
