"""What all gossip transforms share: the exchange every few updates, the count of what was sent, and the checks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.collectives import axis_size, axis_tuple, send, worker_index
from gcjax._core.checks import check_countable
from gcjax._core.own_models import GossipState, Traffic
from gcjax._core.per_worker import PerWorker
from gcjax._jax_compat import tracks_variation, unchecked_axes, vary, vary_like, varying_axes
from gcjax._kernels.buckets import split_vector
from gcjax._kernels.layout import Layout, flatten, layout_of, path_name, unflatten
from gcjax._types import Array, ArrayLike, AxisNames, PyTree
from gcjax._validation import check_integer


class ExchangeInput(NamedTuple):
    """What a method sees of one exchange.

    Attributes:
      layout: of the updates.
      params_layout: of the parameters, which may have another dtype.
      params: this worker's parameters before the update: the leaves of each bucket, float32.
      updates: this worker's local update, likewise.
      number: int32, exchanges before this one.
      axes: mesh axes of the workers.
      workers: number of workers. Static.
      rank: int32, number of this worker.
    """

    layout: Layout
    params_layout: Layout
    params: list[tuple[Array, ...]]
    updates: list[tuple[Array, ...]]
    number: Array
    axes: tuple[str, ...]
    workers: int
    rank: Array

    def models(self) -> list[tuple[Array, ...]]:
        """The parameters after the local update."""
        return jax.tree.map(jnp.add, self.params, self.updates)


class ExchangeResult(NamedTuple):
    """What an exchange does.

    Attributes:
      changes: what to add to the local update: the leaves of each bucket, float32.
      method: the new state of the method.
      words: words of 32 bits that this worker sent.
      took_part: bool, whether this worker took part.
      failed: bool, whether the exchange had to be repeated in full, the same on all workers.
    """

    changes: list[tuple[Array, ...]]
    method: PyTree
    words: ArrayLike
    took_part: ArrayLike
    failed: ArrayLike = False


def vectors_of(buckets: Sequence[Sequence[Array]]) -> list[Array]:
    """What goes over the wire in full precision: the leaves of each bucket one after the other, without padding."""
    return [jnp.concatenate([x.reshape(-1) for x in leaves]) for leaves in buckets]


def leaves_of(layout: Layout, vectors: Sequence[Array]) -> list[tuple[Array, ...]]:
    """The inverse of `vectors_of`, of float32[bucket.entries] for each bucket."""
    pairs = zip(layout.buckets, vectors, strict=True)
    return [tuple(split_vector(vector, [s.shape for s in bucket.segments])) for bucket, vector in pairs]


def send_in_round(plan: np.ndarray, number: Array, arrays: list[Array], axes: tuple[str, ...]) -> list[Array]:
    """What each worker receives in one round of a plan, int[rounds, workers], whose rows say to whom each one sends."""

    def run(to, arrays):
        return [send(x, to, axes) for x in arrays]

    # One branch for each round, because a permutation of devices must be static. Only the branch of this round runs.
    return lax.switch(number, [functools.partial(run, to) for to in plan], arrays)


def no_exchange(inputs: ExchangeInput, method: PyTree) -> ExchangeResult:
    """The result for a single worker: nothing changes and nothing is sent."""
    check_alone(inputs, inputs.params)
    return ExchangeResult(jax.tree.map(jnp.zeros_like, inputs.params), method, 0, False)


def check_alone(inputs: ExchangeInput, own: PyTree) -> None:
    """Raise ValueError without axes on several devices: untracked ones, or those over which `own` varies."""
    sizes = jax.sharding.get_abstract_mesh().shape
    several = unchecked_axes() | {axis: sizes[axis] for axis in varying_axes(own) if sizes[axis] > 1}
    if not inputs.axes and several:
        raise ValueError(
            f"no axis_name was given, but update runs on the devices of {sorted(several)}: each would train a model of "
            "its own and never exchange it; give the gossip transform the axis_name"
        )


def periodic_exchange(
    init_method: Callable[[PyTree], PyTree],
    exchange: Callable[[ExchangeInput, Any], ExchangeResult],
    local_steps: int,
    axis_name: AxisNames,
) -> optax.GradientTransformationExtraArgs:
    """A transform that exchanges in every `local_steps`-th update.

    Args:
      init_method: init_method(params) -> the method's first state.
      exchange: exchange(inputs, method_state) -> `ExchangeResult`. It must return the state with the same types.
      local_steps: updates from one exchange to the next.
      axis_name: mesh axis or axes of the workers; None for a single worker.
    """
    axes = axis_tuple(axis_name)
    check_integer("local_steps", local_steps, 1)

    def init(params: PyTree) -> GossipState:
        layout_of(params)
        return GossipState(jnp.int32(0), PerWorker.pack(Traffic.zero(), axes), init_method(params))

    def update(updates, state, params=None, *, skips=None, **extra_args):
        del extra_args
        if skips is not None:  # bool: this worker's own update is bad; it takes part in the exchange without it
            updates = jax.tree.map(lambda u: jnp.where(skips, 0, u).astype(u.dtype), updates)
        layout = layout_of(updates)
        workers = axis_size(axes) if axes else 1
        traffic = state.traffic.unpack()
        _check_params(layout, params, axes)
        if not layout.buckets:
            return updates, state._replace(step=state.step + 1)
        check_countable(layout.entries)
        rank = worker_index(axes) if axes else jnp.int32(0)

        def exchange_now(*old):
            updates, traffic, method = old
            params_layout, local, number = layout_of(params), flatten(layout, updates), state.step // local_steps
            own = flatten(params_layout, params)
            inputs = ExchangeInput(layout, params_layout, own, local, number, axes, workers, rank)
            result = exchange(inputs, method)
            total = jax.tree.map(jnp.add, local, result.changes)
            updates = unflatten(layout, total, keep_infinities=True)
            traffic = traffic.after(result.words, result.took_part, result.failed)
            return jax.tree.map(vary_like, (updates, traffic, result.method), old)

        def stay(*old):
            updates, traffic, method = old
            return jax.tree.map(vary_like, (updates, traffic.after(0, False, False), method), old)

        # Typed as varying even where equal, because scan and cond need types to stay the same.
        over = axes if tracks_variation(axes) else ()
        local = (*vary((updates, traffic), over), state.method)
        # All workers have the same step count, so either all of them exchange or none does.
        is_last = state.step % local_steps == local_steps - 1
        run = exchange_now(*local) if local_steps == 1 else lax.cond(is_last, exchange_now, stay, *local)
        updates, traffic, method = run
        return updates, GossipState(state.step + 1, PerWorker.pack(traffic, axes), method)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_params(layout: Layout, params: PyTree, axes: tuple[str, ...]) -> None:
    if params is None:
        raise ValueError("gossip averages parameters: call update(updates, state, params) with this worker's own")
    if jax.tree.structure(params) != layout.treedef:
        raise ValueError(
            f"params have the structure {jax.tree.structure(params)}, the updates {layout.treedef}; they must agree"
        )
    if not tracks_variation(axes):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if shared := [axis for axis in axes if axis not in varying_axes(leaf)]:
            raise ValueError(
                f"params leaf {path_name(path)} is the same for all workers along {shared}, but gossip needs one per "
                "worker. Use gcjax.make_train_step, or place params with gcjax.gossip.worker_params"
            )
