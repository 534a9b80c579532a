"""The backward pass of one group of samples as a flat jaxpr: traced, cut down to what is needed, and run.

Calls and checkpoints are inlined, also inside scan bodies. A run ends at the sinks: it computes the loss, the operands
of the sinks and, inside the body of a scan, the sums of the sinks there.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from gcjax import _jax_compat
from gcjax._jax_compat import scan_parts
from gcjax._moments.jaxprs import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ScannedValue, Var, read_atom, variables
from gcjax._moments.problem import Problem
from gcjax._moments.rules.combine import ScannedMoments
from gcjax._moments.rules.node import Key, Reader
from gcjax._types import Array

CALLS = {
    **{"jit": "jaxpr", "pjit": "jaxpr"},
    **{"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"},
}
CHECKPOINTS = ("remat", "remat2", "checkpoint")


class BackwardPass(NamedTuple):
    """The inlined backward pass of one group.

    Attributes:
      jaxpr: from the leaves of (params, one group's mapped leaves, shared leaves) to `outputs` and `gradients`.
      consts: values of the jaxpr's constants.
      shared: the inputs that are equal for all samples.
      outputs: the leaves of (value, aux), variables or literals.
      gradients: the leaves of the gradient.
      outputs_tree: structure of (value, aux).
    """

    jaxpr: Jaxpr
    consts: list[Array]
    shared: list[Var]
    outputs: list[Any]
    gradients: list[Atom]
    outputs_tree: jax.tree_util.PyTreeDef


def trace(problem: Problem) -> BackwardPass:
    """Trace the gradient of the first group, with the sample axis bound so that collectives over it are recorded."""
    env = [] if problem.options.sample_axis is None else [(problem.options.sample_axis, problem.groups)]
    # Slices rather than shapes: they carry the mesh axes over which the batch varies.
    leaves, tree = jax.tree.flatten((problem.params, [a[0] for a in problem.mapped], problem.shared))

    def flat(*leaves):
        grad, outputs = problem.gradient(*jax.tree.unflatten(tree, leaves))
        return outputs, jax.tree.leaves(grad)

    closed, (outputs, _) = jax.make_jaxpr(flat, axis_env=env, return_shape=True)(*leaves)
    inlined = jax.make_jaxpr(lambda *args: inline(closed, args), axis_env=env)(*leaves)
    ins, outs = inlined.jaxpr.invars, inlined.jaxpr.outvars
    params = len(jax.tree.leaves(problem.params))
    shared, values = ins[:params] + ins[params + len(problem.mapped) :], len(outs) - params
    return BackwardPass(
        inlined.jaxpr, inlined.consts, shared, outs[:values], outs[values:], jax.tree.structure(outputs)
    )


def inline(closed: ClosedJaxpr, args: Iterable[Array], keep_effects: bool = True) -> list[Array]:
    """Evaluate a closed jaxpr, replacing calls by their bodies; equations without a result only if `keep_effects`."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        if eqn.outvars or keep_effects:
            values = [read_atom(atom, env.__getitem__) for atom in eqn.invars]
            env.update(zip(eqn.outvars, _evaluate(eqn, values, keep_effects), strict=True))
    return [read_atom(atom, env.__getitem__) for atom in closed.jaxpr.outvars]


def _evaluate(eqn: JaxprEqn, values: list[Array], keep_effects: bool) -> list[Array]:
    name = eqn.primitive.name
    if name in CALLS:
        return inline(_jax_compat.closed(eqn.params[CALLS[name]]), values, keep_effects)
    if name in CHECKPOINTS:
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            # As the lowering of checkpoint does; without it XLA merges the recomputation with the forward pass.
            values = jax.lax.optimization_barrier(values)
        return inline(_jax_compat.closed(eqn.params["jaxpr"]), values, keep_effects)
    if name == "scan":
        consts, init, xs = scan_parts(eqn, values)

        def step(carry, x):
            out = inline(eqn.params["jaxpr"], [*consts, *carry, *x], keep_effects)
            return out[: len(init)], out[len(init) :]

        carry, ys = jax.lax.scan(step, init, xs, **_scan_keywords(eqn))
        return [*carry, *ys]
    return _jax_compat.bind(eqn, values)


def _scan_keywords(eqn: JaxprEqn) -> dict[str, Any]:
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


class LiveScan(NamedTuple):
    """The live rest of a scan equation.

    Attributes:
      carries: positions of the kept carries.
      outputs: positions of the kept outputs among all results of the scan.
      extras: keys of the values and moments inside the body that it must yield besides.
      inputs: the scan's operands that are still read, as keys.
      body: live equations of the body.
    """

    carries: list[int]
    outputs: list[int]
    extras: list[ScannedValue | ScannedMoments]
    inputs: dict[Any, None]
    body: "list[LiveEquation]"


LiveEquation = tuple[JaxprEqn, LiveScan | None]  # with a `LiveScan` for every scan


def live_equations(jaxpr: Jaxpr, keys: Iterable[Key]) -> tuple[list[LiveEquation], dict[Key, None]]:
    """The equations needed for `keys`, in order, and all keys needed."""
    # A dict rather than a set: its order decides that of the traced program, which must not differ between processes.
    needed: dict[Key, None] = {key: None for key in keys if not isinstance(key, Literal)}
    kept: list[LiveEquation] = []
    for eqn in reversed(jaxpr.eqns):
        is_forced = _jax_compat.has_side_effects(eqn)
        if eqn.primitive.name == "scan":
            wanted = [i for i, var in enumerate(eqn.outvars) if is_forced or var in needed]
            extras = [key for key in needed if isinstance(key, ScannedValue | ScannedMoments) and key.scan is eqn]
            if wanted or extras:
                scan = _live_scan(eqn, wanted, extras)
                kept.append((eqn, scan))
                needed.update(scan.inputs)
        elif is_forced or any(var in needed for var in eqn.outvars):
            kept.append((eqn, None))
            needed.update(dict.fromkeys(variables(eqn.invars)))
    return kept[::-1], needed


def _live_scan(eqn: JaxprEqn, wanted: list[int], extras: list[ScannedValue | ScannedMoments]) -> LiveScan:
    body = eqn.params["jaxpr"].jaxpr
    inputs = list(zip(eqn.invars, body.invars, strict=True))
    consts, carried, xs = scan_parts(eqn, inputs)
    outputs = [i for i in wanted if i >= len(carried)]
    carries = {i for i in wanted if i < len(carried)}
    inner = [key for extra in extras for key in ([extra.key] if isinstance(extra, ScannedValue) else extra.node.needs)]
    while True:
        eqns, needed = live_equations(body, [body.outvars[i] for i in [*carries, *outputs]] + inner)
        read = {i for i, (_, inside) in enumerate(carried) if inside in needed}
        if read <= carries:
            break
        carries |= read
    kept = [outer for outer, inside in [*consts, *xs] if inside in needed] + [carried[i][0] for i in carries]
    reads = dict.fromkeys(variables(kept))
    return LiveScan(sorted(carries), outputs, extras, reads, eqns)


def run(equations: list[LiveEquation], env: dict[Key, Any], dummy: Array) -> Reader:
    """Evaluate live equations; returns a reader of their results and of literals.

    `env` holds the values of inputs and constants, and receives the results. For `dummy` see `Node.moments_under_vmap`.
    """

    def read(key):
        return read_atom(key, env.__getitem__)

    for eqn, scan in equations:
        if scan is None:
            env.update(zip(eqn.outvars, _jax_compat.bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        else:
            env.update(_run_scan(eqn, scan, read, dummy))
    return read


def _run_scan(eqn: JaxprEqn, scan: LiveScan, read: Reader, dummy: Array) -> dict[Key, Any]:
    body, closed_over = eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts
    outer_consts, outer_carry, outer_xs = scan_parts(eqn, eqn.invars)
    inner_consts, inner_carry, inner_xs = scan_parts(eqn, body.invars)

    def values(inner, outer):
        return {
            var: read(atom)
            for var, atom in zip(inner, outer, strict=True)
            if isinstance(atom, Literal) or atom in scan.inputs
        }

    consts = {**values(inner_consts, outer_consts), **dict(zip(body.constvars, closed_over, strict=True))}
    xs = values(inner_xs, outer_xs)

    def step(carry, x):
        env = {**consts, **dict(zip(xs, x, strict=True))}
        env.update({inner_carry[i]: value for i, value in zip(scan.carries, carry, strict=True)})
        inside = run(scan.body, env, dummy)
        extras = [
            inside(extra.key) if isinstance(extra, ScannedValue) else extra.node.moments_under_vmap(inside, dummy)
            for extra in scan.extras
        ]
        new_carry = [inside(body.outvars[i]) for i in scan.carries]
        return new_carry, ([inside(body.outvars[i]) for i in scan.outputs], extras)

    init = [read(outer_carry[i]) for i in scan.carries]
    carry, (outputs, extras) = jax.lax.scan(step, init, list(xs.values()), **_scan_keywords(eqn))
    results: dict[Key, Any] = dict(zip([eqn.outvars[i] for i in scan.carries], carry, strict=True))
    results.update(zip([eqn.outvars[i] for i in scan.outputs], outputs, strict=True))
    return {**results, **dict(zip(scan.extras, extras, strict=True))}
