"""From a compressor to an optax transform."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.collectives import axis_size, axis_tuple, comm_for_axes, dense_mean, pmax_if_axes
from gcjax._core.compressor import Compressor, SendReport
from gcjax._core.owned import check_workers, shared_among
from gcjax._core.per_worker import WHOLE_NODE, PerWorker, stands_for_params
from gcjax._core.symptoms import Symptoms
from gcjax._jax_compat import (
    in_32_bits,
    partitioned_axes,
    tracks_variation,
    unchecked_axes,
    vary,
    varying_axes,
)
from gcjax._kernels.bits import LANES, float_bits
from gcjax._kernels.layout import Layout, count_beyond_range, flatten, layout_of, path_name, unflatten
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import OVERLAPS, check_choice

NOTHING_WAITS = 2  # said instead of 0 or 1, whether a gradient is bad, in the first step

# Gradients from here on count as not finite. What methods add up then stays in float32's range: 2**28 entries of a
# bucket, over 2**20 steps.
LARGEST = 2.0**80


class UpdateReport(NamedTuple):
    """What the last update sent, summed over the buckets. Scalars of one worker.

    Attributes:
      sent: `SendReport`.
      parameters: float32, entries of the model.
      workers: int32, number of workers.
      inner_workers: int32, inner workers of each.
      skipped: int32, updates so far that were skipped because some worker's input was not finite.
      saturated: int32, entries of the last update that lie beyond the range of their leaf's dtype, such as float16.
      symptoms: `Symptoms`, signs of mistakes.
    """

    sent: SendReport
    parameters: Array
    workers: Array
    inner_workers: Array
    skipped: Array
    saturated: Array
    symptoms: Symptoms


def fresh_report(parameters: int) -> UpdateReport:
    """The report before the first update."""
    none, no_bytes = jnp.int32(0), jnp.float32(0)
    return UpdateReport(
        sent=SendReport(none, none, none, none, none, no_bytes, no_bytes, no_bytes),
        parameters=jnp.float32(parameters),
        workers=jnp.int32(1),
        inner_workers=jnp.int32(1),
        skipped=none,
        saturated=none,
        symptoms=Symptoms.create(),
    )


class CompressState(NamedTuple):
    """State of a compressing transform.

    Attributes:
      buckets: PerWorker, a tuple with the method's state of each bucket.
      report: PerWorker, an `UpdateReport`.
      waiting: PerWorker, with `overlap="next_step"` a `Waiting`, otherwise None.
    """

    buckets: PerWorker
    report: PerWorker
    waiting: PerWorker


class GradientInput(NamedTuple):
    """What a compressor takes in, a tuple of float32 arrays for each bucket.

    Attributes:
      gradients: of this worker.
      squares: `sum_grad_squared`, None for a bucket without.
    """

    gradients: tuple[tuple[Array, ...], ...]
    squares: tuple[tuple[Array, ...] | None, ...]


class Waiting(NamedTuple):
    """What is exchanged in the next step.

    Attributes:
      present: bool, False before the first step.
      taken: the last step's `GradientInput`.
    """

    present: Array
    taken: GradientInput


def compress(
    compressor: Compressor,
    *,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
    overlap: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax transform that replaces each worker's gradient by the compressed mean over the workers.

    Args:
      compressor: the method.
      axis_name: mesh axis of the workers, or a tuple of axes, bound by `jax.shard_map` or `jax.pmap`. None for a single
        worker, whose update is what its own payload decodes to. Under plain `jax.jit` with a sharded batch JAX reduces
        the gradient itself: use `gcjax.compressed_value_and_grad`. Without axes, `update` raises where it sees several
        devices: under `jax.set_mesh`, or in the types of the gradient. It cannot see shardings that only `in_shardings`
        or `out_shardings` of `jax.jit` name, which give host arrays none in the first step.
      inner_axis_name: axis or axes of a fast link inside the slow one. The gradient is first averaged densely over
        them. The q workers along them are then equal and share the work of one: each moves one q-th of every message
        along `axis_name` (which is what `wire_bytes` counts), and they gather the rest over the fast link. The fast
        link also carries an all-reduce of the gradient, and of `sum_grad_squared` if there is one.
      overlap: "next_step" exchanges each gradient one step later, so that nothing of the exchange waits for the
        backward pass and XLA can run both at once. The first update is then zero, all others come one step late, and
        the last gradient is never applied. The state also holds the gradient, and its squares for a method that uses
        them: a float32 per parameter each. XLA moves no collective out of a conditional, so sparse methods need a
        fixed size: `density`, or an int as `capacity`; in two phases also an `owner_density`. None exchanges at once.

    Returns:
      A transform whose `update(updates, state, params=None, *, sum_grad_squared=None)` takes local gradients, a pytree
      of floating-point arrays of any shapes, and returns a tree of the same structure, shapes and dtypes, bit-equal on
      all workers. All arithmetic is in float32, under jax_enable_x64, too. Gradients of magnitude 2**80 (1.2e24) or
      more count as not finite. An update beyond the range of a float16 leaf becomes the largest float16; the rest is
      lost; `gcjax.info` counts such entries as `saturated`. Other extra arguments are ignored. Its state is per worker
      (`PerWorker`), and per shard where the parameters are sharded over further axes (`gcjax.init_sharded`).

    Raises:
      ValueError: one axis is named twice; an unknown `overlap`.

    Raises (from `update`):
      ValueError: an axis that is not bound; gradients already reduced over it, or by `jax.jit` if there is no axis; a
        `sum_grad_squared`, `params` or state of another structure; a negative `sum_grad_squared` where its value is
        known.
      TypeError: leaves of integer or complex dtype.
    """
    worker_axes, inner_axes = axis_tuple(axis_name), axis_tuple(inner_axis_name)
    check_choice("overlap", overlap, OVERLAPS)
    next_step = overlap is not None
    if both := set(worker_axes) & set(inner_axes):
        raise ValueError(f"axis_name and inner_axis_name must differ, both name {sorted(both)}")
    compressor = compressor._replace(init=in_32_bits(compressor.init), update=in_32_bits(compressor.update))

    def init(params: PyTree) -> CompressState:
        if stands_for_params(params):
            return CompressState(WHOLE_NODE, WHOLE_NODE, WHOLE_NODE)
        layout = layout_of(params)
        axes = worker_axes + _shard_axes(params, worker_axes + inner_axes)
        report = fresh_report(layout.entries)
        buckets = tuple(compressor.init(bucket) for bucket in layout.buckets)
        buckets = shared_among(buckets, _bound_workers(worker_axes, inner_axes))
        waiting = Waiting(jnp.bool_(False), _zero_input(layout, compressor.uses_squares)) if next_step else None
        return CompressState(*(PerWorker.pack(part, axes) for part in (buckets, report, waiting)))

    def update(updates, state, params=None, *, sum_grad_squared=None, **extra_args):
        del extra_args
        layout = layout_of(updates)
        sum_grad_squared = mask_like(updates, sum_grad_squared)
        _check_inputs(layout, state, params, sum_grad_squared)
        if not layout.buckets:
            return updates, state
        if not worker_axes and not inner_axes:
            _reject_several_devices(updates)
        states, axes = tuple(part.unpack() for part in state), state.buckets.axes
        comm = comm_for_axes(worker_axes, inner_axes)
        # Typed as varying even if `init` was called in the same trace, where zeros are equal everywhere.
        varying = axes if tracks_variation(axes) else ()
        old_states, old_report, waiting = vary(states, varying)
        check_workers(old_states, comm.size)
        _check_options(old_states, compressor, layout, comm.size)
        _check_waiting(waiting, next_step)
        _reject_reduced(updates, worker_axes + inner_axes)
        if inner_axes:
            updates, sum_grad_squared = _inner_mean(updates, sum_grad_squared, inner_axes)

        taken = _taken_in(layout, updates, sum_grad_squared)
        if next_step:
            (present, taken), waiting = waiting, Waiting(jnp.bool_(True), _to_wait(taken, compressor.uses_squares))
        shard_axes = tuple(axis for axis in axes if axis not in worker_axes)
        bad = _bad_leaves(*taken)
        # The remainder changes nothing. XLA computes one by an unknown number once; otherwise it would look at the
        # flags of all leaves again in every kernel that uses the result.
        any_bad = (bad % (old_report.skipped + layout.entries + 1) > 0).astype(jnp.int32)
        if next_step:
            any_bad = jnp.where(present, any_bad, NOTHING_WAITS)
        squares = taken.squares if compressor.uses_squares else (None,) * len(taken.squares)
        claims = in_32_bits(old_report.symptoms.claims)(taken.gradients, squares, comm)
        largest = comm.max(jnp.concatenate([pmax_if_axes(any_bad, shard_axes)[None], claims]))
        agreed = in_32_bits(Symptoms.agreed_on)(largest[1:], largest[0])
        all_finite = agreed == 0

        results = [
            compressor.update(gradient, square, bucket_state, comm, all_finite)
            for gradient, square, bucket_state in zip(*taken, old_states, strict=True)
        ]
        means, bucket_states, reports = zip(*results, strict=True)
        if next_step:
            means = jax.tree.map(lambda x: jnp.where(agreed == NOTHING_WAITS, 0, x), means)

        sent = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *reports)
        report = UpdateReport(
            sent=sent._replace(wire_bytes=sent.wire_bytes + comm.bytes_moved()),
            parameters=jnp.float32(layout.entries),
            workers=jnp.int32(comm.size),
            inner_workers=jnp.int32(comm.inner_workers),
            skipped=old_report.skipped + (agreed == 1),
            saturated=count_beyond_range(layout, means),
            symptoms=in_32_bits(old_report.symptoms.after)(largest[1:], comm),
        )
        # Mark every leaf as varying, even one that is equal everywhere, so that the carry of a scan keeps its type.
        new_parts = vary((bucket_states, report, waiting), varying)
        new = CompressState(*(PerWorker.pack(part, axes) for part in new_parts))
        return _equal_where_gradients_are(unflatten(layout, means), updates, shard_axes), new

    return optax.GradientTransformationExtraArgs(init, update)


