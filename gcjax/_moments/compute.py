"""The three ways to the moments of some groups of samples, and the loop over chunks of groups.

`vmap(grad)` is exact for every loss that JAX can vmap, but slow on CPU: XLA turns per-sample weight gradients into
batched products and grouped convolutions. "scan" needs no vmap.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.problem import Problem
from gcjax._moments.program import live_equations, run
from gcjax._moments.rules.node import Key, Sums, accumulator_dtype
from gcjax._moments.rules.per_sample import stacked_moments
from gcjax._moments.sink_search import SinkSearch, search_sinks
from gcjax._types import Array, PyTree

# ((sum of the gradients, sum of their squares), (value, aux) of every group, stacked). The sums are pytrees like
# params, in `accumulator_dtype`.
Result = tuple[tuple[PyTree, PyTree], PyTree]


class ChosenMethod(NamedTuple):
    """How the moments of a problem are computed.

    Attributes:
      moments: from the mapped leaves of some groups to their `Result`.
      chunk: number of groups to pass to `moments` at a time.
      search: what the search for sinks found; None under the methods "vmap" and "scan".
    """

    moments: Callable[[list[Array]], Result]
    chunk: int
    search: SinkSearch | None


def choose_method(problem: Problem) -> ChosenMethod:
    """The method that the options ask for, with chunks as large as they allow."""
    method = problem.options.method
    if method in ("auto", "sinks"):
        search = search_sinks(problem)
        chunk = _groups_that_fit(problem, search.stacked_bytes) if method == "auto" else problem.groups
        return ChosenMethod(functools.partial(_sink_moments, problem, search), chunk, search)
    if method == "scan":
        return ChosenMethod(functools.partial(_one_group_moments, problem), 1, None)
    leaves = jax.tree.leaves(problem.params)
    gradient_bytes = sum(leaf.size * accumulator_dtype(leaf.dtype).itemsize for leaf in leaves)
    return ChosenMethod(functools.partial(_vmap_moments, problem), _groups_that_fit(problem, gradient_bytes), None)


def _groups_that_fit(problem: Problem, bytes_per_group: int) -> int:
    """How many groups fit into max_bytes. With a sample axis all of them, because they must see each other."""
    if problem.options.sample_axis is not None:
        return problem.groups
    return max(1, min(problem.groups, problem.options.max_bytes // max(1, bytes_per_group)))


def _vmap_moments(problem: Problem, mapped: list[Array]) -> Result:
    """Moments from gradients that vmap stacks."""
    batched = jax.vmap(problem.gradient, in_axes=(None, 0, None), axis_name=problem.options.sample_axis)
    return _stacked(*batched(problem.params, mapped, problem.shared))


def _one_group_moments(problem: Problem, mapped: list[Array]) -> Result:
    """Moments of one group, without vmap."""
    found = problem.gradient(problem.params, [a[0] for a in mapped], problem.shared)
    return _stacked(*jax.tree.map(lambda x: jnp.asarray(x)[None], found))


def _stacked(grads: PyTree, outputs: PyTree) -> Result:
    leaves, tree = jax.tree.flatten(grads)
    return _transposed(tree, [stacked_moments(leaf) for leaf in leaves]), outputs


def _sink_moments(problem: Problem, search: SinkSearch, mapped: list[Array]) -> Result:
    """Moments made at the sinks: what lies before them runs under vmap."""
    program = search.program
    jaxpr = program.jaxpr
    needs = [key for node in search.nodes for key in node.needs]
    equations, _ = live_equations(jaxpr, [*program.outputs, *needs])

    def one_group(params, mapped, shared, dummy):
        env: dict[Key, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env.update(zip(jaxpr.invars, [*params, *mapped, *shared], strict=True))
        read = run(equations, env, dummy)
        moments = [node.moments_under_vmap(read, dummy) for node in search.nodes]
        return [read(var) for var in program.outputs], moments

    over_groups = jax.vmap(
        one_group, in_axes=(None, 0, None, 0), out_axes=(0, None), axis_name=problem.options.sample_axis
    )
    leaves, tree = jax.tree.flatten(problem.params)
    dummy = jnp.zeros(mapped[0].shape[0])
    outputs, pairs = over_groups(leaves, mapped, problem.shared, dummy)
    pairs = [tuple(x.astype(accumulator_dtype(x.dtype)) for x in pair) for pair in pairs]
    return _transposed(tree, pairs), jax.tree.unflatten(program.outputs_tree, outputs)


def _transposed(tree: jax.tree_util.PyTreeDef, pairs: Sequence[Sums]) -> tuple[PyTree, PyTree]:
    """From the sums of each leaf to a tree of sums and a tree of sums of squares."""
    totals, squares = ([pair[i] for pair in pairs] for i in (0, 1))
    return jax.tree.unflatten(tree, totals), jax.tree.unflatten(tree, squares)


def compute_moments(problem: Problem) -> Result:
    """Moments of all groups: chunk by chunk, sums added and outputs concatenated."""
    moments, chunk, _ = choose_method(problem)
    whole, rest = divmod(problem.groups, chunk)
    if whole == 1 and not rest:
        return moments(problem.mapped)
    head = [a[: whole * chunk].reshape(whole, chunk, *a.shape[1:]) for a in problem.mapped]

    def step(total, mapped):
        sums, outputs = moments(mapped)
        return jax.tree.map(jnp.add, total, sums), outputs

    def start(leaf):
        return _jax_compat.vary_like(jnp.zeros_like(leaf, accumulator_dtype(leaf.dtype)), leaf)

    zeros = jax.tree.map(start, problem.params)
    total, outputs = jax.lax.scan(step, (zeros, zeros), head)
    outputs = jax.tree.map(lambda a: a.reshape(whole * chunk, *a.shape[2:]), outputs)
    if rest:
        sums, last = moments([a[whole * chunk :] for a in problem.mapped])
        total = jax.tree.map(jnp.add, total, sums)
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, last)
    return total, outputs
