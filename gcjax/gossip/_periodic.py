"""What all gossip transforms share: when to exchange, the count of what was sent, and the checks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gcjax._comm.collectives import axis_size, axis_tuple, worker_index
from gcjax._core.per_worker import PerWorker
from gcjax._jax_compat import tracks_variation, vary, varying_axes
from gcjax._kernels.buckets import Layout, flatten, layout_of, path_name, unflatten
from gcjax._types import Array
from gcjax._validation import check_integer
from gcjax.gossip._state import GossipState, count, no_traffic


class Round(NamedTuple):
    """What a method sees of one exchange.

    layout: of the updates.  params, updates: float32 buckets of this worker.  number: int32, exchanges before this
    one.  axes: of the workers.  workers: how many, static.  rank: int32, which one this is.
    """

    layout: Layout
    params: list[Array]
    updates: list[Array]
    number: Array
    axes: tuple[str, ...]
    workers: int
    rank: Array

    def models(self) -> list[Array]:
        """The parameters after the local update."""
        return [p + u for p, u in zip(self.params, self.updates, strict=True)]


class Outcome(NamedTuple):
    """changes: float32 buckets to add to the local update.  method: the new state of the method.  words: sent by this
    worker, in 32 bits.  took_part: bool.  failed: bool, the same on all workers."""

    changes: list[Array]
    method: Any
    words: Any
    took_part: Any
    failed: Any


def exchanging(
    init_method: Callable[..., Any], exchange: Callable[[Round, Any], Outcome], local_steps: int, axis_name
) -> optax.GradientTransformationExtraArgs:
    """A transform that in every `local_steps`-th update changes the parameters by what `exchange` says.

    init_method(params) is the method's first state; `exchange` must return it with the same types.
    """
    axes = axis_tuple(axis_name)
    check_integer("local_steps", local_steps, 1)

    def init(params) -> GossipState:
        layout_of(params)
        return GossipState(jnp.int32(0), no_traffic(axes), init_method(params))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        layout = layout_of(updates)
        workers = axis_size(axes) if axes else 1
        _check_inputs(layout, state, params, axes)
        if not layout.buckets:
            return updates, state._replace(step=state.step + 1)
        rank = worker_index(axes) if axes else jnp.int32(0)

        def now(updates, traffic, method):
            buckets = flatten(layout, params), flatten(layout, updates)
            before = Round(layout, *buckets, state.step // local_steps, axes, workers, rank)
            changes, new, words, took_part, failed = exchange(before, method)
            moved = unflatten(layout, [u + c for u, c in zip(buckets[1], changes, strict=True)])
            counted = count(traffic, words, took_part, failed)
            return jax.tree.map(_typed_like, (moved, counted, new), (updates, traffic, method))

        def not_now(updates, traffic, method):
            return updates, traffic._replace(last=_typed_like(jnp.uint32(0), traffic.last)), method

        # Typed as varying also where they are equal: a scan and a cond want types to stay the same.
        over = axes if tracks_variation(axes) else ()
        local = (*vary((updates, state.traffic.unpack()), over), state.method)
        if local_steps == 1:
            updates, traffic, method = now(*local)
        else:
            # The count is equal on all workers, so all of them exchange or none; and what is not run is not sent.
            updates, traffic, method = lax.cond((state.step + 1) % local_steps == 0, now, not_now, *local)
        return updates, GossipState(state.step + 1, PerWorker.pack(traffic, axes), method)

    return optax.GradientTransformationExtraArgs(init, update)


def _typed_like(new, old):
    return vary(new, varying_axes(old))


def _check_inputs(layout: Layout, state: GossipState, params, axes) -> None:
    if params is None:
        raise ValueError("gossip averages parameters: call update(updates, state, params), with this worker's own")
    if jax.tree.structure(params) != layout.treedef:
        raise ValueError(
            f"params have the structure {jax.tree.structure(params)}, the updates {layout.treedef}; they must agree"
        )
    workers = state.traffic.value.last.size
    if workers != 1:
        raise ValueError(
            f"update got the state of {workers} workers at once. Call it inside jax.shard_map or jax.pmap with "
            "in_specs=gcjax.state_specs(state), so that every worker sees its own"
        )
    if not tracks_variation(axes):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if same := [axis for axis in axes if axis not in varying_axes(leaf)]:
            raise ValueError(
                f"params leaf {path_name(path)} is one for all workers along {same}, but with gossip every worker has "
                "its own. Use gcjax.gossip.make_train_step, or place them with gcjax.gossip.worker_params"
            )
