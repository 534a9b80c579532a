"""What simulated nodes do in one unit: a round of all (all-reduce, local SGD, D-PSGD, SGP), or a meeting of two."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gcjax._kernels.buckets import vector_bucket
from gcjax._kernels.floats import TINY
from gcjax._types import Array, ArrayLike, PyTree
from gcjax.gossip._lattice import FINEST, decode, encode_points, lattice_points, margin, scale_for
from gcjax.gossip._simulate.nodes import Trainer

SLACK = 2.0  # the lattice's margin over the largest recent distance
DECAY = 0.9  # of that distance, per message of the node


class State(NamedTuple):
    """State of n nodes.

    Attributes:
      models: float32[n, P]; float32[P] with all-reduces, after which all nodes have the same model; float32[2n, P] with
        non-blocking meetings, the live models, then the communication copies.
      opt_state: leaves with a leading axis n; without it for large-batch SGD, which has one optimiser.
      done: int32[n], gradient steps made.
      weight: float32[n], SGP's push-sum weights; None without SGP.
      distance: float32[n], with bits, the largest entry of a difference that each node saw recently.
      resent: int32, messages sent again in full.
    """

    models: Array
    opt_state: PyTree
    done: Array
    weight: PyTree
    distance: Array
    resent: Array


Unit = Callable[[State, PyTree, PyTree, Array], State]  # unit(state, data, plan, number) -> the state after that unit


def algorithm_of(trainer: Trainer, nodes: int, name: str, blocking: bool) -> tuple[State, Unit]:
    """The state before the first unit, and the unit. The names are those of `simulate`."""
    units: dict[str, tuple[Callable[..., State], tuple[int, ...], tuple[int, ...]]] = {
        "swarm": (_meet_blocking, (nodes,), (nodes,)) if blocking else (_meet_non_blocking, (2 * nodes,), (nodes,)),
        "d_psgd": (_d_psgd, (nodes,), (nodes,)),
        "sgp": (_sgp, (nodes,), (nodes,)),
        "local_sgd": (_local_sgd, (), (nodes,)),
        "allreduce": (_large_batch, (), ()),
    }
    unit, models, optimisers = units[name]
    first = trainer.tx.init(trainer.unravel(trainer.start))
    state = State(
        models=jnp.broadcast_to(trainer.start, (*models, len(trainer.start))),
        opt_state=jax.tree.map(lambda x: jnp.broadcast_to(x, (*optimisers, *jnp.shape(x))), first),
        done=jnp.zeros(nodes, jnp.int32),
        weight=jnp.ones(nodes, jnp.float32) if name == "sgp" else None,
        distance=jnp.zeros(nodes, jnp.float32),
        resent=jnp.int32(0),
    )
    return jax.tree.map(jnp.copy, state), functools.partial(unit, trainer)  # copied, because the buffers are donated


def summary(state: State) -> tuple[Array, Array]:
    """The flat mean model, and sqrt(mean_i |x_i - mean|**2); of the copies if there are some."""
    models = jnp.atleast_2d(state.models)[-len(state.done) :]
    mean = models.mean(0)  # push-sum keeps the sum of x, and the weights sum to n
    if state.weight is not None:
        models = models / state.weight[:, None]
    return mean, jnp.sqrt(jnp.mean(jnp.sum((models - mean) ** 2, axis=1)))


def _train_all(trainer: Trainer, state: State, data: PyTree, models: Array) -> tuple[Array, State]:
    """All nodes' models after their local steps from `models`, (n, P) or (P,), and the state but for the models."""
    nodes = jnp.arange(len(state.done), dtype=jnp.int32)
    run = jax.vmap(trainer.train, in_axes=(None, None if models.ndim == 1 else 0, 0, 0, 0))
    trained, opt_state = run(data, models, state.opt_state, nodes, state.done)
    return trained, state._replace(opt_state=opt_state, done=state.done + trainer.local_steps)


def _large_batch(trainer: Trainer, state: State, data: PyTree, plan: None, r: Array) -> State:
    """One optimiser steps along the mean gradient of all nodes' batches."""
    nodes = jnp.arange(len(state.done), dtype=jnp.int32)
    batches = jax.vmap(trainer.batch, (None, 0, 0))(data, nodes, state.done)
    params = trainer.unravel(state.models)
    grad = jax.grad(lambda p: jnp.mean(jax.vmap(lambda batch: trainer.loss_fn(p, batch))(batches)))(params)
    updates, opt_state = trainer.tx.update(grad, state.opt_state, params)
    model = ravel_pytree(optax.apply_updates(params, updates))[0].astype(jnp.float32)
    return state._replace(models=model, opt_state=opt_state, done=state.done + 1)


def _local_sgd(trainer: Trainer, state: State, data: PyTree, plan: None, r: Array) -> State:
    """Local steps from the common model, then the mean of all models."""
    models, state = _train_all(trainer, state, data, state.models)
    return state._replace(models=models.mean(0))


def _d_psgd(trainer: Trainer, state: State, data: PyTree, plan: Array, r: Array) -> State:
    """x_i becomes sum_j W[i, j] x_j plus its own update, from gradients before the exchange."""
    models, state = _train_all(trainer, state, data, state.models)
    mixed = jnp.dot(plan, state.models, precision=lax.Precision.HIGHEST)
    return state._replace(models=mixed + (models - state.models))


