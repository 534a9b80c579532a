"""State of transforms whose workers have models of their own, and the traffic that it counts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._core.per_worker import PerWorker, is_per_worker
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
    """State of a gossip transform, by which a training step sees that every worker has parameters of its own.

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


def is_gossip_state(node: object) -> bool:
    return isinstance(node, GossipState)


def gossip_states(opt_state: PyTree) -> list[GossipState]:
    """The states of gossip transforms within an optimiser's."""
    return [s for s in jax.tree.leaves(opt_state, is_leaf=is_gossip_state) if is_gossip_state(s)]


def without_gossip(opt_state: PyTree) -> PyTree:
    """The state with None in place of that of gossip transforms, and of the compressors inside them."""
    return jax.tree.map(lambda x: None if is_gossip_state(x) else x, opt_state, is_leaf=is_gossip_state)


class LocalLeaf(NamedTuple):
    """A leaf of the optimiser's state that `pack_leaves` made per worker, unlike nodes that were `PerWorker` before.

    Attributes:
      packed: PerWorker, the leaf.
    """

    packed: PerWorker


def pack_leaves(opt_state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """A chain's state with every leaf per worker: where the parameters differ, so do the momenta and all the rest."""

    def pack(node):
        return node if _stays(node) else LocalLeaf(PerWorker.pack(node, axes))

    return jax.tree.map(pack, opt_state, is_leaf=_stays)


def unpack_leaves(opt_state: PyTree) -> PyTree:
    """The inverse of `pack_leaves`."""

    def unpack(node):
        return node.packed.unpack() if isinstance(node, LocalLeaf) else node

    return jax.tree.map(unpack, opt_state, is_leaf=lambda node: isinstance(node, LocalLeaf))


def _stays(node: object) -> bool:
    return is_gossip_state(node) or is_per_worker(node)


def own_axes(params: PyTree) -> tuple[str, ...]:
    """The axes along which workers have parameters of their own; () where all have the same."""
    return params.axes if is_per_worker(params) else ()


def own_value(node: Any) -> Any:
    """What a worker sees of a node that may be `PerWorker`."""
    return node.unpack() if is_per_worker(node) else node