def _taken_in(layout: Layout, updates: PyTree, sum_grad_squared: PyTree) -> GradientInput:
    squares = (None,) * len(layout.buckets) if sum_grad_squared is None else flatten(layout, sum_grad_squared)
    return GradientInput(tuple(flatten(layout, updates)), tuple(squares))


def _to_wait(taken: GradientInput, uses_squares: bool) -> GradientInput:
    """What has to wait for the next step: the squares only if they are used, and then always."""
    if not uses_squares:
        return taken._replace(squares=(None,) * len(taken.squares))
    pairs = zip(*taken, strict=True)
    return taken._replace(squares=tuple(tuple(g * g for g in gs) if s is None else s for gs, s in pairs))


def _zero_input(layout: Layout, uses_squares: bool) -> GradientInput:
    zeros = tuple(tuple(jnp.zeros(s.shape, jnp.float32) for s in bucket.segments) for bucket in layout.buckets)
    return _to_wait(GradientInput(zeros, (None,) * len(zeros)), uses_squares)


def _bound_workers(worker_axes: tuple[str, ...], inner_axes: tuple[str, ...]) -> int:
    """Number of workers where `init` is called inside `shard_map` or `pmap`, and 1 elsewhere."""
    try:
        return comm_for_axes(worker_axes, inner_axes).size
    except ValueError:  # the axes are not bound: `place` will know
        return 1


