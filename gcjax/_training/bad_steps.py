"""Bad steps: those whose update is not finite. They are skipped whole and counted."""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._comm.collectives import pmax_if_axes
from gcjax._core.info import local_parts
from gcjax._core.own_models import is_gossip_state
from gcjax._core.state import compress_states, is_compress_state
from gcjax._jax_compat import equal_everywhere, varying_axes
from gcjax._types import Array, ArrayLike, PyTree
from gcjax._xla import kept_unless

STEPS_AHEAD = 8  # that the host may be: a call looks at the result of the step before so many others


def bad_flags(updates: PyTree, old: PyTree, new: PyTree) -> list[Array]:
    """Whether a step is bad, bool[] in parts, equal on all devices: what each compressor reports, then the rest.

    A compressor reports, on all workers alike, that the input of some worker was not finite. That costs nothing here.
    Only where some entries pass by all compressors, the updates are looked at.

    Args:
      updates: of the optimiser.
      old: its state before.
      new: its state after.
    """
    pairs = list(zip(compress_states(new), compress_states(old), strict=True))
    # Typed as differing between workers, like all of a compressor's state, but a maximum over them made it.
    flags = [equal_everywhere((x.report.value.skipped > y.report.value.skipped)[0]) for x, y in pairs]
    seen = sum(part.bucket.entries for state, _ in pairs for part in state.buckets.value)
    if seen >= sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(updates)):
        return flags
    return [*flags, any_not_finite(updates)]


def kept_state(flags: list[Array], old: PyTree, new: PyTree) -> PyTree:
    """An optimiser's new state, or in a bad step the old one.

    A compressor that reported the step keeps its new state: that counts the step and holds nothing of its gradient.

    Args:
      flags: of `bad_flags`.
      old: the state before.
      new: the state after.
    """
    bad, own = any_of(flags), iter(flags)

    def kept(x, y):
        if is_gossip_state(y):  # an exchange goes on without the worker's own update
            return y
        if not is_compress_state(y):
            return jnp.where(bad, x, y)
        reported = next(own)
        return y if len(flags) == 1 else kept_unless(~bad | reported, y, x)

    return jax.tree.map(kept, old, new, is_leaf=lambda node: is_compress_state(node) or is_gossip_state(node))


def any_of(flags: list[Array]) -> Array:
    """Whether any flag is set: bool[]."""
    return jnp.any(jnp.stack(flags)) if flags else jnp.bool_(False)


def is_spoilt(old: PyTree, new: PyTree) -> Array:
    """Whether any entry was finite and no longer is: bool[]."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return any_of([jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y)) for x, y in pairs if _is_inexact(x) and _is_inexact(y)])


def _is_inexact(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_finite(tree: PyTree) -> Array:
    """Whether all entries on this device are finite: bool[]."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def any_not_finite(tree: PyTree) -> Array:
    """Whether any entry on any device is not finite: bool[], equal on all devices."""
    bad = ~is_finite(tree)
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

    def check(self, state: Any) -> None:
        """Raise FloatingPointError if the earlier result and the state show too many."""
        step, skipped = state.step, jax.tree.leaves(state.skipped)[0]
        if len(self._results) < STEPS_AHEAD or _most(self._results.popleft()) < self._limit:
            return
        if isinstance(skipped, jax.core.Tracer) or _most(skipped) < self._limit:
            return  # of another training, or it has recovered
        skipped, params = _most(skipped), state.params
        self._results.clear()
        if bool(any_not_finite([x for x in jax.tree.leaves(params) if _is_inexact(x)])):
            raise FloatingPointError(
                f"the parameters are not finite (nan or inf), so the last {skipped} steps, all since step "
                f"{int(step) - skipped}, were skipped. Either they were not finite from the start, or the "
                "optimiser has made a non-finite update of a finite gradient. In float16 Adam's eps of 1e-8 is zero: "
                "give optax.adam a larger eps, or keep the parameters in float32. Go back to a checkpoint"
            )
        raise FloatingPointError(
            f"the last {skipped} steps, all since step {int(step) - skipped}, were skipped, because the gradient "
            "of some worker was not finite (nan or inf). Parameters and optimiser are still as that step left them; "
            "this state is intact. metrics.loss shows whose loss is bad. Look for bad samples, a loss that divides by "
            "zero or overflows, or a learning rate that is too high; jax.config.update('jax_debug_nans', True) finds "
            f"the operation. make_train_step(max_skipped=...) sets the limit, now {self._limit}"
        )


def _most(skipped: Array) -> int:
    """The most of all workers of this process. With gossip each worker skips steps of its own."""
    return max(int(np.max(part)) for part in local_parts(skipped))
