"""State of the gossip transforms, and what it says about the traffic."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._core.info import _parts
from gcjax._core.per_worker import PerWorker
from gcjax._types import Array, PyTree


class Traffic(NamedTuple):
    """What one worker has sent. exchanges: int32, in which it took part.  failures: int32, exchanges that the quantiser
    gave up, the same on all workers.  last: uint32, words of 32 bits in the last update.  total: uint32[2], words so
    far, low half and high half."""

    exchanges: Array
    failures: Array
    last: Array
    total: Array


class GossipState(NamedTuple):
    """State of a gossip transform.

    step: int32, updates so far, the same on all workers.  traffic: PerWorker, `Traffic`.
    method: what the method keeps: `swarm_average` with bits the scales, `sgp` its weight, `local_sgd` the outer state.
    """

    step: Array
    traffic: PerWorker
    method: Any


class Info(NamedTuple):
    """What the workers have sent so far. Arrays have one entry per worker whose state was given.

    step: updates so far.
    exchanges: in which each worker took part, int64[workers]; one that sat out did not.
    failures: exchanges that were repeated in full precision because somebody could not decode, the first one, before
      any distance was known, not counted.
    bits_last, bits: sent by each worker in the last update and so far, padding and agreements included,
      float64[workers]. A ring all-reduce is counted as what it makes one worker send.
    weights: of push-sum, float64[workers]; ones with the other methods. Their sum is the number of workers.
    """

    step: int
    exchanges: np.ndarray
    failures: int
    bits_last: np.ndarray
    bits: np.ndarray
    weights: np.ndarray


def info(opt_state) -> Info:
    """Read from an optimiser's state what its gossip transform has sent. Call it between steps, not inside `jax.jit`.

    Raises ValueError when there is not exactly one gossip transform in it.
    """
    state = the_gossip_state(opt_state)
    traffic = jax.tree.map(_flat, state.traffic.value)
    low, high = traffic.total.reshape(-1, 2).T.astype(np.float64)
    weights = np.ones(len(traffic.last))
    if isinstance(state.method, PerWorker):
        weights = _flat(state.method.value).astype(np.float64)
    return Info(
        step=int(_flat(state.step)[0]),
        exchanges=traffic.exchanges.astype(np.int64),
        failures=int(traffic.failures[0]),
        bits_last=32.0 * traffic.last,
        bits=32 * (high * 2.0**32 + low),
        weights=weights,
    )


def _flat(x) -> np.ndarray:
    """What this process holds of the workers' values, one after the other."""
    return np.concatenate([np.ravel(part) for part in _parts(x)])


def the_gossip_state(opt_state) -> GossipState:
    """The state of a chain's gossip transform. Raises ValueError when there is not exactly one."""
    states = [s for s in jax.tree.leaves(opt_state, is_leaf=_is_gossip) if _is_gossip(s)]
    if len(states) != 1:
        raise ValueError(f"the chain has {len(states)} gossip transforms such as swarm_average; it must end with one")
    return states[0]


def no_traffic(axes: tuple[str, ...]) -> PerWorker:
    """Of a worker that has sent nothing yet."""
    none = jnp.int32(0)
    return PerWorker.pack(Traffic(none, none, jnp.uint32(0), jnp.zeros(2, jnp.uint32)), axes)


def count(traffic: Traffic, words, took_part, failed) -> Traffic:
    """After an exchange in which this worker sent so many words."""
    words = jnp.asarray(words, jnp.uint32)
    low = traffic.total[0] + words
    high = traffic.total[1] + (low < words)
    return Traffic(
        traffic.exchanges + jnp.asarray(took_part, jnp.int32),
        traffic.failures + jnp.asarray(failed, jnp.int32),
        words,
        jnp.stack([low, high]),
    )


class Held(NamedTuple):
    """A leaf of the state of which every worker has its own, told from nodes that were `PerWorker` before."""

    own: PerWorker


def hold(opt_state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """A chain's state with everything per worker: where parameters differ, momenta and all else do."""

    def as_it_is(node) -> bool:
        return _is_gossip(node) or isinstance(node, PerWorker)

    def own(node):
        return node if as_it_is(node) else Held(PerWorker.pack(node, axes))

    return jax.tree.map(own, opt_state, is_leaf=as_it_is)


def release(opt_state: PyTree) -> PyTree:
    """The inverse of `hold`."""

    def is_held(node) -> bool:
        return isinstance(node, Held)

    return jax.tree.map(lambda node: node.own.unpack() if is_held(node) else node, opt_state, is_leaf=is_held)


def _is_gossip(node) -> bool:
    return isinstance(node, GossipState)
