"""What a worker keeps for the entries that it owns, in any exchange of two phases.

In two phases every entry has an owner among the workers, which adds up what all of them send of it. What it cannot pass
on it owes: that joins its next result. How the entries are shared out is the exchange's own: a `Sharing`.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from gcjax._core.mixing import Mixing
from gcjax._kernels.buckets import Bucket
from gcjax._types import Array, PyTree
from gcjax._xla import kept_unless


class Sharing(Protocol):
    """How the entries of a bucket are shared out: a frozen dataclass, so that equal transforms have equal states."""

    def shape(self, bucket: Bucket, workers: int) -> tuple[int, ...] | None:
        """Shape of one owner's part; None where so few workers have no owners."""

    def deal(self, x: Array, bucket: Bucket, workers: int) -> Array:
        """float32 of the bucket's shape -> every owner's part, float32[workers, *shape]."""

    def collect(self, parts: Array, bucket: Bucket) -> Array:
        """The inverse of `deal`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """What one worker keeps for the entries of a bucket that it owns.

    Attributes:
      owed: float32 of its part's shape: what it has received and not yet passed on, divided by the number of workers.
        None where there are no owners.
      rank: int32, this worker's number in the last step.
      bucket: whose entries are owned. Static.
      sharing: how they are shared out; None where nothing ever is. Static.
      workers: number of workers that the part is for. Static.
    """

    owed: Array | None
    rank: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})
    sharing: Sharing | None = dataclasses.field(metadata={"static": True})
    workers: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, bucket: Bucket, sharing: Sharing | None, workers: int = 1) -> "Owned":
        """Nothing is owed before the first step."""
        shape = sharing.shape(bucket, workers) if sharing is not None and workers > 1 else None
        owed = None if shape is None else jnp.zeros(shape, jnp.float32)
        return cls(owed, jnp.int32(0), bucket, sharing, workers if sharing is not None else 1)

    def after(self, owed: Array, rank: Array, go: Array) -> "Owned":
        """The state after a step; this one if the step is skipped."""
        return kept_unless(go, dataclasses.replace(self, owed=owed, rank=rank), self)

    def residual(self) -> Array:
        """float32 of the bucket's shape: what this worker owes, times the number of workers."""
        if self.owed is None or self.sharing is None:
            return jnp.zeros(self.bucket.shape)
        owner = jnp.arange(self.workers).reshape(-1, *[1] * self.owed.ndim)
        return self.sharing.collect(jnp.where(owner == self.rank, self.workers * self.owed, 0), self.bucket)

    def mixed(self, mixing: Mixing) -> tuple["Owned", Array]:
        """The new workers' state and what no owner keeps of the debts, float32 of the bucket's shape.

        The debts are dealt anew to the new owners. Without owners, all of them are left.
        """
        owed = jnp.mean(jax.vmap(Owned.residual)(self), axis=0)
        new = dataclasses.replace(Owned.create(self.bucket, self.sharing, mixing.new), rank=mixing.ranks())
        if new.owed is None or self.sharing is None:
            return new, owed
        return dataclasses.replace(new, owed=self.sharing.deal(owed, self.bucket, mixing.new)), jnp.zeros_like(owed)


def _is_owned(node: object) -> bool:
    return isinstance(node, Owned)


def shared_among(tree: PyTree, workers: int) -> PyTree:
    """A state before its first step, with its `Owned` nodes for so many workers."""

    def share(node: PyTree) -> PyTree:
        return Owned.create(node.bucket, node.sharing, workers) if _is_owned(node) else node

    return jax.tree.map(share, tree, is_leaf=_is_owned)


def check_workers(tree: PyTree, workers: int) -> None:
    """Raise ValueError if an `Owned` node of a state is for another number of workers."""
    for node in jax.tree.leaves(tree, is_leaf=_is_owned):
        if _is_owned(node) and node.sharing is not None and node.workers != workers:
            raise ValueError(
                f"the state was initialised for {node.workers} worker(s), but {workers} run: with two phases each of "
                "them keeps state for the entries that it owns. Initialise it with gcjax.make_train_step, with "
                "gcjax.distribute(tx.init(params), mesh), or inside jax.shard_map or jax.pmap over the axis. A state "
                "that has taken steps with another number of workers goes on with gcjax.resize(state, mesh)"
            )
