"""The backward pass of one group as a flat jaxpr: calls and checkpoints inlined, also inside scan bodies."""

from typing import Any, NamedTuple

import jax

from gcjax import _jax_compat

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
CHECKPOINTS = ("remat", "remat2", "checkpoint")


class Traced(NamedTuple):
    """The inlined backward pass of one group.

    Attributes:
        closed: closed jaxpr from the leaves of (params, one group's mapped leaves, shared leaves) to the leaves of
            (value, aux), then those of the gradient.
        outputs_tree: structure of (value, aux).
        n_params, n_mapped: how the inputs divide.
        n_outputs: number of leaves of (value, aux).
    """

    closed: Any
    outputs_tree: Any
    n_params: int
    n_mapped: int
    n_outputs: int


def trace(problem) -> Traced:
    """Trace the gradient of the first group, with the sample axis bound so that collectives over it are recorded."""
    env = [] if problem.sample_axis is None else [(problem.sample_axis, problem.groups)]
    # Slices rather than shapes: they carry the mesh axes over which the batch varies.
    arguments = (problem.params, [a[0] for a in problem.mapped], problem.shared)
    leaves, tree = jax.tree.flatten(arguments)

    def flat(*leaves):
        grad, outputs = problem.gradient(*jax.tree.unflatten(tree, leaves))
        return outputs, jax.tree.leaves(grad)

    closed, shapes = jax.make_jaxpr(flat, axis_env=env, return_shape=True)(*leaves)
    outputs_tree: Any = jax.tree.structure(shapes[0])
    flattened = jax.make_jaxpr(lambda *args: inline(closed, *args), axis_env=env)(*leaves)
    return Traced(
        flattened, outputs_tree, len(jax.tree.leaves(problem.params)), len(problem.mapped), outputs_tree.num_leaves
    )


def inline(closed, *args):
    """Evaluate a closed jaxpr, replacing calls by their bodies."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if _jax_compat.is_literal(atom) else env[atom]

    for eqn in closed.jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _evaluate(eqn, values), strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _evaluate(eqn, values):
    name = eqn.primitive.name
    if name in CALLS:
        return inline(_jax_compat.closed(eqn.params[CALLS[name]]), *values)
    if name in CHECKPOINTS:
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            # As the lowering of checkpoint does; without it XLA merges the recomputation with the forward pass.
            values = jax.lax.optimization_barrier(values)
        return inline(_jax_compat.closed(eqn.params["jaxpr"]), *values)
    if name == "scan":
        body = eqn.params["jaxpr"]
        return run_scan(eqn, values, lambda consts, carry, x: inline(body, *consts, *carry, *x))
    return _jax_compat.bind(eqn, values)


def run_scan(eqn, values, body):
    """Run a scan equation with another body: `(consts, carry, x) -> [new carry and outputs]`, same carries."""
    split = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
    consts, init, xs = values[: split[0]], values[split[0] : split[1]], values[split[1] :]

    def step(carry, x):
        out = body(consts, carry, x)
        return out[: len(init)], out[len(init) :]

    keywords = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, list(init), list(xs), **keywords)
    return [*carry, *ys]
