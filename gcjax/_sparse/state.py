"""The state of a sparse method: what a worker has accumulated, with the reset of sent entries deferred."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gcjax._kernels.bits import LANES, unpack_mask
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.groups import leaf_groups
from gcjax._sparse.exchange import TransportState
from gcjax._sparse.message import Exchanged
from gcjax._types import Array, ArrayLike, PyTree

# reset(values, sent_with) -> what is left of the values of entries that were sent. It is called with all entries of a
# bucket or with some of them. It is a function of a module or a frozen dataclass: two equal transforms then have states
# of the same tree structure, and states can be pickled.
Reset = Callable[[tuple[Array, ...], PyTree], tuple[ArrayLike, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseState:
    """State of one worker and bucket of n entries, for a method that sends selected entries.

    An entry that was sent is reset in the next update, in the pass that adds the next gradient. The arithmetic is that
    of an immediate reset, in one pass less. `settled` gives the values after the reset.

    Attributes:
      accumulated: float32[n] each: the gradient taken in and not yet sent, then what else the method accumulates, all
        of them before the reset.
      to_reset: uint32[words_for(n)], packed mask of the entries that the last message had.
      sent_with: what `reset` must know of the last message: a pytree of scalars and of arrays with one value per leaf.
      transport: state of the exchange.
      step: int32, updates done.
      reset: what a reset leaves of the values. Static.
      bucket: where the leaves lie. Static.
    """

    accumulated: tuple[Array, ...]
    to_reset: Array
    sent_with: PyTree
    transport: TransportState
    step: Array
    reset: Reset = dataclasses.field(metadata={"static": True})
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls, bucket: Bucket, *, reset: Reset, transport: str, arrays: int = 1, sent_with: PyTree = ()
    ) -> "SparseState":
        """The state before the first step, with `arrays` accumulated values for each entry."""
        return cls(
            accumulated=tuple(jnp.zeros(bucket.size) for _ in range(arrays)),
            to_reset=jnp.zeros(bucket.words, jnp.uint32),
            sent_with=sent_with,
            transport=TransportState.create(transport),
            step=jnp.int32(0),
            reset=reset,
            bucket=bucket,
        )

    def was_sent(self) -> Array:
        """bool[n], the entries that the last message had."""
        return unpack_mask(self.to_reset, self.bucket.size)

    def settled(self) -> tuple[Array, ...]:
        """The accumulated values after the reset of the entries that the last message had."""
        groups, sent = leaf_groups(self.bucket), self.was_sent()
        left = self.reset(
            self.accumulated, jax.tree.map(lambda x: groups.per_entry(x) if x.ndim else x, self.sent_with)
        )
        return tuple(jnp.where(sent, after, x) for after, x in zip(left, self.accumulated, strict=True))

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in and not yet sent."""
        return self.settled()[0]

    def unless_skipped(self, values: tuple[Array, ...], all_finite: Array) -> tuple[Array, ...]:
        """`values`, or the old ones in a step that is skipped; `to_reset` then stands, so these are not settled.

        The choice is made entry by entry, because XLA would copy the state for a conditional around the whole step.
        """
        return tuple(jnp.where(all_finite, new, old) for new, old in zip(values, self.accumulated, strict=True))

    def after(
        self, exchanged: Exchanged, values: tuple[Array, ...], all_finite: Array, sent_with: PyTree = ()
    ) -> "SparseState":
        """The state after an exchange of `values`, as `unless_skipped` returned them: sent entries are to be reset."""
        kept = dataclasses.replace(
            self,
            accumulated=values,
            to_reset=jnp.where(all_finite, exchanged.sent, self.to_reset),
            sent_with=jax.tree.map(lambda new, old: jnp.where(all_finite, new, old), sent_with, self.sent_with),
            transport=dataclasses.replace(
                self.transport, start_word=jnp.where(all_finite, exchanged.start_word, self.transport.start_word)
            ),
            step=self.step + all_finite,
        )
        return kept if exchanged.returned is None else kept._with_returned(*exchanged.returned)

    def _with_returned(self, index: Array, sums: Array) -> "SparseState":
        """Add what an owner got back to its residual. The entries concerned are reset first, if they have to be."""
        word, bit = index // LANES, jnp.uint32(1) << (index % LANES).astype(jnp.uint32)
        waiting = self.to_reset[word] & bit
        entries = tuple(x[index] for x in self.accumulated)
        leaf = jnp.asarray(self.bucket.leaf_of_word())
        left = self.reset(entries, jax.tree.map(lambda x: x[leaf[word]] if x.ndim else x, self.sent_with))
        settled = [jnp.where(waiting > 0, after, x) for after, x in zip(left, entries, strict=True)]
        settled[0] = settled[0] + sums
        return dataclasses.replace(
            self,
            accumulated=tuple(
                x.at[index].set(y, mode="drop", unique_indices=True)
                for x, y in zip(self.accumulated, settled, strict=True)
            ),
            to_reset=self.to_reset.at[word].add(-waiting, mode="drop"),  # every bit is taken off once
        )


def reset_to_zero(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """Nothing is left of a sent entry."""
    del sent_with
    return (0,) * len(values)
