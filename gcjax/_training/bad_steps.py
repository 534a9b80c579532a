"""Bad steps: those whose update is not finite. They are skipped whole and counted."""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gcjax._comm.collectives import pmax_if_axes
from gcjax._core.state import compress_states, is_compress_state
from gcjax._jax_compat import bind, equal_everywhere, varying_axes
from gcjax._moments.jaxprs import read_atom
from gcjax._types import Array, ArrayLike, PyTree

Update = Callable[[PyTree], tuple[PyTree, PyTree]]  # from an optimiser's state to updates and new state
STEPS_AHEAD = 8  # that the host may be: a call looks at the result of the step before so many others


def skipping_bad(update: Update, opt_state: PyTree) -> tuple[PyTree, PyTree, Array]:
    """An update of the optimiser, whose state stays as it was if the update must not be applied.

    A compressor reports, on all workers alike, that the input of some worker was not finite. That costs nothing here.
    Only where some entries pass by all compressors, the updates are looked at.

    Args:
      update: `tx.update`, a function of the state alone.
      opt_state: the state.

    Returns:
      The updates, of no meaning in a bad step. The new state, in a bad step the old one, except that a compressor which
      reported it keeps its new state: that counts the step and holds nothing of its gradient. Whether the step is bad,
      bool[], equal on all devices.
    """
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(opt_state)
    jaxpr = closed.jaxpr
    updates, new_state = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars)
    counts = [node.report.value.skipped for node in compress_states(new_state)]
    old_counts = [node.report.value.skipped for node in compress_states(opt_state)]
    seen = sum(part.bucket.entries for node in compress_states(new_state) for part in node.buckets.value)
    all_seen = seen >= sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes[0]))
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *jax.tree.leaves(opt_state)], strict=True))

    def read(atom):
        return read_atom(atom, env.__getitem__)

    def reports():
        # Typed as differing between workers, like all of a compressor's state, but a maximum over them made it.
        return [equal_everywhere((read(new) > old)[0]) for new, old in zip(counts, old_counts, strict=True)]

    # As soon as all have reported, whatever follows goes on with the state that is kept. If it went on with the new
    # state, XLA would compute that twice, and copy the old one before it is overwritten.
    awaited = set(counts) - env.keys() if all_seen else set()
    uses = collections.Counter(id(atom) for atom in jax.tree.leaves(new_state))
    olds = {id(atom): old for atom, old in _pairs(new_state, opt_state) if uses[id(atom)] == 1}
    bad, done = None, set()
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        if bad is not None:
            for var in eqn.outvars:
                if id(var) in olds:
                    env[var] = jnp.where(bad, olds[id(var)], env[var])
                    done.add(id(var))
        elif awaited and not (awaited := awaited - set(eqn.outvars)):
            bad = _any(reports())

    updates = jax.tree.map(read, updates)
    reported = reports()
    flags = reported if all_seen else [*reported, _any_not_finite(updates)]
    if bad is None:
        bad = _any(flags)
    own = iter(reported)

    def kept(atoms, old):
        if not is_compress_state(atoms):
            return read(atoms) if id(atoms) in done else where_good(bad, old, read(atoms))
        new, reported_here = jax.tree.map(read, atoms), next(own)
        if len(flags) == 1:  # no step is bad unless this compressor reports it
            return new
        return where_good(bad & ~reported_here, old, new)

    return updates, jax.tree.map(kept, new_state, opt_state, is_leaf=is_compress_state), bad


def _any(flags: list[Array]) -> Array:
    return jnp.any(jnp.stack(flags)) if flags else jnp.bool_(False)


def _pairs(new: PyTree, old: PyTree) -> list[tuple[Any, Any]]:
    """The leaves of two states next to each other, without those of compressors."""
    news, olds = (
        [node for node in jax.tree.leaves(tree, is_leaf=is_compress_state) if not is_compress_state(node)]
        for tree in (new, old)
    )
    return list(zip(news, olds, strict=True))


def where_good(bad: Array, old: PyTree, new: PyTree) -> PyTree:
    """`new`, or `old` after a bad step."""
    return jax.tree.map(lambda x, y: jnp.where(bad, x, y), old, new)


def is_spoilt(old: PyTree, new: PyTree) -> Array:
    """Whether any entry was finite and no longer is: bool[]."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return _any([jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y)) for x, y in pairs if _is_inexact(x) and _is_inexact(y)])


def _is_inexact(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _any_not_finite(tree: PyTree) -> Array:
    bad = jnp.any(jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
    return pmax_if_axes(bad.astype(jnp.int32), tuple(sorted(varying_axes(bad)))) > 0


class SkipLimit:
    """Raises when too many steps in a row were skipped, without waiting for the step that runs.

    It looks at the result of an earlier step, always the same number of calls ago, so that all processes raise before
    the same step. The numbers are on their way to the host since then.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._results: collections.deque[Array] = collections.deque()

    def note(self, skipped: Array) -> None:
        """Remember `Metrics.skipped` of the step just begun."""
        if not isinstance(skipped, jax.core.Tracer):
            skipped.copy_to_host_async()
            self._results.append(skipped)

    def check(self, step: Array, skipped: Array, params: PyTree) -> None:
        """Raise FloatingPointError if the earlier result and the state, of which these are fields, show too many."""
        if len(self._results) < STEPS_AHEAD or int(self._results.popleft()) < self._limit:
            return
        if isinstance(skipped, jax.core.Tracer) or int(skipped) < self._limit:
            return  # of another training, or it has recovered
        self._results.clear()
        if bool(_any_not_finite([x for x in jax.tree.leaves(params) if _is_inexact(x)])):
            raise FloatingPointError(
                f"the parameters are not finite (nan or inf), so the last {skipped} steps, all since step "
                f"{int(step) - int(skipped)}, were skipped. Either they were not finite from the start, or the "
                "optimiser has made a non-finite update of a finite gradient. In float16 Adam's eps of 1e-8 is zero: "
                "give optax.adam a larger eps, or keep the parameters in float32. Go back to a checkpoint"
            )
        raise FloatingPointError(
            f"the last {skipped} steps, all since step {int(step) - int(skipped)}, were skipped, because the gradient "
            "of some worker was not finite (nan or inf). Parameters and optimiser are still as that step left them; "
            "this state is intact. metrics.loss shows whose loss is bad. Look for bad samples, a loss that divides by "
            "zero or overflows, or a learning rate that is too high; jax.config.update('jax_debug_nans', True) finds "
            f"the operation. make_train_step(max_skipped=...) sets the limit, now {self._limit}"
        )
