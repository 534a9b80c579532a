"""The backward pass of one group of samples as a flat jaxpr: traced, cut down to its live equations, and run.

Calls and checkpoints are inlined, also inside scan bodies. A run ends at the sinks: it computes the loss, the operands
of the sinks and, inside the body of a scan, the sums of the sinks there.
"""

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax

from gcjax import _jax_compat
from gcjax._jax_compat import scan_parts
from gcjax._moments.jaxprs import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ScannedValue, Var, read_atom, variables
from gcjax._moments.problem import Problem
from gcjax._moments.rules.combine import ScannedMoments
from gcjax._moments.rules.node import Key, Reader
from gcjax._types import Array, PyTree

CALLS = {
    **{"jit": "jaxpr", "pjit": "jaxpr"},
    **{"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"},
}
CHECKPOINTS = ("remat", "remat2", "checkpoint")


class BackwardPass(NamedTuple):
    """The inlined backward pass of one group: a function of the leaves of params, its mapped and its shared leaves."""

    closed: ClosedJaxpr
    shared: list[Var]  # the inputs that are equal for all samples
    outputs: list[Any]  # the leaves of (value, aux), variables or literals
    gradients: list[Atom]  # the leaves of the gradient
    outputs_tree: jax.tree_util.PyTreeDef  # of (value, aux)


def trace(problem: Problem) -> BackwardPass:
    """Trace the gradient of the first group, with the sample axis bound so that collectives over it are recorded."""

    def outputs_first(*args):
        grad, outputs = problem.gradient(*args)
        return outputs, grad

    # Slices rather than shapes: they carry the mesh axes over which the batch varies.
    args = problem.params, [a[0] for a in problem.mapped], problem.shared
    closed, (outputs, grad) = flat_jaxpr(outputs_first, args, problem.options.sample_axis, problem.parts)
    ins, outs = closed.jaxpr.invars, closed.jaxpr.outvars
    params = len(jax.tree.leaves(grad))
    shared, values = ins[:params] + ins[params + len(problem.mapped) :], len(outs) - params
    return BackwardPass(closed, shared, outs[:values], outs[values:], jax.tree.structure(outputs))


def flat_jaxpr(fn: Callable[..., PyTree], args: Any, axis: Hashable, size: int) -> tuple[ClosedJaxpr, PyTree]:
    """fn(*args) with calls and checkpoints replaced by their bodies, and the shapes of its results.

    `axis`, the name of the axis over the samples or None, is bound with this size.
    """
    env = [] if axis is None else [(axis, size)]
    closed, shapes = jax.make_jaxpr(fn, axis_env=env, return_shape=True)(*args)
    return jax.make_jaxpr(functools.partial(_inline, closed), axis_env=env)(jax.tree.leaves(args)), shapes


def _inline(closed: ClosedJaxpr, args: Iterable[Array]) -> list[Array]:
    equations, _ = live_equations(closed.jaxpr, closed.jaxpr.outvars)
    read = run(equations, inputs_of(closed, args))
    return [read(atom) for atom in closed.jaxpr.outvars]


def inputs_of(closed: ClosedJaxpr, args: Iterable[Array]) -> dict[Key, Any]:
    """The values of constants and inputs, as `run` needs them."""
    return dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True))


def _evaluate(eqn: JaxprEqn, values: list[Array]) -> list[Array]:
    name = eqn.primitive.name
    if name in CALLS:
        return _inline(_jax_compat.closed(eqn.params[CALLS[name]]), values)
    if name in CHECKPOINTS:
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            # As the lowering of checkpoint does; without it XLA merges the recomputation with the forward pass.
            values = jax.lax.optimization_barrier(values)
        return _inline(_jax_compat.closed(eqn.params["jaxpr"]), values)
    return _jax_compat.bind(eqn, values)


class LiveScan(NamedTuple):
    """The live rest of a scan equation."""

    carries: list[int]  # positions of those that are kept
    outputs: list[int]  # positions of those that are kept, among all results of the scan
    extras: list[ScannedValue | ScannedMoments]  # keys inside the body that it must yield besides
    inputs: dict[Any, None]  # the operands that are still read, as keys
    body: "list[LiveEquation]"


