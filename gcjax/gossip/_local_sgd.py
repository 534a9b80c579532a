"""Local SGD: every few updates all models are averaged, or moved by an outer optimiser.

**Source.** Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; with an
outer optimiser Arthur Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105, algorithm 1.

**Wire format.** An all-reduce of the model, float32[bucket.entries] per bucket, or what the compressor sends.

**Deviations.** None.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._comm.collectives import dense_mean
from gcjax._core.state import compress_states
from gcjax._kernels.layout import flatten, unflatten
from gcjax._types import ArrayLike, AxisNames, PyTree
from gcjax.gossip._periodic import ExchangeInput, ExchangeResult, leaves_of, periodic_exchange, vectors_of


class OuterState(NamedTuple):
    """State of the outer step.

    Attributes:
      anchor: the parameters after the last exchange, the same on all workers.
      outer: state of the outer optimiser.
      compressor: state of the compressor, or ().
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
    r"""Replaces all models by their mean, or applies an outer optimiser, in every `local_steps`-th update.

    .. math::
        \Delta = \frac1n \sum_i C(a - x_i), \qquad a \leftarrow a + \mathrm{outer}(\Delta), \qquad x_i \leftarrow a

    with the anchor a, the parameters after the last exchange, and the compressor C. The outer optimiser of DiLoCo is
    `optax.sgd(0.7, momentum=0.9, nesterov=True)`. Without an outer optimiser and a compressor the models become their
    mean. After an exchange they are equal up to the rounding of this last update.

    It ends a chain: `optax.chain(optax.adamw(1e-3), gcjax.gossip.local_sgd(100, outer=optax.sgd(0.7, momentum=0.9,
    nesterov=True), axis_name="data"))`. The inner optimiser's state stays local. Between exchanges nothing is sent.

    Args:
      local_steps: updates from one exchange to the next, including the one that exchanges.
      outer: optax transform of the outer gradient; None is `optax.sgd(1.0)`.
      compressor: a transform of gcjax over the same axis, such as `gcjax.top_k_compress(0.01, axis_name="data")`, that
        replaces the dense mean; None for the dense mean.
      axis_name: mesh axis or axes of the workers; None for a single worker.

    Returns:
      A transform like that of `gcjax.gossip.swarm_average`. With `outer` or `compressor` all workers must start from
      the parameters that `init` was given.

    Raises:
      TypeError, ValueError: an argument out of range; a compressor that is not one of gcjax (from `init`).

    **Randomness**: the compressor's. **Bias**: the compressor's. **Non-finite input** reaches all workers in an
    exchange, and the anchor: put `optax.apply_if_finite` around the optimiser before this transform.
    """
    if outer is None and compressor is not None:
        outer = optax.sgd(1.0)

    def init_method(params: PyTree) -> PyTree:
        if outer is None:
            return ()
        compress_state = () if compressor is None else compressor.init(params)
        if compressor is not None and not compress_states(compress_state):
            raise TypeError(f"compressor must be a transform of gcjax such as gcjax.top_k_compress, got {compressor!r}")
        return OuterState(jax.tree.map(jnp.copy, params), outer.init(params), compress_state)

    def exchange(inputs: ExchangeInput, method: PyTree) -> ExchangeResult:
        layout, models, workers = inputs.layout, inputs.models(), inputs.workers

        def mean(buckets):
            vectors = [dense_mean(x, inputs.axes) if workers > 1 else x for x in vectors_of(buckets)]
            return leaves_of(layout, vectors)

        words: ArrayLike = -(-2 * (workers - 1) * layout.entries // workers)  # of a ring all-reduce
        if outer is None:
            changes = jax.tree.map(jnp.subtract, mean(models), models)
            return ExchangeResult(changes, method, words, workers > 1)
        outer_grad = jax.tree.map(jnp.subtract, flatten(layout, method.anchor), models)
        compress_state = method.compressor
        if compressor is None:
            outer_grad = unflatten(layout, mean(outer_grad))
        else:
            outer_grad, compress_state = compressor.update(unflatten(layout, outer_grad), compress_state)
            wire_bytes = [s.report.value.sent.wire_bytes[0] for s in compress_states(compress_state)]
            words = jnp.ceil(sum(wire_bytes) / 4).astype(jnp.uint32)
        outer_updates, outer_state = outer.update(outer_grad, method.outer, method.anchor)
        anchor = optax.apply_updates(method.anchor, outer_updates)
        changes = jax.tree.map(jnp.subtract, flatten(layout, anchor), models)
        return ExchangeResult(changes, OuterState(anchor, outer_state, compress_state), words, workers > 1)

    return periodic_exchange(init_method, exchange, local_steps, axis_name)
