"""From a compressor to an optax transform."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from gcjax._comm.collectives import axis_size, axis_tuple, comm_for_axes, dense_mean, pmax_if_axes
from gcjax._core.chain import Passing, seen
from gcjax._core.checks import (
    check_countable,
    check_inputs,
    mask_like,
    reject_hidden,
    reject_partitioned,
    reject_reduced,
    reject_several_devices,
)
from gcjax._core.compressor import Compressor, checked
from gcjax._core.finite import bad_leaves
from gcjax._core.missing_squares import warn_of_missing_squares
from gcjax._core.options import check_checksum, check_options, checksum, meaning
from gcjax._core.owned import check_workers, shared_among
from gcjax._core.per_worker import WHOLE_NODE, PerWorker, stands_for_params
from gcjax._core.state import CompressState, GradientInput, UpdateReport, Waiting, fresh_report, options_of
from gcjax._core.symptoms import Symptoms
from gcjax._jax_compat import in_32_bits, tracks_variation, vary, varying_axes, when_lowered
from gcjax._kernels.floats import FLOAT_MAX
from gcjax._kernels.layout import Layout, count_beyond_range, flatten, layout_of, unflatten
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import OVERLAPS, check_choice

NOTHING_WAITS = 2  # said instead of 0 or 1, whether a gradient is bad, in the first step


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
        worker, whose update is its own payload, decoded. Under plain `jax.jit` with a sharded batch JAX reduces
        the gradient itself: use `gcjax.compressed_value_and_grad`. Without axes, `update` raises where it sees several
        devices: under `jax.set_mesh`, in the types of the gradient, or when `jax.jit` lowers it for several.
      inner_axis_name: axis or axes of a fast link inside the slow one. The gradient is first averaged densely over
        them. The q workers along them are then equal and share the work of one: each moves one q-th of every message
        along `axis_name` (which is what `wire_bytes` counts), and they gather the rest over the fast link. The fast
        link also carries an all-reduce of the gradient, and of `sum_grad_squared` if there is one.
      overlap: "next_step" exchanges each gradient one step later, so that the exchange does not wait for the
        backward pass and XLA can run both at once. The first update is then zero, all others come one step late, which
        may need a lower learning rate, and the last gradient is never applied. The state also holds the gradient, and
        its squares for a method that uses them: a float32 per parameter each. XLA moves no collective out of a
        conditional, so messages must have a fixed length: methods whose number of entries follows the data need an
        int as `capacity`, `variance_compress` that or a `density`; in two phases also an `owner_density`, without which
        `transport="auto"` gathers. None exchanges at once.

    Returns:
      A transform whose `update(updates, state, params=None, *, sum_grad_squared=None)` takes local gradients, a pytree
      of floating-point arrays of any shapes, and returns a tree of the same structure, shapes and dtypes, bit-equal on
      all workers. All arithmetic is in float32, also under jax_enable_x64. Gradients of magnitude 2**80 (1.2e24) or
      more count as not finite. An update beyond the range of a float16 leaf becomes the largest float16; the rest is
      lost; `gcjax.info` counts such entries as `saturated`. Other extra arguments are ignored. Its state is per worker
      (`PerWorker`), and per shard where the parameters are sharded over further axes (`gcjax.init_sharded`).

    Raises:
      ValueError: one axis is named twice; an unknown `overlap`.
      TypeError: `compressor` is not a `Compressor`.

    Raises (from `update`):
      ValueError: an axis that is not bound; gradients already reduced over it, or by `jax.jit` if there is no axis; a
        `sum_grad_squared`, `params` or state of another structure; a state of other options; with `overlap`, messages
        whose length follows the data; a negative `sum_grad_squared` where its value is known; in `jax.pmap` and with
        check_vma=False, leaves that `optax.masked` or `optax.partition` hides.
      TypeError: leaves of integer or complex dtype; a method whose functions return something else than `Compressor`
        says.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> top = gx.sparse_method(lambda a, step, bucket: gx.top_k_mask(a, 1), capacity=lambda bucket: 1)
    >>> tx = gx.compress(top)
    >>> print(tx.update(jnp.array([1.0, -3.0]), tx.init(jnp.zeros(2)))[0])
    [ 0. -3.]
    """
    worker_axes, inner_axes = axis_tuple(axis_name), axis_tuple(inner_axis_name)
    check_choice("overlap", overlap, OVERLAPS)
    next_step = overlap is not None
    if both := set(worker_axes) & set(inner_axes):
        raise ValueError(f"axis_name and inner_axis_name must differ, both name {sorted(both)}")
    compressor = checked(compressor)
    compressor = compressor._replace(init=in_32_bits(compressor.init), update=in_32_bits(compressor.update))

    def packed(parts: tuple[PyTree, ...], axes: tuple[str, ...]) -> CompressState:
        buckets, report, waiting = (PerWorker.pack(part, axes) for part in parts)
        return CompressState(buckets, report, waiting, compressor.uses_squares)

    def new_buckets(layout: Layout) -> tuple[PyTree, ...]:
        return tuple(compressor.init(bucket) for bucket in layout.buckets)

    def init(params: PyTree) -> CompressState | Passing:
        if (looking := seen.get()) is not None:
            return looking.init(worker_axes + inner_axes)
        if stands_for_params(params):
            return CompressState(WHOLE_NODE, WHOLE_NODE, WHOLE_NODE, compressor.uses_squares)
        layout = layout_of(params)
        axes = worker_axes + _shard_axes(params, worker_axes + inner_axes)
        buckets = new_buckets(layout)
        report = fresh_report(layout.entries, checksum(meaning(buckets, next_step)))
        buckets = shared_among(buckets, _bound_workers(worker_axes, inner_axes))
        waiting = Waiting(jnp.bool_(False), _zero_input(layout, compressor.uses_squares)) if next_step else None
        return packed((buckets, report, waiting), axes)

    def update(updates, state, params=None, *, sum_grad_squared=None, **extra_args):
        del extra_args
        if (looking := seen.get()) is not None:
            return looking.update(updates, state)
        layout = layout_of(updates)
        sum_grad_squared = mask_like(updates, sum_grad_squared)
        check_inputs(layout, state, params, sum_grad_squared)
        if not compressor.uses_squares:  # so that XLA computes none
            sum_grad_squared = None
        if not layout.buckets:  # no entries: the update is equal on all workers, though typed as each one's own
            return jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), updates), state
        is_single = not worker_axes and not inner_axes
        if is_single:
            reject_several_devices(updates)
        else:
            check_countable(layout.entries)
            reject_hidden(updates)
        states, axes = tuple(part.unpack() for part in (state.buckets, state.report, state.waiting)), state.buckets.axes
        comm = dataclasses.replace(comm_for_axes(worker_axes, inner_axes), fixed_length=next_step)
        # Typed as varying even if `init` was called in the same trace, where zeros are equal everywhere.
        varying = axes if tracks_variation(axes) else ()
        old_states, old_report, waiting = vary(states, varying)
        check_workers(old_states, comm.size)
        options = options_of(state)
        check_options(meaning(jax.eval_shape(lambda: new_buckets(layout)), next_step), options)
        if not isinstance(old_report.options, jax.core.Tracer):
            check_checksum(options, old_report.options)
        reject_reduced(updates, worker_axes + inner_axes)
        if compressor.uses_squares and sum_grad_squared is None:
            warn_of_missing_squares()
        if inner_axes:
            updates, sum_grad_squared = _inner_mean(updates, sum_grad_squared, inner_axes)

        taken = _taken_in(layout, updates, sum_grad_squared)
        if next_step:
            (present, taken), waiting = waiting, Waiting(jnp.bool_(True), _to_wait(taken, compressor.uses_squares))
        shard_axes = tuple(axis for axis in axes if axis not in worker_axes)
        is_own = old_report.options == jnp.uint32(checksum(options))  # and not restored from that of other options
        bad = jnp.where(is_own, bad_leaves(*taken), jnp.int32(1))
        # The remainder changes nothing. XLA computes one by an unknown number once; otherwise it would look at the
        # flags of all leaves again in every kernel that uses the result.
        any_bad = (bad % (old_report.skipped + min(layout.entries, 2**30) + 1) > 0).astype(jnp.int32)
        if next_step:
            any_bad = jnp.where(present | ~is_own, any_bad, NOTHING_WAITS)
        if is_single:
            any_bad = when_lowered(any_bad, reject_partitioned)
        claims = in_32_bits(old_report.symptoms.claims)(*taken, comm)
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
            options=old_report.options,
        )
        # Mark every leaf as varying, even one that is equal everywhere, so that the carry of a scan keeps its type.
        new = packed(vary((bucket_states, report, waiting), varying), axes)
        return _equal_where_gradients_are(unflatten(layout, means), updates, shard_axes), new

    return optax.GradientTransformationExtraArgs(init, update)


