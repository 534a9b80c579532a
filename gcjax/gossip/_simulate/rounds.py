"""Simulated nodes in lockstep: large-batch SGD, local SGD, D-PSGD, SGP. Every round waits for the slowest node."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gcjax._comm.simulated import Transfer, ring_bytes
from gcjax._types import Array, PyTree
from gcjax.gossip._graphs import Graph, adjacency, mixing_matrix
from gcjax.gossip._matchings import rounds
from gcjax.gossip._simulate.clocks import World, check_world, exchange_seconds, message_bits
from gcjax.gossip._simulate.nodes import Simulation, Trainer, distance_from_mean, running_sums


class RoundState(NamedTuple):
    """State of n nodes.

    Attributes:
      models: float32[n, P], or float32[P] with all-reduces, after which all nodes have the same model.
      opt_state: leaves with a leading axis n; without it for large-batch SGD, which has one optimiser.
      weight: float32[n], push-sum weights.
    """

    models: Array
    opt_state: PyTree
    weight: Array


def round_simulation(
    trainer: Trainer, world: World, nodes: int, steps: int, algorithm: str, graph: Graph, local_steps: int
) -> Simulation:
    """A simulation of `steps` gradient steps per node. The options are those of `simulate`; all-reduces ignore `graph`.

    Its plan is D-PSGD's mixing matrix, float32[n, n]; or SGP's receivers in each round, int32[k, n]; otherwise None.
    """
    message = message_bits(len(trainer.start), None)
    count = -(-steps // local_steps)
    slowest = check_world(world, nodes).max() * local_steps
    pair_seconds = exchange_seconds(world, message, 2)
    plan, unit = None, functools.partial(_local_sgd, trainer, local_steps)
    if algorithm == "d_psgd":
        unit = functools.partial(_d_psgd, trainer, local_steps, world.drop)
        plan, linked = jnp.asarray(mixing_matrix(graph, nodes), jnp.float32), adjacency(graph, nodes)
        seconds = np.full(count, linked.sum(1).max() * pair_seconds)
        sent = np.full(count, message * linked.sum() / nodes)
    elif algorithm == "sgp":
        unit = functools.partial(_sgp, trainer, local_steps, world.drop)
        turns = rounds(graph, nodes) if nodes > 1 else np.zeros((1, 1), np.int32)
        plan = jnp.asarray(turns)
        pushes = np.resize((turns != np.arange(nodes)).mean(1), count)
        seconds, sent = pair_seconds * (pushes > 0), (message + 32) * pushes  # the weight takes a word
    else:
        if algorithm == "allreduce":
            unit = functools.partial(_large_batch, trainer)
        tries = 1 / (1 - world.drop)
        seconds = np.full(count, tries * exchange_seconds(world, message, nodes))
        sent = np.full(count, tries * 8 * ring_bytes(Transfer("all_reduce", message // 8), nodes))
    return Simulation(
        state=_first_state(trainer, nodes, algorithm),
        plan=plan,
        unit=unit,
        summarise=_summarise,
        gradients=running_sums(np.full(count, float(local_steps))),
        seconds=running_sums(slowest + seconds),
        bits=running_sums(sent),
        node_steps=lambda state: np.full(nodes, count * local_steps),
    )


def _first_state(trainer: Trainer, nodes: int, algorithm: str) -> RoundState:
    one_model = algorithm in ("allreduce", "local_sgd")
    return RoundState(
        models=jnp.copy(trainer.start) if one_model else jnp.tile(trainer.start, (nodes, 1)),
        opt_state=trainer.opt_state() if algorithm == "allreduce" else trainer.opt_states(nodes),
        weight=jnp.ones(nodes, jnp.float32),
    )


def _summarise(state: RoundState) -> tuple[Array, Array, Array]:
    if state.models.ndim == 1:
        return state.models, jnp.float32(0), jnp.int32(0)
    mean = state.models.mean(0)  # push-sum keeps the sum of x, and the weights sum to n
    return mean, distance_from_mean(state.models / state.weight[:, None], mean), jnp.int32(0)


def _large_batch(trainer: Trainer, state: RoundState, data: PyTree, plan: None, r: Array) -> RoundState:
    """One optimiser steps along the mean gradient of all nodes' batches."""
    nodes = jnp.arange(len(state.weight), dtype=jnp.int32)
    batches = jax.vmap(lambda node: trainer.batch(data, node, r))(nodes)
    params = trainer.unravel(state.models)
    grad = jax.grad(lambda p: jnp.mean(jax.vmap(lambda batch: trainer.loss_fn(p, batch))(batches)))(params)
    updates, opt_state = trainer.tx.update(grad, state.opt_state, params)
    model = ravel_pytree(optax.apply_updates(params, updates))[0].astype(jnp.float32)
    return RoundState(model, opt_state, state.weight)


def _local_sgd(trainer: Trainer, local_steps: int, state: RoundState, data: PyTree, plan: None, r: Array) -> RoundState:
    """Local steps from the common model, then the mean of all models."""
    models, opt_state = trainer.local_steps_of_all(data, state.models, state.opt_state, r * local_steps, local_steps)
    return RoundState(models.mean(0), opt_state, state.weight)


def _d_psgd(
    trainer: Trainer, local_steps: int, drop: float, state: RoundState, data: PyTree, plan: Array, r: Array
) -> RoundState:
    """x_i becomes sum_j W[i, j] x_j plus its own update, from gradients before the exchange."""
    models, opt_state = trainer.local_steps_of_all(data, state.models, state.opt_state, r * local_steps, local_steps)
    if drop:  # An exchange fails both ways. Both nodes add its weight to their own, so that columns still sum to 1.
        draw = jnp.triu(jax.random.uniform(trainer.event_key(r), plan.shape) >= drop, 1)
        received = jnp.where(draw | draw.T, plan, 0)
        plan = received + jnp.diag(1 - received.sum(1))
    mixed = jnp.dot(plan, state.models, precision=lax.Precision.HIGHEST)
    return RoundState(mixed + (models - state.models), opt_state, state.weight)


def _sgp(
    trainer: Trainer, local_steps: int, drop: float, state: RoundState, data: PyTree, plan: Array, r: Array
) -> RoundState:
    """Updates from the gradients at x / w; then half of x and of w is pushed to the neighbour whose turn it is."""
    unbiased = state.models / state.weight[:, None]
    trained, opt_state = trainer.local_steps_of_all(data, unbiased, state.opt_state, r * local_steps, local_steps)
    to = plan[r % len(plan)]
    pushes = to != jnp.arange(len(to))
    if drop:  # the sender notices that its push has failed, and keeps the half
        pushes &= jax.random.uniform(trainer.event_key(r), to.shape) >= drop
    share = jnp.where(pushes, 0.5, 0.0)

    def push(x, share):
        return ((1 - share) * x).at[to].add(share * x)

    models = push(state.models + (trained - unbiased), share[:, None])
    return RoundState(models, opt_state, push(state.weight, share))
