"""State of which every worker has a part: what it keeps for the entries that it owns."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gcjax._kernels.buckets import Bucket
from gcjax._types import Array, PyTree

Shape = tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """One worker's part of an array that the workers share out. Its shape depends on how many there are.

    Attributes:
      value: float32, or None for a single worker, which owes itself nothing.
      bucket: whose entries are owned. Static.
      shape_for: shape_for(bucket, workers) -> the shape for several workers; None where nothing is shared out. A
        function of a module, so that states of equal transforms have equal structures. Static.
      workers: number of workers that the array is for. Static.
    """

    value: Array | None
    bucket: Bucket = dataclasses.field(metadata={"static": True})
    shape_for: Callable[[Bucket, int], Shape] | None = dataclasses.field(metadata={"static": True})
    workers: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls, bucket: Bucket, shape_for: Callable[[Bucket, int], Shape] | None = None, workers: int = 1
    ) -> "Owned":
        """Zeros, as before the first step."""
        if shape_for is None or workers == 1:
            return cls(None, bucket, shape_for, 1)
        return cls(jnp.zeros(shape_for(bucket, workers), jnp.float32), bucket, shape_for, workers)

    def with_value(self, value: Array) -> "Owned":
        return dataclasses.replace(self, value=value)


def _is_owned(node: object) -> bool:
    return isinstance(node, Owned)


def shared_among(tree: PyTree, workers: int) -> PyTree:
    """A state before its first step, with its `Owned` nodes for so many workers."""

    def share(node):
        return Owned.create(node.bucket, node.shape_for, workers) if _is_owned(node) else node

    return jax.tree.map(share, tree, is_leaf=_is_owned)


def check_workers(tree: PyTree, workers: int) -> None:
    """Raise ValueError if an `Owned` node of a state is for another number of workers."""
    for node in jax.tree.leaves(tree, is_leaf=_is_owned):
        if _is_owned(node) and node.shape_for is not None and node.workers != workers:
            raise ValueError(
                f"the state was initialised for {node.workers} worker(s), but {workers} run: with two phases each of "
                "them keeps state for the entries that it owns. Initialise it with gcjax.make_train_step, with "
                "gcjax.distribute(tx.init(params), mesh), or inside jax.shard_map or jax.pmap over the axis. A state "
                "that has taken steps with another number of workers goes on with gcjax.resize(state, mesh)"
            )