def _is_masked(node: PyTree) -> bool:
    return isinstance(node, optax.MaskedNode)


def mask_like(updates: PyTree, tree: PyTree) -> PyTree:
    """`optax.masked` and `optax.partition` hide parts of the updates but not of extra arguments. Hide the same."""
    if tree is None:
        return None
    try:
        return jax.tree.map(lambda u, x: u if _is_masked(u) else x, updates, tree, is_leaf=_is_masked)
    except ValueError:  # of another structure: `_check_inputs` says so
        return tree


def _check_inputs(layout: Layout, state: CompressState, params: PyTree, sum_grad_squared: PyTree) -> None:
    if tuple(s.bucket for s in state.buckets.value) != layout.buckets:
        raise ValueError(
            f"the state was initialised for other leaves than this gradient with shapes {layout.shapes}; call init "
            "with the parameters that update sees"
        )
    for name, tree in (("params", params), ("sum_grad_squared", sum_grad_squared)):
        if tree is not None:
            _check_like_gradient(name, tree, layout)
    if sum_grad_squared is not None:
        _check_not_negative(sum_grad_squared)


def _check_options(bucket_states: PyTree, compressor: Compressor, layout: Layout, workers: int) -> None:
    """Raise ValueError if a transform with other options made the state: its own options would be used, silently."""
    fresh = jax.eval_shape(lambda: shared_among(tuple(map(compressor.init, layout.buckets)), workers))
    ours, theirs = (str(jax.tree.structure(tree)) for tree in (fresh, bucket_states))
    if ours != theirs:
        differ = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        begin = max(differ - 60, 0)
        raise ValueError(
            "the state was initialised by a transform with other options, such as another transport or feedback. Use "
            "the options that it was made with, or begin with a new state. The state has "
            f"...{theirs[begin : begin + 120]}..., this transform ...{ours[begin : begin + 120]}..."
        )


