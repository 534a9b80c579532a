"""`value_and_moments`, and the three ways to the moments of a chunk of the batch.

`vmap(grad)` is exact for every loss that JAX can vmap, but slow on CPU: XLA turns per-sample weight gradients into
batched products and grouped convolutions. "scan" needs no vmap.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.aux import aux_of_batch
from gcjax._moments.problem import MAX_BYTES, Options, Problem, make_problem
from gcjax._moments.program import inputs_of, live_equations, run
from gcjax._moments.rules.node import Samples, Sums, accumulator_dtype, stacked_moments, widened
from gcjax._moments.sink_search import SinkSearch, search_sinks
from gcjax._types import Array, PyTree


class Moments(NamedTuple):
    """First and second moment of the per-sample gradients of one batch, local to the worker.

    Attributes:
      grad: the batch gradient; pytree, shapes and dtypes of params.
      sum_grad_squared: elementwise `sum_z (grad f_z / |B|)^2`; pytree and shapes of params, float32 or wider.
    """

    grad: PyTree
    sum_grad_squared: PyTree


def value_and_moments(
    loss_fn: Callable[[PyTree, PyTree], Any],
    has_aux: bool = False,
    *,
    in_axes: PyTree = 0,
    sample_axis: Hashable = None,
    microbatches: int | None = None,
    groups: int | str | None = None,
    reduction: str = "mean",
    method: str = "auto",
    max_bytes: int = MAX_BYTES,
) -> Callable[[PyTree, PyTree], tuple[Any, Moments]]:
    """Like `jax.value_and_grad`, and also the sum of squared per-sample gradients, exactly, in one backward pass.

    docs/squares.md has formulas, costs and the losses that are allowed: means or sums over independent samples.
    `check_moments` checks a loss. Source: arXiv 1802.06058, and BackPACK (1912.10985) for dense layers.

    Args:
      loss_fn: `(params, batch) -> loss`, a real floating scalar, or `(loss, aux)` with has_aux. It accepts one sample.
      has_aux: whether loss_fn returns aux. It comes back in the shapes for the whole batch: see docs/squares.md.
      in_axes: prefix of the batch's tree: 0 for leaves split over samples, None for shared ones (model state, keys).
      sample_axis: name of an axis over samples, bound while loss_fn runs, for BatchNorm. Then the batch is one chunk.
      microbatches: None, or a number of parts of the batch that take the place of samples, for a loss that needs
        several samples at a time: an approximation.
      groups: None for exact squares. A number g: where a loop over the samples makes a parameter's squares, it makes
        the gradients of g groups of them instead, and estimates the squares without bias. "auto": 8, or the largest
        divisor of the batch size from 4 on, or None.
      reduction: "mean", or "sum" for `sum_z grad f_z` and `sum_z (grad f_z)^2`.
      method: "auto"; "sinks" without chunks; "vmap" stacks per-sample gradients; "scan" takes one sample at a time.
      max_bytes: memory that stacked per-sample gradients may take, under "auto" and "vmap".

    Returns:
      `fn(params, batch) -> (value, Moments)`, or `((value, aux), Moments)`. Call it under `jax.jit`.

    Raises:
      ValueError, TypeError: also from `fn`; a bad option, argument or loss, or aux that has no value for the batch.

    >>> value_and_moments(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))[1]
    Moments(grad=Array([1., 4.], dtype=float32), sum_grad_squared=Array([ 1., 16.], dtype=float32))
    """
    options = Options(loss_fn, has_aux, in_axes, sample_axis, microbatches, groups, reduction, method, max_bytes)

    def compute(params, batch):
        problem = make_problem(options, params, batch)
        (grad, squares), (values, aux) = compute_moments(problem)
        grad = jax.tree.map(lambda g, p: g.astype(p.dtype), grad, problem.params)
        value = (jnp.mean if reduction == "mean" else jnp.sum)(values, axis=0)
        return ((value, aux_of_batch(problem, aux)) if has_aux else value), (grad, squares)

    if sample_axis is not None:
        compute = functools.partial(_jax_compat.without_mesh_types, compute)

    def moments(params, batch):
        value, (grad, squares) = _jax_compat.with_automatic_samples(compute, params, batch)
        return value, Moments(grad, squares)

    return moments


# ((sum of the gradients, sum of their squares), (value, aux) of every part, stacked). The sums are pytrees like
# params, in `accumulator_dtype`.
Result = tuple[tuple[PyTree, PyTree], PyTree]


class ChosenMethod(NamedTuple):
    """The way to the moments of a problem."""

    moments: Callable[[list[Array]], Result]  # of the mapped leaves of some parts
    chunk: int  # number of parts to pass to `moments` at a time
    search: SinkSearch | None  # None under the methods "vmap" and "scan"


def choose_method(problem: Problem) -> ChosenMethod:
    """The method that the options ask for, with chunks as large as they allow."""
    method = problem.options.method
    if method in ("auto", "sinks"):
        search = search_sinks(problem)
        chunk = _parts_that_fit(problem, search.stacked_bytes) if method == "auto" else problem.parts
        return ChosenMethod(functools.partial(_sink_moments, problem, search), chunk, search)
    if method == "scan":
        return ChosenMethod(functools.partial(_one_part_moments, problem), 1, None)
    leaves = jax.tree.leaves(problem.params)
    gradient_bytes = sum(leaf.size * accumulator_dtype(leaf.dtype).itemsize for leaf in leaves)
    return ChosenMethod(functools.partial(_vmap_moments, problem), _parts_that_fit(problem, gradient_bytes), None)


def _parts_that_fit(problem: Problem, bytes_per_part: int) -> int:
    """The parts that fit into max_bytes, a multiple of the groups if possible.

    With a sample axis all parts, because they must see each other.
    """
    if problem.options.sample_axis is not None:
        return problem.parts
    fitting = max(1, min(problem.parts, problem.options.max_bytes // max(1, bytes_per_part)))
    groups = problem.groups or 1
    return fitting - fitting % groups if fitting >= groups else fitting


def _vmap_moments(problem: Problem, mapped: list[Array]) -> Result:
    """Moments from gradients that vmap stacks."""
    batched = jax.vmap(problem.gradient, in_axes=(None, 0, None), axis_name=problem.options.sample_axis)
    return _stacked(*batched(problem.params, mapped, problem.shared))


def _one_part_moments(problem: Problem, mapped: list[Array]) -> Result:
    """Moments of one part, without vmap."""
    found = problem.gradient(problem.params, [a[0] for a in mapped], problem.shared)
    return _stacked(*jax.tree.map(lambda x: jnp.asarray(x)[None], found))


def _stacked(grads: PyTree, outputs: PyTree) -> Result:
    leaves, tree = jax.tree.flatten(grads)
    return _transposed(tree, [stacked_moments(leaf) for leaf in leaves]), outputs


def _sink_moments(problem: Problem, search: SinkSearch, mapped: list[Array]) -> Result:
    """Moments made at the sinks; the program before them runs under vmap."""
    program = search.program
    needs = [key for node in search.nodes for key in node.needs]
    equations, _ = live_equations(program.closed.jaxpr, [*program.outputs, *needs])

    def one_part(params, mapped, shared, each):
        samples = Samples(each, problem.groups)
        read = run(equations, inputs_of(program.closed, [*params, *mapped, *shared]), samples)
        moments = [node.moments_under_vmap(read, samples) for node in search.nodes]
        return [read(var) for var in program.outputs], moments

    over_parts = jax.vmap(
        one_part, in_axes=(None, 0, None, 0), out_axes=(0, None), axis_name=problem.options.sample_axis
    )
    leaves, tree = jax.tree.flatten(problem.params)
    outputs, pairs = over_parts(leaves, mapped, problem.shared, jnp.zeros(mapped[0].shape[0]))
    pairs = [(widened(total), widened(squares)) for total, squares in pairs]
    return _transposed(tree, pairs), jax.tree.unflatten(program.outputs_tree, outputs)


def _transposed(tree: jax.tree_util.PyTreeDef, pairs: Sequence[Sums]) -> tuple[PyTree, PyTree]:
    """From the sums of each leaf to a tree of sums and a tree of sums of squares."""
    totals, squares = ([pair[i] for pair in pairs] for i in (0, 1))  # pairs may be empty
    return jax.tree.unflatten(tree, totals), jax.tree.unflatten(tree, squares)


def compute_moments(problem: Problem) -> Result:
    """Moments of all parts: chunk by chunk, sums added and outputs concatenated."""
    moments, chunk, _ = choose_method(problem)
    whole, rest = divmod(problem.parts, chunk)
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
