"""What a training step checks each time that it is called, before it donates the state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gcjax._core.check_training import SCALED, check_symptoms, squares_ratio
from gcjax._core.info import check_restored
from gcjax._core.state import compress_states
from gcjax._core.symptoms import KEPT
from gcjax._training.bad_steps import SkipLimit
from gcjax._training.consistency import check_agreement
from gcjax._types import PyTree

EARLY = 20  # steps after which nothing has converged yet, so that gradients are small only if they were scaled
SMALL_EARLY = KEPT**EARLY + SCALED  # the running mean then, of such gradients
STEPS_TO_CHECK = 100  # until `check_training` runs


class CallChecks:
    """The checks of one training step, and what they remember from call to call.

    Args:
      mesh: of the step.
      max_skipped: bad steps in a row after which `before` raises; None where bad steps are not skipped.
      check_loss: check_loss(state, batch) raises if the loss is no mean over the samples; None for no checks.
      lower: lower(state, batch) -> the step's program.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        max_skipped: int | None,
        check_loss: Callable[[Any, PyTree], None] | None,
        lower: Callable[[Any, PyTree], jax.stages.Lowered],
    ) -> None:
        self._mesh, self._check_loss, self._lower = mesh, check_loss, lower
        self._limit = None if max_skipped is None else SkipLimit(max_skipped)
        self._calls = 0  # that did not trace
        self._last: tuple[PyTree, jax.Array] | None = None  # batch of the call before `check_symptoms`, workers' losses
        self._small_early = True
        self._known: jax.Array | None = None  # `step` of the state that the last call returned
        self._agreed: set = set()  # batch shapes for which all processes were found to run the same program
        # CPU devices of one process share a thread pool. With several steps in flight, collectives can take all of its
        # threads while some device has not begun, and wait for ever. So on CPUs only one step is in flight.
        self._one_at_a_time = mesh.local_mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def before(self, state: Any, batch: PyTree) -> None:
        """Raise where the call would go wrong; see `gcjax.make_train_step`."""
        if _is_deleted(state.step):
            raise RuntimeError(
                "this state was donated to an earlier step, which has reused its memory. Go on with the state that it "
                "returned, and copy what you want to keep: jax.tree.map(jnp.copy, state.params)"
            )
        if self._limit is not None:
            self._limit.check(state.step, state.skipped, state.params)
        if jax.process_count() > 1:
            self._check_agreement(state, batch)
        if state.step is not self._known and not _is_traced(state):
            for own in compress_states(state.opt_state):
                check_restored(own)
        if self._one_at_a_time:
            jax.block_until_ready((state, batch))  # the batch too: it may be the output of another program
        if self._check_loss is not None and not _is_traced((state, batch)):
            if self._calls == 0:
                self._check_loss(state, batch)
            if self._calls in (EARLY, STEPS_TO_CHECK) and compress_states(state.opt_state):
                self._check_training(state.opt_state, batch)
            self._calls += 1

    def _check_training(self, opt_state: PyTree, batch: PyTree) -> None:
        """Raise for what the compressors have seen, but not for what a sound training shows, too."""
        if self._calls == EARLY:
            self._small_early = squares_ratio(opt_state) < SMALL_EARLY
            return
        same_batch, same_losses = False, True
        if self._last is not None:
            old_batch, losses = self._last
            old_shapes, shapes = (jax.tree.flatten(jax.tree.map(jnp.shape, tree)) for tree in (old_batch, batch))
            kept = not any(map(_is_deleted, jax.tree.leaves(old_batch)))
            same_batch = kept and shapes == old_shapes and self._on_all(_equal, batch, old_batch)
            same_losses = self._on_all(_all_the_same, losses)
            self._last = None
        # Workers with other losses have other gradients, even if the sampled entries only follow a common penalty. On
        # a batch that is always the same, gradients become small and their squares do not.
        expect_scaled = same_batch and not self._small_early
        check_symptoms(opt_state, expect_identical=not same_losses, expect_scaled=expect_scaled)

    def _on_all(self, test: Callable[..., jax.Array], *trees: PyTree) -> bool:
        """The result of a test of global arrays, the same on all processes."""
        return bool(jax.jit(test, out_shardings=jax.NamedSharding(self._mesh, jax.P()))(*trees))

    def after(self, state: Any, batch: PyTree, skipped: jax.Array, losses: jax.Array) -> None:
        """Note the state that a call has returned, how many steps in a row were skipped, its batch and its losses."""
        self._known = state.step
        if self._limit is not None:
            self._limit.note(skipped)
        if self._check_loss is not None and self._calls == STEPS_TO_CHECK and not _is_traced(losses):
            self._last = batch, losses

    def _check_agreement(self, state: Any, batch: PyTree) -> None:
        """Check before any collective that all processes run the same program, and start from the same state."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        seen = (jax.tree.structure((state, shapes)), *jax.tree.leaves(shapes))
        if seen not in self._agreed:
            start = {} if self._agreed else {"state": state}
            # The step itself reuses this trace and lowering.
            check_agreement(self._mesh, batch=shapes, **start, program=self._lower(state, batch))
            self._agreed.add(seen)


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _equal(a: PyTree, b: PyTree) -> jax.Array:
    equal = jax.tree.map(lambda x, y: jnp.all(x == y), a, b)
    return jnp.stack(jax.tree.leaves(equal)).all()


def _all_the_same(x: jax.Array) -> jax.Array:
    return jnp.max(x) == jnp.min(x)
