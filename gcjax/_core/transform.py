"""From a compressor to an optax transform."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._comm.collectives import axis_size, axis_tuple, comm_for_axes, dense_mean, pmax_if_axes
from gcjax._comm.comm import Comm
from gcjax._core.chain import Passing, Seen, noted, seen
from gcjax._core.checks import check_gradient, check_inputs, check_state, mask_like, reject_partitioned
from gcjax._core.compressor import Compressor, S, SendReport, StepInput, checked
from gcjax._core.finite import bad_leaves
from gcjax._core.missing_squares import warn_of_missing_squares
from gcjax._core.options import checksum, meaning
from gcjax._core.owned import shared_among
from gcjax._core.per_worker import WHOLE_NODE, PerWorker, stands_for_params
from gcjax._core.state import CompressState, UpdateReport, fresh_report, options_of
from gcjax._core.symptoms import Symptoms
from gcjax._jax_compat import in_32_bits, tracks_variation, vary, varying_axes, when_lowered
from gcjax._kernels.layout import Layout, count_beyond_range, flatten, layout_of, unflatten
from gcjax._types import Array, AxisNames, PyTree
from gcjax._xla import computed_once


def compress(
    compressor: Compressor[S],
    *,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax transform that replaces each worker's gradient by the compressed mean over the workers.

    Args:
      compressor: the method.
      axis_name: mesh axis of the workers, or a tuple of axes, bound by `jax.shard_map` or `jax.pmap`; None for a single
        worker. Under plain `jax.jit` with a sharded batch use `gcjax.compressed_value_and_grad`.
      inner_axis_name: axis or axes of a fast link, over which the dense mean is taken first. The workers along them
        share the work of one. docs/common.md says what moves where.

    Returns:
      A transform whose `update(updates, state, params=None, *, sum_grad_squared=None)` takes local gradients, a pytree
      of floating-point arrays of any shapes, and returns a tree of the same structure, shapes and dtypes, bit-equal on
      all workers. It computes in float32, also under jax_enable_x64. Its state is per worker (`PerWorker`), and per
      shard where the parameters are sharded over further axes (`gcjax.init_sharded`).

    Raises:
      TypeError: `compressor` is not a `Compressor`; (from `update`) leaves of integer or complex dtype; a method whose
        functions return something else than `Compressor` says.
      ValueError: one axis is named twice; (from `update`) an axis that is not bound; gradients that were reduced
        already; without axes, a gradient computed on several devices; `sum_grad_squared`, `params` or state of another
        structure; a state of other options; negative squares; leaves hidden by `optax.masked` or `optax.partition`
        where JAX does not track which axes a value varies over.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> top = gx.sparse_method(lambda a, step, bucket: gx.top_k_mask(a, 1), capacity=lambda bucket: 1)
    >>> tx = gx.compress(top)
    >>> print(tx.update(jnp.array([1.0, -3.0]), tx.init(jnp.zeros(2)))[0])
    [ 0. -3.]
    """
    worker_axes, inner_axes = axis_tuple(axis_name), axis_tuple(inner_axis_name)
    if both := set(worker_axes) & set(inner_axes):
        raise ValueError(f"axis_name and inner_axis_name must differ, both name {sorted(both)}")
    compressor = checked(compressor)
    compressor = compressor._replace(init=in_32_bits(compressor.init), update=in_32_bits(compressor.update))

    def new_buckets(layout: Layout) -> tuple[PyTree, ...]:
        return tuple(compressor.init(bucket) for bucket in layout.buckets)

    def packed(buckets: PyTree, report: UpdateReport, axes: tuple[str, ...]) -> CompressState:
        return CompressState(PerWorker.pack(buckets, axes), PerWorker.pack(report, axes), compressor.uses_squares)

    def init(params: PyTree) -> CompressState | Passing:
        if isinstance(looking := seen.get(), Seen):
            return looking.init(worker_axes + inner_axes)
        if stands_for_params(params):
            return CompressState(WHOLE_NODE, WHOLE_NODE, compressor.uses_squares)
        layout = layout_of(params)
        axes = worker_axes + _shard_axes(params, worker_axes + inner_axes)
        buckets = new_buckets(layout)
        report = fresh_report(layout.entries, checksum(meaning(buckets)))
        return packed(shared_among(buckets, _bound_workers(worker_axes, inner_axes)), report, axes)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, sum_grad_squared: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        """Check, take in, agree, run the method, report, pack."""
        del extra_args
        if (looking := seen.get()) is not None:
            return looking.update(updates, state)
        layout, axes = layout_of(updates), state.buckets.axes
        squares = mask_like(updates, sum_grad_squared)
        check_inputs(layout, state, params, squares)
        if not layout.buckets:  # no entries: the update is equal on all workers, though typed as each one's own
            return noted(jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), updates)), state
        buckets, report = state.buckets.unpack(), state.report.unpack()
        comm, options = comm_for_axes(worker_axes, inner_axes), options_of(state)
        check_state(buckets, report.options, options, comm.size, lambda: new_buckets(layout))
        check_gradient(updates, layout.entries, worker_axes + inner_axes)
        if compressor.uses_squares and squares is None:
            warn_of_missing_squares()

        # Typed as varying even if `init` was called in the same trace, where zeros are equal everywhere; in the end
        # even what is equal everywhere, so that the carry of a scan keeps its type.
        varying = axes if tracks_variation(axes) else ()
        buckets, report = vary((buckets, report), varying)
        taken = _taken_in(layout, updates, squares if compressor.uses_squares else None, inner_axes)

        shard_axes = tuple(axis for axis in axes if axis not in worker_axes)
        bad = _bad(taken, report, checksum(options), layout)
        if not worker_axes and not inner_axes:
            bad = when_lowered(bad, reject_partitioned)
        agreement = _agree(taken, bad, report, comm, shard_axes)

        inputs = [StepInput(gradient, square, comm, agreement.go) for gradient, square in zip(*taken, strict=True)]
        results = [compressor.update(step, bucket) for step, bucket in zip(inputs, buckets, strict=True)]

        means, new, sent = zip(*results, strict=True)
        report = _reported(sent, layout, means, report, agreement, comm)

        updates = _equal_where_gradients_are(unflatten(layout, means), updates, shard_axes)
        new, report = vary((new, report), varying)
        return noted(updates), packed(new, report, axes)

    return optax.GradientTransformationExtraArgs(init, update)


