"""Simulated nodes that go in step: large-batch SGD, local SGD, D-PSGD, SGP. Every round waits for the slowest."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from gcjax._comm.simulated import Transfer, ring_bytes
from gcjax._types import Array, PyTree
from gcjax.gossip._graphs import adjacency, mixing_matrix
from gcjax.gossip._matchings import rounds
from gcjax.gossip._simulate.clocks import World, check_world, exchange_seconds, message_bits
from gcjax.gossip._simulate.nodes import Run, Trainer, distance_from_mean, so_far


class RoundState(NamedTuple):
    """State of n nodes.

    models: float32[n, P]; of all-reduces, after which all have the same, float32[P].
    opt_state: leaves with a leading axis n; of large-batch SGD, which has one optimiser, without.
    weight: float32[n], push-sum weights.
    """

    models: Array
    opt_state: PyTree
    weight: Array


def in_rounds(
    trainer: Trainer, world: World, nodes: int, steps: int, algorithm: str, graph: Any, local_steps: int
) -> Run:
    """A simulation of `steps` gradient steps per node; graph: a `Graph`, None for all-reduces."""
    message = message_bits(len(trainer.start), None)
    count = -(-steps // local_steps)
    slowest = check_world(world, nodes).max() * local_steps
    plan: Any = None
    one = exchange_seconds(world, message, 2)
    if algorithm == "d_psgd":
        plan, linked = jnp.asarray(mixing_matrix(graph, nodes), jnp.float32), adjacency(graph, nodes)
        seconds = np.full(count, linked.sum(1).max() * one)
        sent = np.full(count, message * linked.sum() / nodes)
    elif algorithm == "sgp":
        turns = rounds(graph, nodes) if nodes > 1 else np.zeros((1, 1), np.int32)
        plan = jnp.asarray(turns)
        pushes = np.resize((turns != np.arange(nodes)).mean(1), count)
        seconds, sent = one * (pushes > 0), (message + 32) * pushes  # with the weight, a word
    else:
        again = 1 / (1 - world.drop)
        seconds = np.full(count, again * exchange_seconds(world, message, nodes))
        sent = np.full(count, again * 8 * ring_bytes(Transfer("all_reduce", message // 8), nodes))

    def look(state):
        if state.models.ndim == 1:
            return state.models, jnp.float32(0), jnp.int32(0)
        mean = state.models.mean(0)  # push-sum keeps the sum of x, and the weights sum to n
        return mean, distance_from_mean(state.models / state.weight[:, None], mean), jnp.int32(0)

    return Run(
        state=round_state(trainer, nodes, algorithm),
        plan=plan,
        advance=functools.partial(run_rounds, trainer, algorithm, local_steps, world.drop),
        look=look,
        gradients=so_far(np.full(count, float(local_steps))),
        seconds=so_far(slowest + seconds),
        bits=so_far(sent),
        steps=lambda state: np.full(nodes, count * local_steps),
    )


def round_state(trainer: Trainer, nodes: int, algorithm: str) -> RoundState:
    same = algorithm in ("allreduce", "local_sgd")
    one = algorithm == "allreduce"
    return RoundState(
        models=jnp.copy(trainer.start) if same else jnp.tile(trainer.start, (nodes, 1)),
        opt_state=jax.tree.map(jnp.copy, trainer.tx.init(trainer.unravel(trainer.start)))
        if one
        else trainer.opt_states(nodes),
        weight=jnp.ones(nodes, jnp.float32),
    )


def run_rounds(trainer: Trainer, algorithm: str, local_steps: int, drop: float, state, data, plan, begin, end):
    """Rounds begin to end - 1. plan: D-PSGD's mixing matrix, float32[n, n]; SGP's receivers in turn, int32[k, n]."""
    run = {"allreduce": _large_batch, "local_sgd": _local_sgd, "d_psgd": _d_psgd, "sgp": _sgp}[algorithm]
    return lax.fori_loop(begin, end, lambda r, state: run(trainer, state, data, plan, r, local_steps, drop), state)


def _large_batch(trainer: Trainer, state, data, plan, r, local_steps, drop):
    """The mean gradient of all nodes' batches at one model, one optimiser."""
    del plan, local_steps, drop
    nodes = jnp.arange(len(state.weight), dtype=jnp.int32)
    batches = jax.vmap(lambda node: trainer.batch(data, node, r))(nodes)
    params = trainer.unravel(state.models)
    grad = jax.grad(lambda p: jnp.mean(jax.vmap(lambda batch: trainer.loss_fn(p, batch))(batches)))(params)
    updates, opt_state = trainer.tx.update(grad, state.opt_state, params)
    return RoundState(ravel_pytree(optax.apply_updates(params, updates))[0], opt_state, state.weight)


def _local_sgd(trainer: Trainer, state, data, plan, r, local_steps, drop):
    """Local steps from the common model, then the mean of all."""
    del plan, drop
    models, opt_state = trainer.on_all(data, state.models, state.opt_state, r * local_steps, local_steps)
    return RoundState(models.mean(0), opt_state, state.weight)


def _d_psgd(trainer: Trainer, state, data, plan, r, local_steps, drop):
    """x_i becomes sum_j W[i, j] x_j plus its own update, of gradients taken before."""
    models, opt_state = trainer.on_all(data, state.models, state.opt_state, r * local_steps, local_steps)
    if drop:  # an exchange fails both ways; its weights go to the two nodes themselves, so that columns still sum to 1
        draw = jnp.triu(jax.random.uniform(_round_key(trainer, r), plan.shape) >= drop, 1)
        apart = jnp.where(draw | draw.T, plan, 0)
        plan = apart + jnp.diag(1 - apart.sum(1))
    mixed = jnp.dot(plan, state.models, precision=lax.Precision.HIGHEST)
    return RoundState(mixed + (models - state.models), opt_state, state.weight)


def _sgp(trainer: Trainer, state, data, plan, r, local_steps, drop):
    """Updates from the gradients at x / w; then half of x and of w is pushed to the node whose turn it is."""
    unbiased = state.models / state.weight[:, None]
    trained, opt_state = trainer.on_all(data, unbiased, state.opt_state, r * local_steps, local_steps)
    to = plan[r % len(plan)]
    pushes = to != jnp.arange(len(to))
    if drop:  # a sender learns that its push has failed, and keeps what it is
        pushes &= jax.random.uniform(_round_key(trainer, r), to.shape) >= drop
    share = jnp.where(pushes, 0.5, 0.0)

    def push(x, share):
        return ((1 - share) * x).at[to].add(share * x)

    models = push(state.models + (trained - unbiased), share[:, None])
    return RoundState(models, opt_state, push(state.weight, share))


def _round_key(trainer: Trainer, r):
    return jax.random.fold_in(jax.random.fold_in(trainer.key, 1 << 30), r)
