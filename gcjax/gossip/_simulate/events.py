"""Simulated nodes that meet in pairs: SwarmSGD, blocking and non-blocking, and AD-PSGD."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._kernels.buckets import vector_bucket
from gcjax._kernels.floats import TINY
from gcjax._types import Array, ArrayLike, PyTree
from gcjax.gossip._lattice import FINEST, decode, encode_points, lattice_points, margin, scale_for
from gcjax.gossip._simulate.clocks import Events, message_bits
from gcjax.gossip._simulate.nodes import Simulation, Trainer, distance_from_mean, running_sums

SLACK = 2.0  # the lattice's margin over the largest recent distance
DECAY = 0.9  # of that distance, per message of the node


class PairState(NamedTuple):
    """State of n nodes. A step of the loop reads and writes a few of its rows in place.

    Attributes:
      models: float32[2n, P], the nodes' live models, then their communication copies; float32[n, P], the live models
        only, if blocking.
      opt_state: leaves with a leading axis n.
      done: int32[n], gradient steps made.
      distance: float32[n], the largest entry of a difference that each node saw recently.
      resent: int32, messages sent again in full.
      in_flight: float32[slots, P], what the latest messages add to their receivers' copies; message m is in m % slots.
    """

    models: Array
    opt_state: PyTree
    done: Array
    distance: Array
    resent: Array
    in_flight: Array


class Schedule(NamedTuple):
    """`Events` on the device.

    Attributes:
      node, partner, steps, meets: as in `Events`.
      arrived: int32[e], messages that have arrived before each event ends.
    """

    node: Array
    partner: Array
    steps: Array
    meets: Array
    arrived: Array


def event_simulation(
    trainer: Trainer, events: Events, nodes: int, *, delay: float, blocking: bool, bits: int | None
) -> Simulation:
    """A simulation of given events. `delay` is ignored if blocking: the times of `events` have it already."""
    plan, slots = _schedule(events, 0.0 if blocking else delay)
    message = message_bits(len(trainer.start), bits)

    def summarise(state):
        visible = state.models[-nodes:]
        mean = visible.mean(0)
        return mean, distance_from_mean(visible, mean), state.resent

    return Simulation(
        state=PairState(
            models=jnp.tile(trainer.start, (nodes if blocking else 2 * nodes, 1)),
            opt_state=trainer.opt_states(nodes),
            done=jnp.zeros(nodes, jnp.int32),
            distance=jnp.zeros(nodes, jnp.float32),
            resent=jnp.int32(0),
            in_flight=jnp.zeros((slots, len(trainer.start)), jnp.float32),
        ),
        plan=plan,
        unit=functools.partial(_meet_blocking if blocking else _meet_non_blocking, trainer, bits),
        summarise=summarise,
        gradients=running_sums(events.steps.sum(1)) / nodes,
        seconds=np.concatenate([[0.0], events.seconds]),
        bits=running_sums(2 * message * (events.node != events.partner)) / nodes,
        node_steps=lambda state: state.done,
    )


def _schedule(events: Events, delay: float) -> tuple[Schedule, int]:
    """The schedule, and the slots that messages in flight need: none without delay."""
    e = np.arange(len(events.node))
    arrived = np.searchsorted(events.seconds + delay, events.seconds, side="right") if delay else e
    slots = int((e + 1 - arrived).max()) if delay else 0
    arrays = (events.node, events.partner, events.steps, events.meets, arrived.astype(np.int32))
    return Schedule(*map(jnp.asarray, arrays)), slots


def _meet_blocking(
    trainer: Trainer, bits: int | None, state: PairState, data: PyTree, plan: Schedule, e: Array
) -> PairState:
    """Both nodes finish their local steps, then both become the mean of the two."""
    nodes = len(state.done)
    i, j = plan.node[e], plan.partner[e]
    rows = jnp.stack([i, jnp.where(i == j, nodes, j)])  # out of bounds: not written
    before, opt_state, done = state.models[rows], _take(state.opt_state, rows), state.done[rows]
    models, opt_state = jax.vmap(trainer.local_steps, in_axes=(None, 0, 0, 0, 0, 0))(
        data, before, opt_state, rows, done, plan.steps[e]
    )
    moved = jnp.max(jnp.abs(models - before), axis=1)
    change, distance, resent = _exchange(trainer, bits, models, state.distance[rows], moved, e, plan.meets[e])
    return PairState(
        _put(state.models, rows, models + change),
        _put(state.opt_state, rows, opt_state),
        _put(state.done, rows, done + plan.steps[e]),
        _put(state.distance, rows, distance),
        state.resent + resent,
        state.in_flight,
    )


def _meet_non_blocking(
    trainer: Trainer, bits: int | None, state: PairState, data: PyTree, plan: Schedule, e: Array
) -> PairState:
    """Node i has finished its local steps, and partner j goes on with its own.

    With live models X, communication copies Y and G the sum of i's local updates since its last event,

        Y_i, X_i = (Y_i + Y_j) / 2 + G        Y_j = (Y_i + Y_j) / 2

    so that j meets the average when it next finishes its own local steps, which it began from X_j.
    """
    nodes, slots = len(state.done), len(state.in_flight)
    i, j = plan.node[e], plan.partner[e]
    models = _deliver(state, plan, e) if slots else state.models
    written = jnp.stack([nodes + i, jnp.where((i == j) | bool(slots), 2 * nodes, nodes + j)])
    live, *both_copies = models[jnp.stack([i, nodes + i, nodes + j])]
    trained, opt_state = trainer.local_steps(data, live, _take(state.opt_state, i), i, state.done[i], plan.steps[e, 0])
    update, copies, both = trained - live, jnp.stack(both_copies), jnp.stack([i, j])
    moved = jnp.max(jnp.abs(update))
    change, distance, resent = _exchange(trainer, bits, copies, state.distance[both], moved, e, plan.meets[e])
    new = copies + change + jnp.stack([update, jnp.zeros_like(update)])
    return PairState(
        _put(_put(models, written, new), i, new[0]),
        _put(state.opt_state, i, opt_state),
        state.done.at[i].add(plan.steps[e, 0]),
        _put(state.distance, jnp.stack([i, jnp.where(i == j, nodes, j)]), distance),
        state.resent + resent,
        state.in_flight.at[e % slots].set(change[1]) if slots else state.in_flight,
    )


def _deliver(state: PairState, plan: Schedule, e: Array) -> Array:
    """The models after adding to the copies all messages that arrive between the previous event and this one."""
    nodes, slots = len(state.done), len(state.in_flight)
    first = jnp.where(e > 0, plan.arrived[e - 1], 0)

    def put(m, models):
        return models.at[nodes + plan.partner[m]].add(state.in_flight[m % slots])

    return lax.fori_loop(first, plan.arrived[e], put, state.models)


def _exchange(
    trainer: Trainer, bits: int | None, models: Array, distance: Array, moved: Array, e: Array, meets: Array
) -> tuple[Array, Array, ArrayLike]:
    """Move two models, float32[2, P], towards each other by opposite changes, so that their mean stays.

    `moved`, float32 or float32[2], is the largest entry of the senders' updates since their last meeting: a first guess
    and a lower bound for the distance. Returns the changes, the new distances, and how many messages were sent again in
    full.
    """
    half = jnp.where(meets, 0.5, 0.0)
    if bits is None:
        return half * (models[::-1] - models), distance, 0
    finest = margin(FINEST, bits) * jnp.max(jnp.abs(models), axis=1)
    likely = SLACK * jnp.maximum(jnp.maximum(distance, moved), TINY)
    scale = scale_for(jnp.maximum(likely, finest), bits)
    key, bucket = trainer.event_key(e), vector_bucket(models.shape[1])
    arrays = jax.vmap(lambda x: bucket.join([x]))(models)
    points, in_range = jax.vmap(lambda x, s: lattice_points(x, s, key))(arrays, scale)
    words = jax.vmap(lambda z, ok: encode_points(z, ok, bits, bucket.words))(points, in_range)
    decoded, right = jax.vmap(lambda w, x, s: decode(w, x, s, bits))(words[::-1], arrays, scale[::-1])
    (decoded,), (points,) = jax.vmap(bucket.split)(decoded), jax.vmap(bucket.split)(points)
    received = jnp.where(right[:, None], decoded, models[::-1])
    sent = jnp.where(right[::-1, None], points.astype(jnp.float32) * scale[:, None], models)
    seen = jnp.max(jnp.abs(received - models), axis=1)
    distance = jnp.where(meets, jnp.maximum(DECAY * distance, seen), distance)
    return half * (received - sent), distance, jnp.where(meets, jnp.sum(~right, dtype=jnp.int32), 0)


def _take(tree: PyTree, rows: Array) -> PyTree:
    return jax.tree.map(lambda x: x[rows], tree)


def _put(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    # Rows that are written together are computed together, in their own buffer. If they were written one after the
    # other, the second would be computed from the first's old rows, and XLA would copy all models for them.
    return jax.tree.map(lambda x, v: x.at[rows].set(v, mode="drop", unique_indices=True), tree, values)