def _sgp(trainer: Trainer, state: State, data: PyTree, plan: Array, r: Array) -> State:
    """Updates from the gradients at x / w; then half of x and of w is pushed to the neighbour whose turn it is."""
    unbiased = state.models / state.weight[:, None]
    trained, state = _train_all(trainer, state, data, unbiased)
    to = plan[r % len(plan)]
    share = jnp.where(to != jnp.arange(len(to)), 0.5, 0.0)

    def push(x, share):
        return ((1 - share) * x).at[to].add(share * x)

    models = push(state.models + (trained - unbiased), share[:, None])
    return state._replace(models=models, weight=push(state.weight, share))


def _meet_blocking(trainer: Trainer, state: State, data: PyTree, plan: Array, e: Array) -> State:
    """Both nodes finish their local steps, then both become the mean of the two."""
    pair = plan[:, e]
    before = state.models[pair]
    models, opt_state = jax.vmap(trainer.train, in_axes=(None, 0, 0, 0, 0))(
        data, before, _take(state.opt_state, pair), pair, state.done[pair]
    )
    moved = jnp.max(jnp.abs(models - before), axis=1)
    change, distance, resent = _exchange(trainer, models, state.distance[pair], moved, e)
    return state._replace(
        models=_put(state.models, pair, models + change),
        opt_state=_put(state.opt_state, pair, opt_state),
        done=state.done.at[pair].add(trainer.local_steps),
        distance=_put(state.distance, pair, distance),
        resent=state.resent + resent,
    )


def _meet_non_blocking(trainer: Trainer, state: State, data: PyTree, plan: Array, e: Array) -> State:
    """Node i has finished its local steps, and partner j goes on with its own.

    With live models X, communication copies Y and G the sum of i's local updates since its last event,

        Y_i, X_i = (Y_i + Y_j) / 2 + G        Y_j = (Y_i + Y_j) / 2

    so that j meets the average when it next finishes its own local steps, which it began from X_j.
    """
    nodes, pair = len(state.done), plan[:, e]
    i, j = pair
    live, *both_copies = state.models[jnp.stack([i, nodes + i, nodes + j])]
    trained, opt_state = trainer.train(data, live, _take(state.opt_state, i), i, state.done[i])
    update, copies = trained - live, jnp.stack(both_copies)
    moved = jnp.max(jnp.abs(update))
    change, distance, resent = _exchange(trainer, copies, state.distance[pair], moved, e)
    new = copies + change + jnp.stack([update, jnp.zeros_like(update)])
    return state._replace(
        models=_put(_put(state.models, nodes + pair, new), i, new[0]),
        opt_state=_put(state.opt_state, i, opt_state),
        done=state.done.at[i].add(trainer.local_steps),
        distance=_put(state.distance, pair, distance),
        resent=state.resent + resent,
    )


def _exchange(
    trainer: Trainer, models: Array, distance: Array, moved: Array, e: Array
) -> tuple[Array, Array, ArrayLike]:
    """Move two models, float32[2, P], towards each other by opposite changes, so that their mean stays.

    `moved`, float32 or float32[2], is the largest entry of the senders' updates since their last meeting: a first guess
    and a lower bound for the distance. Returns the changes, the new distances, and how many messages were sent again in
    full.
    """
    bits = trainer.bits
    if bits is None:
        return (models[::-1] - models) / 2, distance, 0
    finest = margin(FINEST, bits) * jnp.max(jnp.abs(models), axis=1)
    likely = SLACK * jnp.maximum(jnp.maximum(distance, moved), TINY)
    scale = scale_for(jnp.maximum(likely, finest), bits)
    key = jax.random.fold_in(jax.random.fold_in(trainer.key, 1 << 30), e)  # apart from the keys of batches
    bucket = vector_bucket(models.shape[1])
    arrays = jax.vmap(lambda x: bucket.join([x]))(models)
    points, in_range = jax.vmap(lambda x, s: lattice_points(x, s, key))(arrays, scale)
    words = jax.vmap(lambda z, ok: encode_points(z, ok, bits, bucket.words))(points, in_range)
    decoded, right = jax.vmap(lambda w, x, s: decode(w, x, s, bits))(words[::-1], arrays, scale[::-1])
    (decoded,), (points,) = jax.vmap(bucket.split)(decoded), jax.vmap(bucket.split)(points)
    received = jnp.where(right[:, None], decoded, models[::-1])
    sent = jnp.where(right[::-1, None], points.astype(jnp.float32) * scale[:, None], models)
    seen = jnp.max(jnp.abs(received - models), axis=1)
    return (received - sent) / 2, jnp.maximum(DECAY * distance, seen), jnp.sum(~right, dtype=jnp.int32)


def _take(tree: PyTree, rows: Array) -> PyTree:
    return jax.tree.map(lambda x: x[rows], tree)


def _put(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    # Rows that are written together are computed together, in their own buffer. If they were written one after the
    # other, the second would be computed from the first's old rows, and XLA would copy all models for them.
    return jax.tree.map(lambda x, v: x.at[rows].set(v, unique_indices=True), tree, values)
