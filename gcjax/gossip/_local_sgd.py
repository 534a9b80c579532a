"""Local SGD: every few updates all models are averaged, or moved by an outer optimiser.

**Source.** Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; with an
outer optimiser Arthur Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105, algorithm 1.

**Wire format.** An all-reduce of the model, float32[bucket.entries] per bucket, or what the compressor sends.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._comm.collectives import axis_tuple, dense_mean
from gcjax._core.state import compress_states, reads_squares
from gcjax._jax_compat import varying_axes
from gcjax._kernels.floats import rounded
from gcjax._kernels.layout import flatten, layout_of, unflatten
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_integer, check_transform
from gcjax.gossip._periodic import (
    ExchangeInput,
    ExchangeResult,
    check_alone,
    leaves_of,
    periodic_exchange,
    vectors_of,
)


class OuterState(NamedTuple):
    """State of the outer step. What is not needed is ().

    Attributes:
      anchor: the parameters after the last exchange, the same on all workers, at least float32.
      outer: state of the outer optimiser.
      compressor: state of the compressor.
    """

    anchor: PyTree
    outer: PyTree
    compressor: PyTree


def local_sgd(
    local_steps: int,
    *,
    outer: optax.GradientTransformation | None = None,
    compressor: optax.GradientTransformation | None = None,
    axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces all models by their mean, or applies an outer optimiser, in every `local_steps`-th update.

        D = (sum over the workers of C(a - x_i)) / workers
        a <- a + outer(D)
        x_i <- a

    with the anchor a, the parameters after the last exchange, and the compressor C. Without an outer optimiser and a
    compressor the models become their mean; keep them in float32 then, because a bfloat16 model that is only averaged
    loses changes below half a unit in the last place. The anchor is at least float32. It ends a chain. The inner
    optimiser's state stays local. Other updates send nothing. Recipes, each after an inner optimiser:

    - DiLoCo: `local_sgd(100, outer=optax.sgd(0.7, momentum=0.9, nesterov=True))`.
    - SparseLoCo: `local_sgd(30, compressor=gcjax.sparse_loco_compress())`; its residual replaces the outer momentum.
    - MuLoCo, after `optax.contrib.muon(0.02)`: `local_sgd(30, outer=optax.sgd(0.7, momentum=0.6, nesterov=True),
      compressor=gcjax.sparse_loco_compress(4096, bits=4))`.

    Args:
      local_steps: updates from one exchange to the next, including the one that exchanges.
      outer: optax transform of the outer gradient; None is `optax.sgd(1.0)`.
      compressor: a transform of gcjax over the same axis that replaces the dense mean; None for the dense mean.
      axis_name: mesh axis or axes of the workers; None for a single worker.

    Returns:
      A transform like that of `gcjax.gossip.swarm_average`. With `outer` or `compressor` all workers must start from
      the parameters that `init` was given.

    Raises:
      TypeError, ValueError: an argument out of range; (from `init`) a compressor that is not one of gcjax, or is over
        other axes.

    Input that is not finite reaches all workers in an exchange, and the anchor: put `optax.apply_if_finite` around the
    optimiser before this transform.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = gcjax.gossip.local_sgd(1, outer=optax.sgd(0.5))  # half of the way that the worker has gone
    >>> params = jnp.ones(2)
    >>> updates, state = tx.update(jnp.array([-0.5, 1.0]), tx.init(params), params)
    >>> print(updates)
    [-0.25  0.5 ]
    """
    check_integer("local_steps", local_steps, 1)
    for name, tx in (("outer", outer), ("compressor", compressor)):
        if tx is not None:
            check_transform(name, tx)
    outer_step = optax.sgd(1.0) if outer is None else outer
    anchored = outer is not None or compressor is not None

    def init_method(params: PyTree) -> OuterState:
        layout_of(params)
        if not anchored:
            return OuterState((), (), ())
        anchor = jax.tree.map(_at_least_float32, params)
        compress_state = () if compressor is None else compressor.init(anchor)
        if compressor is not None:
            _check_compressor(compressor, compress_state, axis_tuple(axis_name))
        return OuterState(anchor, outer_step.init(anchor), compress_state)

    def average(inputs: ExchangeInput, state: OuterState) -> tuple[list[tuple[Array, ...]], OuterState, ArrayLike]:
        """The mean of the models or of the outer gradients, the state, and the words that this worker sends."""
        models, workers = inputs.models(), inputs.workers
        check_alone(inputs, () if anchored else models)

        def mean(buckets):
            vectors = [dense_mean(x, inputs.axes) if inputs.axes else x for x in vectors_of(buckets)]
            return leaves_of(inputs.layout, vectors)

        words: ArrayLike = -(-2 * (workers - 1) * inputs.layout.entries // workers)  # of a ring all-reduce
        if not anchored:
            return mean(models), state, words
        layout = layout_of(state.anchor)
        # From the anchor as the model can hold it: what only the anchor holds must not count as learnt.
        anchor, treedef = jax.tree.flatten(state.anchor)
        begin = jax.tree.unflatten(treedef, map(rounded, anchor, inputs.params_layout.dtypes))
        outer_grad = jax.tree.map(jnp.subtract, flatten(layout, begin), models)
        if compressor is None:
            return mean(outer_grad), state, words
        change = unflatten(layout, outer_grad)
        # The change of many steps counts as one sample: it has no squares but its own.
        squares = {"sum_grad_squared": jax.tree.map(jnp.square, change)} if reads_squares(state.compressor) else {}
        compressed, compress_state = compressor.update(change, state.compressor, **squares)
        if apart := set(inputs.axes) & varying_axes(compressed):
            raise ValueError(
                f"the compressor's mean differs along {sorted(apart)}, but local_sgd has axis_name={inputs.axes}; give "
                "the compressor the same axis_name, or part of it as inner_axis_name"
            )
        wire_bytes = [s.report.value.sent.wire_bytes[0] for s in compress_states(compress_state)]
        words = jnp.ceil(sum(wire_bytes) / 4).astype(jnp.uint32)
        return flatten(layout, compressed), state._replace(compressor=compress_state), words

    def exchange(inputs: ExchangeInput, state: OuterState) -> ExchangeResult:
        aim, state, words = average(inputs, state)
        if anchored:
            layout = layout_of(state.anchor)
            outer_updates, outer_state = outer_step.update(unflatten(layout, aim), state.outer, state.anchor)
            anchor = optax.apply_updates(state.anchor, outer_updates)
            state, aim = state._replace(anchor=anchor, outer=outer_state), flatten(layout, anchor)
        changes = jax.tree.map(jnp.subtract, aim, inputs.models())
        return ExchangeResult(changes, state, words, inputs.workers > 1)

    return periodic_exchange(init_method, exchange, local_steps, axis_name)


def _at_least_float32(x: Array) -> Array:
    """A copy."""
    return jnp.array(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _check_compressor(compressor: optax.GradientTransformation, state: PyTree, axes: tuple[str, ...]) -> None:
    """Raise if a compressor is not one of gcjax, or is over other axes."""
    states = compress_states(state)
    if not states:
        raise TypeError(f"compressor must be a transform of gcjax such as gcjax.top_k_compress, got {compressor!r}")
    for one in states:
        if not set(axes) & set(one.report.axes) and (axes or one.report.axes):
            raise ValueError(
                f"local_sgd has axis_name={axes or None}, the compressor {one.report.axes or None}; give both the same"
            )
