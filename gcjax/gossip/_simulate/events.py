"""Simulated nodes that meet in pairs: SwarmSGD, blocking and non-blocking, and AD-PSGD."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._kernels.bits import TINY
from gcjax._types import Array, PyTree
from gcjax.gossip._graphs import Graph, neighbours
from gcjax.gossip._lattice import decode, encode_points, lattice_points, scale_for
from gcjax.gossip._simulate.clocks import Events, World, meetings, message_bits
from gcjax.gossip._simulate.nodes import Run, Trainer, distance_from_mean, so_far

MARGIN = 2.0  # the lattice's margin over the largest distance lately seen
FORGET = 0.9  # what is left of that distance at the node's next message


class PairState(NamedTuple):
    """State of n nodes; a step of the loop reads and writes a few of its rows in place.

    models: float32[2n, P], the nodes' live models, then their communication copies; blocking, the live ones only.
    opt_state: leaves with a leading axis n.  done: int32[n], gradient steps made.
    distance: float32[n], the largest entry of a difference that each node saw lately.
    resent: int32, messages sent again in full.
    flying: float32[slots, P], what the latest messages bring to their receivers' copies; message m is in m % slots.
    """

    models: Array
    opt_state: PyTree
    done: Array
    distance: Array
    resent: Array
    flying: Array


class Schedule(NamedTuple):
    """`Events` on the device. arrived: int32[e], how many messages have arrived before each event ends."""

    node: Array
    partner: Array
    steps: Array
    meets: Array
    arrived: Array


def pairs(
    trainer: Trainer, world: World, nodes: int, steps: int, graph: Graph, local_steps, geometric, blocking, bits
) -> Run:
    """A simulation of `steps` gradient steps per node; the options are those of `simulate`."""
    message = message_bits(len(trainer.start), bits)
    events = meetings(
        world,
        neighbours(graph, nodes),
        steps * nodes,
        local_steps=local_steps,
        geometric=geometric,
        blocking=blocking,
        bits=message,
        rng=np.random.default_rng(np.asarray(jax.random.bits(trainer.key, (4,), jnp.uint32))),
    )
    plan, slots = schedule(events, 0.0 if blocking else world.delay)
    run = functools.partial(run_blocking if blocking else run_non_blocking, trainer, bits)

    def look(state):
        seen = state.models[-nodes:]
        mean = seen.mean(0)
        return mean, distance_from_mean(seen, mean), state.resent

    return Run(
        state=pair_state(trainer, nodes, blocking=blocking, slots=slots),
        plan=plan,
        advance=run,
        look=look,
        gradients=so_far(events.steps.sum(1)) / nodes,
        seconds=np.concatenate([[0.0], events.seconds]),
        bits=so_far(2 * message * (events.node != events.partner)) / nodes,
        steps=lambda state: state.done,
    )


def pair_state(trainer: Trainer, nodes: int, *, blocking: bool, slots: int) -> PairState:
    return PairState(
        models=jnp.tile(trainer.start, (nodes if blocking else 2 * nodes, 1)),
        opt_state=trainer.opt_states(nodes),
        done=jnp.zeros(nodes, jnp.int32),
        distance=jnp.zeros(nodes, jnp.float32),
        resent=jnp.int32(0),
        flying=jnp.zeros((slots, len(trainer.start)), jnp.float32),
    )


def schedule(events: Events, delay: float) -> tuple[Schedule, int]:
    """The schedule, and the slots that messages in flight need: none without delay."""
    e = np.arange(len(events.node))
    arrived = np.searchsorted(events.seconds + delay, events.seconds, side="right") if delay else e
    slots = int((e + 1 - arrived).max()) if delay else 0
    arrays = (events.node, events.partner, events.steps, events.meets, arrived.astype(np.int32))
    return Schedule(*map(jnp.asarray, arrays)), slots


def run_blocking(trainer: Trainer, bits: int | None, state: PairState, data, plan: Schedule, begin, end) -> PairState:
    """Events begin to end - 1: both finish their local steps, then both become the mean of the two."""

    def meet(e, state):
        i, j = plan.node[e], plan.partner[e]
        nodes = len(state.done)
        rows = jnp.stack([i, jnp.where(i == j, nodes, j)])  # beyond the end: not written
        before, opt_state, done = state.models[rows], _take(state.opt_state, rows), state.done[rows]
        models, opt_state = jax.vmap(trainer.local_steps, in_axes=(None, 0, 0, 0, 0, 0))(
            data, before, opt_state, rows, done, plan.steps[e]
        )
        reach = jnp.max(jnp.abs(models - before), axis=1)
        step, distance, resent = _exchange(trainer, bits, models, state.distance[rows], reach, e, plan.meets[e])
        return PairState(
            _put(state.models, rows, models + step),
            _put(state.opt_state, rows, opt_state),
            _put(state.done, rows, done + plan.steps[e]),
            _put(state.distance, rows, distance),
            state.resent + resent,
            state.flying,
        )

    return lax.fori_loop(begin, end, meet, state)


def run_non_blocking(
    trainer: Trainer, bits: int | None, state: PairState, data, plan: Schedule, begin, end
) -> PairState:
    """Events begin to end - 1, of a node i that has finished its local steps and a partner j that goes on with its own.

    With live models X, communication copies Y and G the sum of i's local updates since its last event,

        Y_i, X_i = (Y_i + Y_j) / 2 + G        Y_j = (Y_i + Y_j) / 2

    so that j meets the average when it next finishes its own local steps, which it began from X_j.
    """
    nodes, slots = len(state.done), len(state.flying)

    def meet(e, state):
        i, j = plan.node[e], plan.partner[e]
        models = _deliver(state, plan, e) if slots else state.models
        written = jnp.stack([nodes + i, jnp.where((i == j) | bool(slots), 2 * nodes, nodes + j)])
        live, *copies = models[jnp.stack([i, nodes + i, nodes + j])]
        trained, opt_state = trainer.local_steps(
            data, live, _take(state.opt_state, i), i, state.done[i], plan.steps[e, 0]
        )
        update, copies, both = trained - live, jnp.stack(copies), jnp.stack([i, j])
        reach = jnp.max(jnp.abs(update))
        step, distance, resent = _exchange(trainer, bits, copies, state.distance[both], reach, e, plan.meets[e])
        new = copies + step + jnp.stack([update, jnp.zeros_like(update)])
        return PairState(
            _put(_put(models, written, new), i, new[0]),
            _put(state.opt_state, i, opt_state),
            state.done.at[i].add(plan.steps[e, 0]),
            _put(state.distance, jnp.stack([i, jnp.where(i == j, nodes, j)]), distance),
            state.resent + resent,
            state.flying.at[e % slots].set(step[1]) if slots else state.flying,
        )

    return lax.fori_loop(begin, end, meet, state)


def _deliver(state: PairState, plan: Schedule, e) -> Array:
    """The models when all messages that arrive between the event before and this one are in the copies."""
    nodes, slots = len(state.done), len(state.flying)
    first = jnp.where(e > 0, plan.arrived[e - 1], 0)

    def put(m, models):
        return models.at[nodes + plan.partner[m]].add(state.flying[m % slots])

    return lax.fori_loop(first, plan.arrived[e], put, state.models)


def _exchange(trainer: Trainer, bits: int | None, models, distance, reach, e, meets):
    """By how much the two move towards each other, float32[2, P], one the opposite of the other, so that their mean
    stays; their new distances; how many messages were sent again.

    reach: how far the senders went since they last met somebody: a first guess, and a floor, for the distance.
    """
    half = jnp.where(meets, 0.5, 0.0)
    if bits is None:
        return half * (models[::-1] - models), distance, 0
    scale = scale_for(MARGIN * jnp.maximum(jnp.maximum(distance, reach), TINY), bits)
    key = jax.random.fold_in(jax.random.fold_in(trainer.key, 1 << 30), e)
    points, whole = jax.vmap(lambda x, s: lattice_points(x, s, key))(models, scale)
    words = jax.vmap(lambda z, w: encode_points(z, w, bits))(points, whole)
    decoded, right = jax.vmap(lambda w, x, s: decode(w, x, s, bits))(words[::-1], models, scale[::-1])
    got = jnp.where(right[:, None], decoded, models[::-1])
    own = jnp.where(right[::-1, None], points.astype(jnp.float32) * scale[:, None], models)
    seen = jnp.max(jnp.abs(got - models), axis=1)
    distance = jnp.where(meets, jnp.maximum(FORGET * distance, seen), distance)
    return half * (got - own), distance, jnp.where(meets, jnp.sum(~right, dtype=jnp.int32), 0)


def _take(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def _put(tree, rows, values):
    # Rows that are written together are computed together, in a buffer of their own. One after the other, the second
    # would be computed from the first's old rows, and XLA would copy all models for them.
    return jax.tree.map(lambda x, v: x.at[rows].set(v, mode="drop", unique_indices=True), tree, values)