def _taken_in(layout: Layout, updates: PyTree, sum_grad_squared: PyTree) -> GradientInput:
    squares = (None,) * len(layout.buckets) if sum_grad_squared is None else flatten(layout, sum_grad_squared)
    return GradientInput(tuple(flatten(layout, updates)), tuple(squares))


def _to_wait(taken: GradientInput, uses_squares: bool) -> GradientInput:
    """What has to wait for the next step: the squares only if they are used, and then always."""
    if not uses_squares:
        return taken
    pairs = zip(*taken, strict=True)
    return taken._replace(squares=tuple(_squares(gs) if s is None else s for gs, s in pairs))


def _squares(gradient: tuple[Array, ...]) -> tuple[Array, ...]:
    """Finite for a finite gradient below 2**80."""
    return tuple(jnp.minimum(g * g, FLOAT_MAX) for g in gradient)


def _zero_input(layout: Layout, uses_squares: bool) -> GradientInput:
    zeros = tuple(tuple(jnp.zeros(s.shape, jnp.float32) for s in bucket.segments) for bucket in layout.buckets)
    return _to_wait(GradientInput(zeros, (None,) * len(zeros)), uses_squares)


def _bound_workers(worker_axes: tuple[str, ...], inner_axes: tuple[str, ...]) -> int:
    """Number of workers where `init` is called inside `shard_map` or `pmap`, and 1 elsewhere."""
    try:
        return comm_for_axes(worker_axes, inner_axes).size
    except ValueError:  # the axes are not bound: `distribute` will know
        return 1


def _inner_mean(updates: PyTree, sum_grad_squared: PyTree, inner_axes: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """The gradient of the inner workers' joint batch, and its squares: each sample now counts 1 / size.

    A reduce-scatter would move half the bytes, but each inner worker would then keep the state of one part of the
    model, and `init` does not know the mesh. Sharding the parameters over the inner axis does exactly that.
    """
    size = axis_size(inner_axes)
    updates = jax.tree.map(lambda x: dense_mean(x.astype(jnp.float32), inner_axes), updates)
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
