"""Auxiliary output of a loss: that of a batch, from that of its parts."""

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp

from gcjax._jax_compat import scan_parts
from gcjax._kernels.layout import path_name
from gcjax._moments.jaxprs import Atom, Jaxpr, JaxprEqn, Literal, bodies
from gcjax._moments.problem import Problem
from gcjax._moments.program import flat_jaxpr, inputs_of, live_equations, run
from gcjax._types import Array, PyTree

EQUAL_OVER_AXIS = ("psum", "pmax", "pmin", "all_gather")  # collectives whose results all samples share


def aux_of_batch(problem: Problem, stacked: PyTree) -> PyTree:
    """Aux of the batch from that of its groups, stacked."""

    def aux_of(params, mapped, shared):
        return problem.loss(params, mapped, shared)[1]

    whole = [a.reshape(-1, *a.shape[2:]) for a in problem.mapped]
    axis = problem.options.sample_axis
    traced = Traced(aux_of, problem.params, whole, problem.shared, axis=axis)

    def values():
        return traced.values() if axis is None else jax.tree.map(lambda a: a[0], stacked)

    return whole_batch_aux(stacked, traced.shapes, traced.depends_on((False, True, False)), values)


class Traced:
    """A function of the whole batch, traced and not run; `shapes` are those of its results.

    `axis`, the name of the axis over the samples or None, is bound with size 1.
    """

    def __init__(self, fn: Callable[..., PyTree], *args: PyTree, axis: Hashable = None) -> None:
        self._closed, self.shapes = flat_jaxpr(fn, args, axis, 1)
        self._args, self._axis = args, axis

    def depends_on(self, marks: PyTree) -> PyTree:
        """For each result, whether it depends on an argument that `marks`, a prefix of the arguments, marks True."""
        inputs = jax.tree.leaves(jax.tree.broadcast(marks, self._args))
        found = depends(self._closed.jaxpr, inputs, self._axis)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), found)

    def values(self) -> PyTree:
        """The results. Under `jax.jit` only those run that are used."""
        jaxpr = self._closed.jaxpr
        equations, _ = live_equations(jaxpr, jaxpr.outvars, keep_effects=False)
        read = run(equations, inputs_of(self._closed, jax.tree.leaves(self._args)))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), map(read, jaxpr.outvars))


def depends(jaxpr: Jaxpr, inputs: Sequence[bool], axis: Hashable = None) -> list[bool]:
    """For each result of an open jaxpr, whether it depends on an input that `inputs` marks True.

    `axis` is the name of the axis over the samples, or None. A sum over it depends on no sample more than on another.
    """
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in marked

    for eqn in jaxpr.eqns:
        marks = _depend(eqn, [is_marked(atom) for atom in eqn.invars], axis)
        marked.update(var for var, mark in zip(eqn.outvars, marks, strict=True) if mark)
    return [is_marked(atom) for atom in jaxpr.outvars]


def _depend(eqn: JaxprEqn, marks: Sequence[bool], axis: Hashable) -> Sequence[bool]:
    """`depends` for the results of an equation."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if axis is not None and eqn.effects and axis in (named if isinstance(named, tuple) else (named,)):
        return [name not in EQUAL_OVER_AXIS] * count
    if name == "scan":
        consts, carries, xs = scan_parts(eqn, marks)
        while True:
            found = depends(eqn.params["jaxpr"].jaxpr, [*consts, *carries, *xs], axis)
            new = [old or mark for old, mark in zip(carries, found[: len(carries)], strict=True)]
            if new == carries:
                return [*carries, *found[len(carries) :]]
            carries = new
    if name == "cond":
        branches = [depends(branch.jaxpr, marks[1:], axis) for branch in eqn.params["branches"]]
        return [marks[0] or any(of_result) for of_result in zip(*branches, strict=True)]
    inner = bodies(eqn)
    if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(marks), count):
        return depends(inner[0], marks, axis)
    return [any(marks)] * count


def check_samples_lead(of_part: tuple[int, ...], of_batch: tuple[int, ...]) -> None:
    """Raise ValueError if the shapes of a leaf of aux for a part of a batch and for all of it differ behind axis 0."""
    if of_part[1:] != of_batch[1:]:
        raise ValueError(
            f"loss_fn returns aux of shape {of_part} for a part of the batch, and {of_batch} for all of it; only the "
            "leading axis may be that of the samples: transpose it in loss_fn"
        )


def whole_batch_aux(stacked: PyTree, shapes: PyTree, depend: PyTree, values: Callable[[], PyTree]) -> PyTree:
    """Aux of the whole batch.

    Args:
      stacked: aux of all parts, each leaf `[parts, ...]`.
      shapes: those of aux for the whole batch.
      depend: for each leaf, whether it depends on the samples; then TypeError if it has no mean and no axis of them.
      values: returns aux for the whole batch, right where it does not depend on the samples.
    """
    shared: list[Array] = []

    def merge(path: tuple, a: Array, like: jax.ShapeDtypeStruct, depends: bool, index: int) -> Array:
        if a.shape[1:] != like.shape:
            check_samples_lead(a.shape[1:], like.shape)
            return a.reshape(like.shape)
        if a.shape[0] == 1:
            return a[0]
        if jnp.issubdtype(a.dtype, jnp.inexact):
            # The mean of equal values, such as running statistics under sample_axis, could differ in the last bit.
            return jnp.where(jnp.all(a == a[0], axis=0), a[0], jnp.mean(a, axis=0))
        if depends:
            raise TypeError(_no_mean(path, a))
        if not shared:
            shared.extend(jax.tree.leaves(values()))
        return jnp.asarray(shared[index])

    indices = jax.tree.unflatten(jax.tree.structure(stacked), range(len(jax.tree.leaves(stacked))))
    return jax.tree_util.tree_map_with_path(merge, stacked, shapes, depend, indices)


def _no_mean(path: tuple, a: Array) -> str:
    return (
        f"the leaf {path_name(path)} that loss_fn returns beside its loss is {a.dtype}{list(a.shape[1:])}. It depends "
        "on the samples and has no axis of them, so that the batch is taken in parts whose values have no mean. Return "
        "one value for each sample and add them up outside (pred == y, of shape [batch], instead of its sum), or "
        "return a floating-point mean (jnp.mean(pred == y)). A model_state may hold such a mean; it may hold a count "
        "of samples under moments=None"
    )