LiveEquation = tuple[JaxprEqn, LiveScan | None]  # with a `LiveScan` for every scan


def live_equations(
    jaxpr: Jaxpr, keys: Iterable[Any], keep_effects: bool = True
) -> tuple[list[LiveEquation], dict[Key, None]]:
    """The equations needed for `keys` or for their side effects, in order, and all keys needed."""
    # A dict rather than a set: its order decides that of the traced program, which must not differ between processes.
    needed: dict[Key, None] = {key: None for key in keys if not isinstance(key, Literal)}
    kept: list[LiveEquation] = []
    for eqn in reversed(jaxpr.eqns):
        is_forced = keep_effects and _jax_compat.has_side_effects(eqn)
        if eqn.primitive.name == "scan":
            wanted = [i for i, var in enumerate(eqn.outvars) if is_forced or var in needed]
            extras = [key for key in needed if isinstance(key, ScannedValue | ScannedMoments) and key.scan is eqn]
            if wanted or extras:
                scan = _live_scan(eqn, wanted, extras, keep_effects)
                kept.append((eqn, scan))
                needed.update(scan.inputs)
        elif is_forced or any(var in needed for var in eqn.outvars):
            kept.append((eqn, None))
            needed.update(dict.fromkeys(variables(eqn.invars)))
    return kept[::-1], needed


def _live_scan(
    eqn: JaxprEqn, wanted: list[int], extras: list[ScannedValue | ScannedMoments], keep_effects: bool
) -> LiveScan:
    body = eqn.params["jaxpr"].jaxpr
    inputs = list(zip(eqn.invars, body.invars, strict=True))
    consts, carried, xs = scan_parts(eqn, inputs)
    outputs = [i for i in wanted if i >= len(carried)]
    carries = {i for i in wanted if i < len(carried)}
    inner = [key for extra in extras for key in ([extra.key] if isinstance(extra, ScannedValue) else extra.node.needs)]
    while True:
        eqns, needed = live_equations(body, [body.outvars[i] for i in [*carries, *outputs]] + inner, keep_effects)
        read = {i for i, (_, inside) in enumerate(carried) if inside in needed}
        if read <= carries:
            break
        carries |= read
    kept = [outer for outer, inside in [*consts, *xs] if inside in needed] + [carried[i][0] for i in carries]
    reads = dict.fromkeys(variables(kept))
    return LiveScan(sorted(carries), outputs, extras, reads, eqns)


def run(equations: list[LiveEquation], env: dict[Key, Any], samples: Any = None) -> Reader:
    """Evaluate live equations; returns a reader of their results and of literals.

    `env` holds the values of inputs and constants, and receives the results. `samples`: the `Samples` that a
    scan with moments inside needs.
    """

    def read(key):
        return read_atom(key, env.__getitem__)

    for eqn, scan in equations:
        if scan is None:
            env.update(zip(eqn.outvars, _evaluate(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        else:
            env.update(_run_scan(eqn, scan, read, samples))
    return read


def _run_scan(eqn: JaxprEqn, scan: LiveScan, read: Reader, samples: Any) -> dict[Key, Any]:
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
        inside = run(scan.body, env, samples)
        extras = [
            inside(extra.key) if isinstance(extra, ScannedValue) else extra.node.moments_under_vmap(inside, samples)
            for extra in scan.extras
        ]
        new_carry = [inside(body.outvars[i]) for i in scan.carries]
        return new_carry, ([inside(body.outvars[i]) for i in scan.outputs], extras)

    init = [read(outer_carry[i]) for i in scan.carries]
    keywords = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (outputs, extras) = jax.lax.scan(step, init, list(xs.values()), **keywords)
    results: dict[Key, Any] = dict(zip([eqn.outvars[i] for i in scan.carries], carry, strict=True))
    results.update(zip([eqn.outvars[i] for i in scan.outputs], outputs, strict=True))
    return {**results, **dict(zip(scan.extras, extras, strict=True))}
