"""State of the gossip transforms, and the traffic that it counts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._core.info import local_parts
from gcjax._core.per_worker import PerWorker
from gcjax._core.state import is_compress_state
from gcjax._types import Array, ArrayLike, PyTree


class Traffic(NamedTuple):
    """What one worker has sent.

    Attributes:
      exchanges: int32, exchanges in which it took part.
      failures: int32, exchanges repeated in full because decoding failed, the same on all workers.
      last: uint32, words of 32 bits sent in the last update.
      total: uint32[2], words sent so far, low half and high half.
    """

    exchanges: Array
    failures: Array
    last: Array
    total: Array

    @classmethod
    def zero(cls) -> "Traffic":
        """Before the first update."""
        return cls(jnp.int32(0), jnp.int32(0), jnp.uint32(0), jnp.zeros(2, jnp.uint32))

    def after(self, words: ArrayLike, took_part: ArrayLike, failed: ArrayLike) -> "Traffic":
        """After an exchange in which this worker sent `words` words."""
        words = jnp.asarray(words, jnp.uint32)
        low = self.total[0] + words
        high = self.total[1] + (low < words)
        return Traffic(
            self.exchanges + jnp.asarray(took_part, jnp.int32),
            self.failures + jnp.asarray(failed, jnp.int32),
            words,
            jnp.stack([low, high]),
        )


class GossipState(NamedTuple):
    """State of a gossip transform.

    Attributes:
      step: int32, updates so far, the same on all workers.
      traffic: PerWorker, a `Traffic`.
      method: the method's own state: the distances of `swarm_average` with bits, the weight of `sgp`, the outer state
        of `local_sgd`.
    """

    step: Array
    traffic: PerWorker
    method: Any

    def mixed(self, mixing: object) -> "GossipState":
        """Refused: every worker has a model of its own."""
        raise TypeError(
            "gcjax.resize takes no state of gcjax.gossip, in which every worker has a model of its own. Average the "
            "models (axis 0 of the parameters), and begin with new state"
        )


class GossipInfo(NamedTuple):
    """What the workers have sent so far. Arrays have one entry per worker whose state was given.

    Attributes:
      step: updates so far.
      exchanges: int64[workers], exchanges in which each worker took part, without those in which it sat out.
      failures: exchanges repeated in full precision because some worker could not decode. The first exchange, before
        any distance is known, does not count.
      bits_last: float64[workers], bits sent in the last update, with padding and agreements. A ring all-reduce counts
        as what it makes one worker send.
      bits: float64[workers], bits sent so far, counted likewise.
      weights: float64[workers], push-sum weights, which sum to the number of workers; ones with other methods.
    """

    step: int
    exchanges: np.ndarray
    failures: int
    bits_last: np.ndarray
    bits: np.ndarray
    weights: np.ndarray


def info(opt_state: PyTree) -> GossipInfo:
    """Read from an optimiser's state what its gossip transform has sent. Call it between steps, not inside `jax.jit`.

    Raises:
      ValueError: the state does not hold exactly one gossip transform.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.gossip.swarm_average(key=jax.random.key(0))
    >>> params = jnp.ones(3)
    >>> print(gcjax.gossip.info(tx.update(params, tx.init(params), params)[1]).step)
    1
    """
    state = find_gossip_state(opt_state)
    traffic = jax.tree.map(_local_values, state.traffic.value)
    low, high = traffic.total.reshape(-1, 2).T.astype(np.float64)
    weights = np.ones(len(traffic.last))
    if isinstance(state.method, PerWorker):
        weights = _local_values(state.method.value).astype(np.float64)
    return GossipInfo(
        step=int(_local_values(state.step)[0]),
        exchanges=traffic.exchanges.astype(np.int64),
        failures=int(traffic.failures[0]),
        bits_last=32.0 * traffic.last,
        bits=32 * (high * 2.0**32 + low),
        weights=weights,
    )


def _local_values(x: Array) -> np.ndarray:
    """The workers' values that this process holds, one after the other."""
    return np.concatenate([np.ravel(part) for part in local_parts(x)])


def find_gossip_state(opt_state: PyTree) -> GossipState:
    """The state of a chain's gossip transform. Raises ValueError unless there is exactly one."""
    states = _gossip_states(opt_state)
    if len(states) != 1:
        raise ValueError(
            f"the chain has {len(states)} gossip transforms; end it with one, such as gcjax.gossip.swarm_average"
        )
    return states[0]


def check_chain(opt_state: PyTree) -> None:
    """Raise ValueError if other transforms of a chain spoil what its only gossip transform does."""
    axes = find_gossip_state(opt_state).traffic.axes
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: _is_gossip(node) or is_compress_state(node)):
        if is_compress_state(node) and set(node.report.axes) >= set(axes):
            raise ValueError(
                f"a compressor over {node.report.axes} stands beside the gossip transform: it averages the gradients "
                "of all workers in every step, which leaves gossip nothing to do. Leave it out; to compress what is "
                "exchanged, use gcjax.gossip.local_sgd(compressor=...) or swarm_average(bits=...)"
            )
    _check_place(opt_state)


def _check_place(opt_state: PyTree) -> None:
    """Raise ValueError if a transform follows the gossip transform, or may keep a worker from an exchange."""
    if _is_gossip(opt_state) or not isinstance(opt_state, tuple):
        return
    for kind, name in ((optax.ApplyIfFiniteState, "apply_if_finite"), (optax.MultiStepsState, "MultiSteps")):
        if isinstance(opt_state, kind) and _gossip_states(opt_state):
            raise ValueError(
                f"optax.{name} stands around the gossip transform: a worker that skips an update would miss an "
                f"exchange, and the others would wait for it. Put optax.{name} around the optimiser alone"
            )
    if type(opt_state) is tuple and _gossip_states(opt_state[:-1]):  # the state of optax.chain
        raise ValueError(
            "another transform follows the gossip transform in the chain, and would change the step to the averaged "
            "models. Put the gossip transform last"
        )
    for node in opt_state:
        _check_place(node)


class LocalLeaf(NamedTuple):
    """A leaf of the optimiser's state that `pack_leaves` made per worker, unlike nodes that were `PerWorker` before.

    Attributes:
      packed: PerWorker, the leaf.
    """

    packed: PerWorker


def pack_leaves(opt_state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """A chain's state with every leaf per worker: where the parameters differ, so do the momenta and all the rest."""

    def pack(node):
        return node if _is_gossip(node) or isinstance(node, PerWorker) else LocalLeaf(PerWorker.pack(node, axes))

    return jax.tree.map(pack, opt_state, is_leaf=lambda node: _is_gossip(node) or isinstance(node, PerWorker))


def unpack_leaves(opt_state: PyTree) -> PyTree:
    """The inverse of `pack_leaves`."""

    def unpack(node):
        return node.packed.unpack() if isinstance(node, LocalLeaf) else node

    return jax.tree.map(unpack, opt_state, is_leaf=lambda node: isinstance(node, LocalLeaf))


def _is_gossip(node: Any) -> bool:
    return isinstance(node, GossipState)


def _gossip_states(opt_state: PyTree) -> list[GossipState]:
    return [s for s in jax.tree.leaves(opt_state, is_leaf=_is_gossip) if _is_gossip(s)]
