"""Local SGD: every few updates all models are averaged, or moved by an outer optimiser, at once or in fragments.

**Source.** Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; with an
outer optimiser Arthur Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105, algorithm 1; in fragments Arthur Douillard et al., "Streaming DiLoCo with overlapping communication",
2025, arXiv 2501.18512, algorithm 2.

**Wire format.** An all-reduce of the model or fragment, float32[bucket.entries] per bucket, or what the compressor
sends.

**Deviations.** Streaming DiLoCo: a fragment is made of leaves, not of whole layers, unless `fragments` says so. Without
a compressor its messages are float32; the paper's are 4-bit floats, those of `gcjax.qsgd_compress` have 15 evenly
spaced levels. The first fragment is sent after local_steps / fragments updates, not after local_steps. A message
arrives within the update that sends it, and waits until it is mixed in: XLA runs a collective in a conditional where it
stands, so `delay` gives the paper's updates and hides no time.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._comm.collectives import axis_tuple, dense_mean
from gcjax._core.compressor import EmptyState
from gcjax._core.state import compress_states, reads_squares
from gcjax._dense.codec import CodecState
from gcjax._jax_compat import varying_axes
from gcjax._kernels.floats import rounded
from gcjax._kernels.layout import flatten, layout_of, unflatten
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_integer, check_number, check_transform
from gcjax.gossip._periodic import (
    Exchange,
    ExchangeInput,
    ExchangeResult,
    check_alone,
    leaves_of,
    periodic_exchange,
    vectors_of,
)


class OuterState(NamedTuple):
    """State of the outer step of one fragment. What is not needed is ().

    Attributes:
      anchor: the parameters after the last exchange, the same on all workers, at least float32, with
        None in place of the leaves of other fragments.
      outer: state of the outer optimiser.
      compressor: state of the compressor.
      arrived: with a delay, what waits to be mixed in, the same on all workers: the leaves of each bucket, float32, of
        the mean outer gradient, or of the mean of the models if there is no outer step.
    """

    anchor: PyTree
    outer: PyTree
    compressor: PyTree
    arrived: PyTree


def local_sgd(
    local_steps: int,
    *,
    outer: optax.GradientTransformation | None = None,
    compressor: optax.GradientTransformation | None = None,
    fragments: PyTree = 1,
    delay: int = 0,
    mixing: ArrayLike | None = None,
    axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces all models by their mean, or applies an outer optimiser, in every `local_steps`-th update.

        D = (sum over the workers of C(a - x_i)) / workers
        a <- a + outer(D)
        x_i <- x_i + mixing * (a - x_i)

    with the anchor a, the parameters after the last exchange, and the compressor C. The outer optimiser of DiLoCo is
    `optax.sgd(0.7, momentum=0.9, nesterov=True)`. Without an outer optimiser and a compressor the models are mixed with
    their mean; keep them in float32 then, because a bfloat16 model that is only averaged loses changes below half a
    unit in the last place. The anchor is at least float32.

    It ends a chain. The inner optimiser's state stays local. Other updates send nothing. Recipes, each after an inner
    optimiser, and each with `axis_name="data"`:

    - DiLoCo: `local_sgd(100, outer=optax.sgd(0.7, momentum=0.9, nesterov=True))`.
    - SparseLoCo: `local_sgd(30, compressor=gcjax.sparse_loco_compress())`; its residual replaces the outer momentum.
    - MuLoCo, after `optax.contrib.muon(0.02)`: `local_sgd(30, outer=optax.sgd(0.7, momentum=0.6, nesterov=True),
      compressor=gcjax.sparse_loco_compress(4096, bits=4))`.
    - Streaming DiLoCo: `local_sgd(100, outer=..., fragments=4, delay=5)`; in 4 bits with
      `compressor=gcjax.qsgd_compress(4, key=key, transport="two_phase")`.

    Args:
      local_steps: updates from one exchange to the next, including the one that exchanges.
      outer: optax transform of the outer gradient; None is `optax.sgd(1.0)`.
      compressor: a transform of gcjax over the same axis, such as `gcjax.top_k_compress(0.01, axis_name="data")`, that
        replaces the dense mean; None for the dense mean.
      fragments: number of parts in which the model is exchanged, each in every `local_steps`-th update but at its own
        time. Leaves are assigned so that the parts are about equal. Or the number of each leaf's part, from 0: a prefix
        of the parameters' tree, such as `{"embed": 0, "layers": [0, 1, 2], "head": 2}`.
      delay: updates between the one that sends and the one that takes the outer step and mixes, below `local_steps`.
        Until then the state holds a float32 more per parameter. A message still waiting at the end is not applied.
      mixing: in (0, 1], the anchor's share in a worker's new parameters; 1 - alpha of the Streaming DiLoCo paper. None
        is 1 without a delay, and 0.5 with one: 1 would discard the progress since the message. Below 1 the compressor
        must keep no residual, of which the worker's own parameters keep a part, too: it would be sent twice.
      axis_name: mesh axis or axes of the workers; None for a single worker.

    Returns:
      A transform like that of `gcjax.gossip.swarm_average`. With `outer` or `compressor` all workers must start from
      the parameters that `init` was given.

    Raises:
      TypeError, ValueError: an argument out of range; (from `init`) a compressor that is not one of gcjax, is over
        other axes or, with `mixing` below 1, keeps a residual; more fragments than leaves, `fragments` that do not fit
        the parameters.

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
    check_integer("delay", delay, 0, local_steps - 1)
    mixing = (0.5 if delay else 1.0) if mixing is None else mixing
    check_number("mixing", mixing, 0.0, 1.0)
    for name, tx in (("outer", outer), ("compressor", compressor)):
        if tx is not None:
            check_transform(name, tx)
    count = _count_fragments(fragments, local_steps)
    anchored = outer is not None or compressor is not None
    outer_step = optax.sgd(1.0) if outer is None else outer

    def init_fragment(params: PyTree) -> OuterState:
        layout = layout_of(params)
        zeros = [tuple(jnp.zeros(s.shape, jnp.float32) for s in bucket.segments) for bucket in layout.buckets]
        arrived = zeros if delay else ()
        if not anchored:
            return OuterState((), (), (), arrived)
        anchor = jax.tree.map(_at_least_float32, params)
        compress_state = () if compressor is None else compressor.init(anchor)
        if compressor is not None:
            _check_compressor(compressor, compress_state, axis_tuple(axis_name), mixing)
        return OuterState(anchor, outer_step.init(anchor), compress_state, arrived)

    def init_method(params: PyTree) -> tuple[OuterState, ...]:
        return tuple(init_fragment(part(params)) for part in parts)

    def send(inputs: ExchangeInput, state: OuterState) -> tuple[list[tuple[Array, ...]], OuterState, ArrayLike]:
        """What arrives from all workers, the state, and the words that this worker sends."""
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

    def mix(
        inputs: ExchangeInput, state: OuterState, arrived: list[tuple[Array, ...]]
    ) -> tuple[list[tuple[Array, ...]], OuterState]:
        """The changes of this worker's parameters, and the state."""
        aim = arrived
        if anchored:
            layout = layout_of(state.anchor)
            outer_updates, outer_state = outer_step.update(unflatten(layout, arrived), state.outer, state.anchor)
            anchor = optax.apply_updates(state.anchor, outer_updates)
            state, aim = state._replace(anchor=anchor, outer=outer_state), flatten(layout, anchor)
        return jax.tree.map(lambda new, own: mixing * (new - own), aim, inputs.models()), state

    def exchange(
        number: int, sends: bool, mixes: bool, inputs: ExchangeInput, states: tuple[OuterState, ...]
    ) -> ExchangeResult:
        """Send the fragment of this number, mix in what has arrived of it, or both."""
        words: ArrayLike = jnp.uint32(0)
        state, arrived = states[number], states[number].arrived
        if sends:
            arrived, state, words = send(inputs, state)
        if mixes:
            changes, state = mix(inputs, state, arrived)
        else:
            changes, state = jax.tree.map(jnp.zeros_like, inputs.params), state._replace(arrived=arrived)
        states = (*states[:number], state, *states[number + 1 :])
        return ExchangeResult(changes, states, words, sends and inputs.workers > 1)

    parts = [_part(fragments, count, number) for number in range(count)]
    exchanges = []
    for number, part in enumerate(parts):
        at = (number + 1) * local_steps // count
        exchanges.append(Exchange(functools.partial(exchange, number, True, not delay), at, part))
        if delay:
            exchanges.append(Exchange(functools.partial(exchange, number, False, True), at + delay, part))
    return periodic_exchange(init_method, exchanges, local_steps, axis_name)


