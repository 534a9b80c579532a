"""The moments by sink rewriting: trace, find the sinks, run what lies before them under vmap, reduce at the sinks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._moments.per_sample import accumulator_dtype
from gcjax._moments.rules.combine import Joined, Mixed, Tied
from gcjax._moments.rules.entrywise import Entrywise, Leaf
from gcjax._moments.run import live, run
from gcjax._moments.sink_search import Scope, find
from gcjax._moments.trace import Traced, trace


class Plan(NamedTuple):
    """What to do for one problem.

    Attributes:
        traced: the backward pass of one group.
        nodes: the node of every gradient leaf.
        leaf_bytes: bytes per group of the gradients that are stacked as they are, for want of a sink.
    """

    traced: Traced
    nodes: list
    leaf_bytes: int


def make_plan(problem) -> Plan:
    """Trace the problem and find its sinks."""
    traced = trace(problem)
    jaxpr = traced.closed.jaxpr
    last = traced.n_params + traced.n_mapped
    scope = Scope(jaxpr, jaxpr.invars[: traced.n_params] + jaxpr.invars[last:])
    nodes = [find(scope, var) for var in jaxpr.outvars[traced.n_outputs :]]
    cut = {key for node in nodes for key in stacked_leaves(node) if not scope.is_shared(key)}
    return Plan(traced, nodes, sum(key.aval.size * key.aval.dtype.itemsize for key in cut))


def stacked_leaves(node) -> list:
    """The variables that vmap stacks as gradients of one sample, at the top level of the program."""
    match node:
        case Leaf():
            return [node.key]
        case Entrywise() | Mixed():
            return stacked_leaves(node.child)
        case Tied() | Joined():
            return [key for child in node.children for key in stacked_leaves(child)]
    return []


def sink_moments(problem, plan: Plan, mapped) -> Any:
    """Moments of the groups in `mapped`; returns what `_naive.vmap_moments` does."""
    traced = plan.traced
    jaxpr, count = traced.closed.jaxpr, traced.n_outputs
    outvars = jaxpr.outvars[:count]
    eqns, _ = live(jaxpr, [*outvars, *(key for node in plan.nodes for key in node.needs)])

    def one(params, mapped, shared, token):
        env = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, [*params, *mapped, *shared], strict=True))
        read = run(eqns, env, token)
        return [read(var) for var in outvars], [node.pair(read, token) for node in plan.nodes]

    size = mapped[0].shape[0]
    over_samples = jax.vmap(one, in_axes=(None, 0, None, 0), out_axes=(0, None), axis_name=problem.sample_axis)
    leaves = jax.tree.leaves(problem.params)
    tree: Any = jax.tree.structure(problem.params)
    token = jnp.zeros(size)
    outputs, pairs = over_samples(leaves, mapped, problem.shared, token)
    sums = tuple(tree.unflatten([pair[i].astype(accumulator_dtype(pair[i].dtype)) for pair in pairs]) for i in (0, 1))
    return sums, traced.outputs_tree.unflatten(outputs)
