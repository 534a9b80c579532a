"""What a training step checks each time that it is called, before it donates the state."""

from collections.abc import Callable
from typing import Any

import jax

from gcjax._core.info import check_training
from gcjax._core.state import compress_states
from gcjax._training.bad_steps import SkipLimit
from gcjax._training.consistency import check_agreement
from gcjax._types import PyTree

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
        self._agreed: set = set()  # batch shapes for which all processes were found to run the same program
        # CPU devices of one process share a thread pool. With several steps in flight, collectives can take all of its
        # threads while some device has not begun, and wait for ever. So on CPUs only one step is in flight.
        self._one_at_a_time = mesh.local_mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def before(self, state: Any, batch: PyTree) -> None:
        """Raise where the call would go wrong; see `gcjax.make_train_step`."""
        if self._limit is not None:
            self._limit.check(state.step, state.skipped)
        if jax.process_count() > 1:
            self._check_agreement(state, batch)
        if self._one_at_a_time:
            jax.block_until_ready((state, batch))  # the batch too: it may be the output of another program
        if self._check_loss is not None and not _is_traced((state, batch)):
            if self._calls == 0:
                self._check_loss(state, batch)
            if self._calls == STEPS_TO_CHECK and compress_states(state.opt_state):
                check_training(state.opt_state)
            self._calls += 1

    def after(self, skipped: jax.Array) -> None:
        """Note the number of steps skipped in a row, of the call that has just returned."""
        if self._limit is not None:
            self._limit.note(skipped)

    def _check_agreement(self, state: Any, batch: PyTree) -> None:
        """Check before any collective that all processes run the same program, and start from the same state."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        seen = (jax.tree.structure((state, shapes)), *jax.tree.leaves(shapes))
        if seen not in self._agreed:
            start = {} if self._agreed else {"state": state}
            # The step itself reuses this trace and lowering.
            check_agreement(self._mesh, batch=shapes, **start, program=self._lower(state, batch))
            self._agreed.add(seen)


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