class GradientInput(NamedTuple):
    """What a compressor takes in, a tuple of float32 arrays for each bucket.

    Attributes:
      gradients: of this worker.
      squares: `sum_grad_squared`, None for a bucket without.
    """

    gradients: tuple[tuple[Array, ...], ...]
    squares: tuple[tuple[Array, ...] | None, ...]


class Agreement(NamedTuple):
    """What the workers have agreed on in one maximum.

    Attributes:
      go: bool, whether this step is taken: no worker's input is bad.
      claims: int32[4], the maxima of all workers' `Symptoms.claims`.
    """

    go: Array
    claims: Array


def _taken_in(layout: Layout, updates: PyTree, squares: PyTree, inner_axes: tuple[str, ...]) -> GradientInput:
    if inner_axes:
        updates, squares = _inner_mean(updates, squares, inner_axes)
    of_buckets = (None,) * len(layout.buckets) if squares is None else flatten(layout, squares)
    return GradientInput(tuple(flatten(layout, updates)), tuple(of_buckets))


def _bad(taken: GradientInput, old: UpdateReport, options: int, layout: Layout) -> Array:
    """1 if this worker's input is not finite, or its state was restored from that of other options; else 0. int32."""
    is_own = old.options == jnp.uint32(options)
    leaves = jnp.where(is_own, bad_leaves(*taken), jnp.int32(1))
    return (computed_once(leaves, old.skipped + min(layout.entries, 2**30) + 1) > 0).astype(jnp.int32)


def _agree(taken: GradientInput, bad: Array, old: UpdateReport, comm: Comm, shard_axes: tuple[str, ...]) -> Agreement:
    """One maximum over the workers: whether anybody's input is bad, and what `Symptoms` looks for.

    Args:
      taken: this worker's input.
      bad: int32, whether it is bad.
      old: the report of the last update.
      comm: the collectives.
      shard_axes: axes over which the parameters are sharded; a shard is skipped with the others.
    """
    claims = in_32_bits(old.symptoms.claims)(*taken, comm)
    largest = comm.max(jnp.concatenate([pmax_if_axes(bad, shard_axes)[None], claims]))
    go = in_32_bits(Symptoms.agreed_on)(largest[1:], largest[0]) == 0
    return Agreement(go, largest[1:])


def _reported(
    sent: tuple[SendReport, ...],
    layout: Layout,
    means: tuple[PyTree, ...],
    old: UpdateReport,
    agreement: Agreement,
    comm: Comm,
) -> UpdateReport:
    of_buckets = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *sent)
    return UpdateReport(
        sent=of_buckets._replace(wire_bytes=of_buckets.wire_bytes + comm.bytes_moved()),
        parameters=jnp.float32(layout.entries),
        workers=jnp.int32(comm.size),
        inner_workers=jnp.int32(comm.inner_workers),
        skipped=old.skipped + ~agreement.go,
        saturated=count_beyond_range(layout, means),
        symptoms=in_32_bits(old.symptoms.after)(agreement.claims, comm),
        options=old.options,
    )


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

    def mean(u: Array, g: Array) -> Array:
        over = tuple(axis for axis in shard_axes if axis in varying_axes(u) - varying_axes(g))
        return dense_mean(u, over) if over else u

    return jax.tree.map(mean, updates, gradients)