def _check_waiting(waiting: Waiting | None, next_step: bool) -> None:
    if (waiting is not None) != next_step:
        had, has = (f"{'with' if late else 'without'} overlap='next_step'" for late in (not next_step, next_step))
        raise ValueError(
            f"the state was initialised {had}, this transform is {has}. Use the option that the state was made with, "
            "or begin with a new state"
        )


def _check_like_gradient(name: str, tree: PyTree, layout: Layout) -> None:
    if jax.tree.structure(tree) != layout.treedef:
        raise ValueError(
            f"{name} has the structure {jax.tree.structure(tree)}, the gradient {layout.treedef}; they must agree. "
            "(Inside optax.flatten: put the compressor before it.)"
        )
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(tree), layout.shapes, strict=True):
        if jnp.shape(leaf) != shape:
            raise ValueError(f"{name} leaf {path_name(path)} has shape {jnp.shape(leaf)}, the gradient {shape}")


def _check_not_negative(sum_grad_squared: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(sum_grad_squared):
        if not isinstance(leaf, jax.core.Tracer) and (np.asarray(leaf) < 0).any():
            raise ValueError(
                f"sum_grad_squared leaf {path_name(path)} has a negative entry ({np.min(leaf)}); it must be a sum of "
                "squares, as gcjax.value_and_moments returns"
            )


def _reject_reduced(updates: PyTree, axes: tuple[str, ...]) -> None:
    """Raise when a gradient is typed as equal on all workers. Where JAX tracks no such types, nothing is checked."""
    if not tracks_variation(axes):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        reduced = [axis for axis in axes if axis not in varying_axes(leaf)]
        if reduced:
            raise ValueError(
                f"gradient leaf {path_name(path)} does not vary over {reduced}: it has been reduced already, so "
                "compressing it would save nothing. jax.grad of replicated parameters inside shard_map sums over the "
                "workers. Take local gradients: gcjax.local_gradients(jax.grad(loss), axis_name=...), "
                "gcjax.value_and_moments or gcjax.make_train_step. (Inside optax.MultiSteps, whose accumulator is not "
                "per worker: use make_train_step(accumulate=...) instead.)"
            )


def _reject_several_devices(updates: PyTree) -> None:
    """Raise when a single worker is seen to be one of several: JAX partitions, or has workers that it does not know."""
    if axes := unchecked_axes():
        raise ValueError(
            f"no axis_name was given, but update runs on the devices of {axes}, in jax.pmap or in jax.shard_map with "
            "check_vma=False: each would apply its own update, and the parameters would drift apart. Give the "
            "compressor the axis_name. (To compress as a single worker all the same, use check_vma=True.)"
        )
    if axes := partitioned_axes(updates):
        raise ValueError(
            f"no axis_name was given, but the gradient is computed on a mesh with axes {axes}: JAX has reduced it over "
            "these devices already, so compressing it would save nothing. Take gradients with "
            "gcjax.compressed_value_and_grad, or the whole step from gcjax.make_train_step, and give the compressor "
            "axis_name. (To compress as a single worker all the same, call update inside jax.shard_map over the mesh.)"
        )


def _inner_mean(updates: PyTree, sum_grad_squared: PyTree, inner_axes: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """The gradient of the inner workers' joint batch, and its squares: each sample now counts 1 / size.

    A reduce-scatter would move half the bytes, but each inner worker would then keep the state of one part of the
    model, and `init` does not know the mesh. Sharding the parameters over the inner axis does exactly that.
    """
    size = axis_size(inner_axes)
    updates = jax.tree.map(lambda x: dense_mean(x, inner_axes), updates)
    if sum_grad_squared is not None:
        sum_grad_squared = jax.tree.map(lambda x: dense_mean(x, inner_axes) / size, sum_grad_squared)
    return updates, sum_grad_squared


def _shard_axes(params: PyTree, averaged_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes over which the parameters are sharded, known inside `jax.shard_map`."""
    axes = varying_axes(params)
    if wrong := sorted(axes & set(averaged_axes)):
        raise ValueError(
            f"the parameters are sharded over {wrong}, over which the gradient is to be averaged: parts of different "
            "parameters would be added. Name only axes along which the workers have the same parameters; "
            "gcjax.make_train_step averages over the others by itself"
        )
    return tuple(sorted(axes))


def _equal_where_gradients_are(updates: PyTree, gradients: PyTree, shard_axes: tuple[str, ...]) -> PyTree:
    """Average the updates of leaves that are not sharded over the shards.

    Such a leaf shares its buckets with leaves that are sharded, so each shard sends other entries of it. The mean is
    equal on all shards and loses nothing.
    """

    def mean(u, g):
        over = tuple(axis for axis in shard_axes if axis in varying_axes(u) - varying_axes(g))
        return dense_mean(u, over) if over else u

    return jax.tree.map(mean, updates, gradients)


def _bad_leaves(gradients: Iterable[Sequence[Array]], squares: Iterable[Sequence[Array] | None]) -> Array:
    """How many arrays have an entry that is not finite or not below `LARGEST`, or a negative square: int32."""
    # Both differences are zero for good values, and otherwise NaN or positive.
    scaled = [g * (2.0**128 / LARGEST) for leaves in gradients for g in leaves]  # infinite from LARGEST on
    bad = [_any_nonzero(g - g) for g in scaled]
    bad += [_any_nonzero(jnp.abs(s) - s) for leaves in squares if leaves is not None for s in leaves]
    return jnp.sum(jnp.stack(bad), dtype=jnp.int32)


def _any_nonzero(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=_any_nonzero_on_cpu, default=lambda x: jnp.any(x != 0))


def _any_nonzero_on_cpu(x: Array) -> Array:
    """Reduced over short runs of rows first: a plain any() takes several times as long."""
    rows, columns = _rows_and_columns(x.shape)
    bits = float_bits(x).reshape(-1, rows, columns)
    return jnp.any(lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,)) != 0)


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Two numbers whose product divides the size: rows, at most 16, and columns, the last axis where it is long."""
    size, columns = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    if columns < LANES:
        columns = _largest_divisor(size, 8 * LANES)
    return _largest_divisor(size // columns, 16), columns


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
