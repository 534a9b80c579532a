"""The second door: what a training step checks when it is called, before it donates the state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._core.check_training import check_symptoms
from gcjax._core.info import check_restored
from gcjax._core.own_models import without_gossip
from gcjax._core.per_worker import is_per_worker
from gcjax._core.state import compress_states
from gcjax._kernels.layout import path_name
from gcjax._training.bad_steps import SkipLimit
from gcjax._training.consistency import check_agreement
from gcjax._types import PyTree

STEPS_TO_CHECK = 100  # until `check_training` runs


class CallChecks:
    """The checks of one training step, and what they remember from call to call.

    Args:
      mesh: of the step.
      axes: of the workers.
      accumulate: parts of each worker's batch.
      max_skipped: bad steps in a row after which `before` raises.
      check_loss: check_loss(state, batch) raises if the loss is no mean over the samples; None for no checks.
      lower: lower(state, batch) -> the step's program.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axes: tuple[str, ...],
        accumulate: int,
        max_skipped: int,
        check_loss: Callable[[Any, PyTree], None] | None,
        lower: Callable[[Any, PyTree], jax.stages.Lowered],
    ) -> None:
        self._mesh, self._axes, self._accumulate = mesh, axes, accumulate
        self._check_loss, self._lower, self._limit = check_loss, lower, SkipLimit(max_skipped)
        self._calls = 0  # that did not trace
        self._last: tuple[PyTree, jax.Array] | None = None  # batch of the call before `check_symptoms`, workers' losses
        self._known: jax.Array | None = None  # `step` of the state that the last call returned
        self._agreed: set = set()  # batch shapes for which all processes were found to run the same program
        # CPU devices of one process share a thread pool. With several steps in flight, collectives can take all of its
        # threads while some device has not begun, and wait for ever. So on CPUs only one step is in flight.
        self._one_at_a_time = mesh.local_mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def before(self, state: Any, batch: PyTree) -> None:
        """Raise where the call would go wrong; see `gcjax.make_train_step`."""
        if not hasattr(state, "opt_state"):
            raise TypeError(f"state must be the TrainState that init or the last step returned, got {type(state)}")
        check_batch(batch, self._mesh, self._axes, self._accumulate)
        if _is_deleted(state.step):
            raise RuntimeError(
                "this state was donated to an earlier step, which has reused its memory. Go on with the state that it "
                "returned, and copy what you want to keep: jax.tree.map(jnp.copy, state.params)"
            )
        self._limit.check(state)
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
            if self._calls == STEPS_TO_CHECK and compress_states(without_gossip(state.opt_state)):
                self._check_training(state.opt_state, batch)
            self._calls += 1

    def _check_training(self, opt_state: PyTree, batch: PyTree) -> None:
        """Raise for what the compressors have seen, but not for what a sound training shows, too."""
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
        check_symptoms(opt_state, expect_identical=not same_losses, expect_scaled=same_batch)

    def _on_all(self, test: Callable[..., jax.Array], *trees: PyTree) -> bool:
        """The result of a test of global arrays, the same on all processes."""
        return bool(jax.jit(test, out_shardings=jax.NamedSharding(self._mesh, jax.P()))(*trees))

    def after(self, state: Any, batch: PyTree, skipped: jax.Array, losses: jax.Array) -> None:
        """Note the state that a call has returned, how many steps in a row were skipped, its batch and its losses."""
        self._known = state.step
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


def check_batch(batch: PyTree, mesh: jax.sharding.Mesh, axes: tuple[str, ...], accumulate: int = 1) -> None:
    """Raise unless every leaf of a batch can be split over the workers and their parts, and lies on all processes.

    Raises:
      TypeError: a leaf is no array.
      ValueError: there is no leaf, or one is a scalar, empty, or its leading axis is no multiple of the number of
        parts; or one lies on one process of several.
    """
    _check_placed(batch, mesh, axes)
    workers = int(np.prod([mesh.shape[axis] for axis in axes]))
    parts = workers * accumulate
    if not jax.tree.leaves(batch):
        raise ValueError(f"the batch has no array, got {batch!r}; its arrays have one entry per sample")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape"):
            raise TypeError(f"batch leaf {path_name(path)} is {leaf!r}, but must be an array. {_SHARED}")
        if not leaf.shape:
            cure = _RANDOM if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _SHARED
            raise ValueError(f"batch leaf {path_name(path)} has shape (), but must have one entry per sample. {cure}")
        if leaf.shape[0] == 0 or leaf.shape[0] % parts:
            raise ValueError(
                f"batch leaf {path_name(path)} has shape {leaf.shape}; its leading axis must be a positive "
                f"multiple of {parts} = {workers} workers * accumulate={accumulate}"
            )


def _check_placed(batch: PyTree, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError for a leaf of a batch that lies on one process, where the mesh spans several.

    `jax.jit` takes such arrays for equal on all processes: of the rows of each it would use a part. Arrays that are
    traced, and shapes, pass.
    """
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not hasattr(leaf, "shape"):
            continue
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            sharding = f"jax.NamedSharding(mesh, jax.P({axes}))"
            raise ValueError(
                f"batch leaf {path_name(path)} of shape {leaf.shape} lies on process {jax.process_index()} alone, but "
                "the mesh spans several processes, and a step would use only a part of its rows. Place it on the mesh. "
                f"Rows of this process: jax.make_array_from_process_local_data({sharding}, rows). A batch that every "
                f"process has whole: jax.device_put(batch, {sharding})"
            )


_RANDOM = (
    "Give a random key to step.init(params, key=...) instead: loss_fn(params, batch, key=...) then gets another one "
    "for each worker, step and sample"
)
_SHARED = (
    "A value that all samples share may be repeated for each of them, as in np.full(len(x), value), or be part of the "
    "model_state, or a constant of loss_fn"
)


def check_state(state: PyTree, mesh: jax.sharding.Mesh) -> None:
    """Raise ValueError unless all per-worker state holds as many workers as the mesh. Called while tracing."""
    for node in jax.tree.leaves(state, is_leaf=is_per_worker):
        if is_per_worker(node) and any(map(np.prod, node.shapes)):
            workers = int(np.prod([mesh.shape[axis] for axis in node.axes]))
            if node.workers != workers:
                raise ValueError(
                    f"the state holds {node.workers} workers, but the mesh has {workers} along {node.axes}. Make it "
                    "with step.init(params) (or fn.init of gcjax.compressed_value_and_grad), which places it on the "
                    "mesh once; do not call gcjax.distribute on it again. To go on with a state of another number of "
                    "workers, use gcjax.resize(state, mesh)"
                )