def _at_least_float32(x: Array) -> Array:
    """A copy."""
    return jnp.array(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _check_compressor(
    compressor: optax.GradientTransformation, state: PyTree, axes: tuple[str, ...], mixing: ArrayLike
) -> None:
    """Raise if a compressor is not one of gcjax, is over other axes, or cannot be used with this mixing."""
    states = compress_states(state)
    if not states:
        raise TypeError(f"compressor must be a transform of gcjax such as gcjax.top_k_compress, got {compressor!r}")
    for one in states:
        if not set(axes) & set(one.report.axes) and (axes or one.report.axes):
            raise ValueError(
                f"local_sgd has axis_name={axes or None}, the compressor {one.report.axes or None}; give both the same"
            )
        sends_all = all(
            isinstance(part, EmptyState) or (isinstance(part, CodecState) and not part.has_feedback)
            for part in one.buckets.unpack()
        )
        if not sends_all and (isinstance(mixing, jax.Array) or np.less(mixing, 1)):
            raise ValueError(
                f"mixing={mixing!r} leaves each worker a part of its own changes. The compressor's residual would send "
                "that part again, and training may diverge. Give mixing=1, or a compressor that keeps no residual such "
                "as gcjax.qsgd_compress"
            )


def _count_fragments(fragments: PyTree, local_steps: int) -> int:
    if isinstance(fragments, int):
        check_integer("fragments", fragments, 1, local_steps)
        return fragments
    numbers = jax.tree.leaves(fragments)
    if jax.tree_util.all_leaves([fragments]) or not numbers:
        raise TypeError(f"fragments must be an int, or a tree of the numbers of parts, got {fragments!r}")
    for number in numbers:
        check_integer("fragments", number, 0, local_steps - 1)
    count = len(set(numbers))
    if set(numbers) != set(range(count)):
        raise ValueError(f"fragments must number the parts from 0 without gaps, got {sorted(set(numbers))}")
    return count


def _part(fragments: PyTree, count: int, number: int) -> Callable[[PyTree], PyTree]:
    """tree -> the tree with None in place of the leaves of other fragments."""

    def part(tree: PyTree) -> PyTree:
        numbers = _fragment_of_leaves(fragments, count, tree)
        return jax.tree.map(lambda x, own: x if own == number else None, tree, numbers)

    return part


def _fragment_of_leaves(fragments: PyTree, count: int, tree: PyTree) -> PyTree:
    """The number of the fragment of each leaf of a tree."""
    if not isinstance(fragments, int):
        try:
            return jax.tree.broadcast(fragments, tree)
        except ValueError as error:
            raise ValueError(f"fragments must be a prefix of the tree of parameters: {error}") from error
    leaves, treedef = jax.tree.flatten(tree)
    if count > 1 and len(leaves) < count:
        raise ValueError(f"fragments must be at most the number of leaves, which is {len(leaves)}, got {count}")
    sizes, owners = [0] * count, [0] * len(leaves)
    for leaf in sorted(range(len(leaves)), key=lambda i: -jnp.size(leaves[i])):
        owners[leaf] = sizes.index(min(sizes))
        sizes[owners[leaf]] += jnp.size(leaves[leaf])
    return jax.tree.unflatten(treedef, owners)
