"""Bad steps: those whose update is not finite. They are skipped whole and counted."""

import collections

import jax
import jax.numpy as jnp

from gcjax._comm.collectives import pmax_if_axes
from gcjax._core.transform import CompressState
from gcjax._jax_compat import equal_everywhere, varying_axes
from gcjax._types import Array, PyTree

STEPS_AHEAD = 8  # that the host may be: a call looks at the result of the step before so many others


def skip_bad(updates: PyTree, old: PyTree, new: PyTree) -> tuple[Array, PyTree]:
    """Whether an update must not be applied, and the optimiser's state after it.

    A compressor reports, on all workers alike, that the input of some worker was not finite. That costs nothing here.
    Only where some entries pass by all compressors, the updates are looked at.

    Args:
      updates: what the optimiser returned, equal on all workers.
      old: its state before.
      new: its state after.

    Returns:
      bool[], equal on all devices. The state: `new`, or after a bad step `old`, except that a compressor which reported
      it keeps its new state, which counts the step and holds nothing of its gradient.
    """
    before, after = compress_states(old), compress_states(new)
    reports = [_reports_bad(*states) for states in zip(before, after, strict=True)]
    flags = list(reports)
    seen = sum(state.bucket.entries for compressor in after for state in compressor.buckets.value)
    if seen < sum(leaf.size for leaf in jax.tree.leaves(updates)):
        flags.append(_any_not_finite(updates))
    bad = jnp.any(jnp.stack(flags)) if flags else jnp.bool_(False)
    remaining = iter(reports)

    def kept(old, new):
        back = bad
        if _is_compress_state(new):
            reported = next(remaining)
            if len(flags) == 1:  # no step is bad unless this compressor reports it
                return new
            back = bad & ~reported
        return where_good(back, old, new)

    return bad, jax.tree.map(kept, old, new, is_leaf=_is_compress_state)


def where_good(bad: Array, old: PyTree, new: PyTree) -> PyTree:
    """`new`, or `old` after a bad step."""
    return jax.tree.map(lambda x, y: jnp.where(bad, x, y), old, new)


def is_spoilt(old: PyTree, new: PyTree) -> Array:
    """Whether any entry was finite and no longer is: bool[]."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    found = [jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y)) for x, y in pairs if jnp.issubdtype(y.dtype, jnp.inexact)]
    return jnp.any(jnp.stack(found)) if found else jnp.bool_(False)


def compress_states(state: PyTree) -> list[CompressState]:
    """The compressors' states within an optimiser's, in the order of its leaves."""
    return [node for node in jax.tree.leaves(state, is_leaf=_is_compress_state) if _is_compress_state(node)]


def _is_compress_state(node: object) -> bool:
    return isinstance(node, CompressState)


def _reports_bad(before: CompressState, after: CompressState) -> Array:
    # Typed as differing between workers, like all of the state, but a maximum over them made it.
    return equal_everywhere(after.report.unpack().skipped > before.report.unpack().skipped)


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

    def check(self, step: Array, skipped: Array) -> None:
        """Raise FloatingPointError if the earlier result and the state, of which these are fields, show too many."""
        if len(self._results) < STEPS_AHEAD or int(self._results.popleft()) < self._limit:
            return
        if isinstance(skipped, jax.core.Tracer) or int(skipped) < self._limit:
            return  # of another training, or it has recovered
        self._results.clear()
        raise FloatingPointError(
            f"the last {skipped} steps, all since step {int(step) - int(skipped)}, were skipped, because the gradient "
            "of some worker was not finite (nan or inf). Parameters and optimiser are still as that step left them; "
            "this state is intact. metrics.loss shows whose loss is bad. Look for bad samples, a loss that divides by "
            "zero or overflows, or a learning rate that is too high; jax.config.update('jax_debug_nans', True) finds "
            f"the operation. make_train_step(max_skipped=...) sets the limit, now {self._limit}"
        )
