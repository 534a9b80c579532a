"""The state of a sparse method: what a worker has accumulated, with the reset of sent entries deferred."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._core.mixing import Mixing
from gcjax._kernels.bits import LANES, WORD, unpack_mask
from gcjax._kernels.buckets import Bucket, Part
from gcjax._sparse.message import Exchanged
from gcjax._sparse.owners import TransportState
from gcjax._types import Array, ArrayLike, PyTree
from gcjax._xla import kept_unless

# reset(values, sent_with) -> what is left of the values of entries that were sent. It is called with some blocks of a
# bucket or with some of its entries. It is a function of a module or a frozen dataclass: two equal transforms then have
# states of the same tree structure, and states can be pickled.
Reset = Callable[[tuple[Array, ...], PyTree], tuple[ArrayLike, ...]]
# take_in(values, inputs, was_sent) -> the new values, with a step's inputs added to what a reset has left.
TakeIn = Callable[[tuple[Array, ...], tuple[Array, ...], Array], tuple[Array, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseState:
    """State of one worker and bucket, for a method that sends selected entries.

    An entry that was sent is reset in the next update, in the pass that adds the next gradient. The arithmetic is that
    of an immediate reset, in one pass less. `settled` gives the values after the reset.

    Attributes:
      accumulated: float32[blocks, 32, 128] each: the gradient taken in and not yet sent, then what else the method
        accumulates, all of them before the reset.
      to_reset: uint32[words], packed mask of the entries that the last message had.
      sent_with: what `reset` must know of the last message: a pytree of scalars and of arrays with one value per leaf.
      transport: state of the exchange.
      step: int32, updates done.
      squares: which of the accumulated values are sums of squares: their numbers. Static.
      reset: what a reset leaves of the values. Static.
      bucket: where the leaves lie. Static.
    """

    accumulated: tuple[Array, ...]
    to_reset: Array
    sent_with: PyTree
    transport: TransportState
    step: Array
    squares: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    reset: Reset = dataclasses.field(metadata={"static": True})
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        bucket: Bucket,
        *,
        reset: Reset,
        transport: str,
        arrays: int = 1,
        squares: tuple[int, ...] = (),
        sent_with: PyTree = (),
    ) -> "SparseState":
        """The state before the first step, with `arrays` accumulated values for each entry, some of them `squares`."""
        return cls(
            accumulated=tuple(jnp.zeros(bucket.shape) for _ in range(arrays)),
            to_reset=jnp.zeros(bucket.size // WORD, jnp.uint32),
            sent_with=sent_with,
            transport=TransportState.create(bucket, transport),
            step=jnp.int32(0),
            squares=squares,
            reset=reset,
            bucket=bucket,
        )

    @property
    def residual(self) -> Array:
        """float32[blocks, 32, 128], what this worker has taken in or received, and not yet sent."""
        return self.settled()[0] + self.transport.residual()

    def settled(self) -> tuple[Array, ...]:
        """The accumulated values after the reset of the entries that the last message had."""
        parts = [self._settled_part(self.accumulated, part)[0] for part in self.bucket.parts()]
        return tuple(jnp.concatenate(blocks) for blocks in zip(*parts, strict=True))

    def mixed(self, mixing: Mixing) -> "SparseState":
        """See `gcjax._core.mixing`: settled first; what no owner holds any more joins the residuals."""
        values = list(jax.vmap(SparseState.settled)(self))
        transport, left = self.transport.mixed(mixing)
        values = [mixing.squares(x) if i in self.squares else mixing.means(x) for i, x in enumerate(values)]
        return dataclasses.replace(
            self,
            accumulated=(values[0] + left, *values[1:]),
            to_reset=mixing.zeros(self.to_reset),
            sent_with=mixing.equal(self.sent_with),
            transport=transport,
            step=mixing.equal(self.step),
        )

    def take_in(self, take_in: TakeIn, *inputs: Sequence[Array], go: Array) -> tuple[Array, ...]:
        """The accumulated values with a step's input; the old ones in a step that is skipped.

        In a skipped step `to_reset` stands, so the old values are not settled. Every leaf's blocks are replaced in
        place, so that neither the leaves nor the results have to be joined. A value computed from another new value
        costs an array of gradient length: do that in a pass of its own.

        Args:
          take_in: take_in(values, inputs, was_sent), of blocks [b, 32, 128], `values` settled, `was_sent` bool.
          *inputs: the bucket's leaves: of the gradient, of its squares.
          go: bool.
        """
        accumulated = self.accumulated
        for part in self.bucket.parts():
            # Read from the array that is written to: XLA would copy one that it finds in use beside it.
            settled, old, was_sent = self._settled_part(accumulated, part)
            given = tuple(self.bucket.join_part(part, leaves) for leaves in inputs)
            new = kept_unless(go, tuple(take_in(settled, given, was_sent)), old)
            accumulated = tuple(
                lax.dynamic_update_slice_in_dim(x, y, part.begin, 0) for x, y in zip(accumulated, new, strict=True)
            )
        return accumulated

    def _settled_part(
        self, accumulated: tuple[Array, ...], part: Part
    ) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
        """Of some blocks: the settled values, those before the reset, and which entries the last message had."""
        words = slice(part.begin * LANES, part.end * LANES)
        old, was_sent = tuple(x[part.begin : part.end] for x in accumulated), unpack_mask(self.to_reset[words])
        leaf = part.segments[0] if len(part.segments) == 1 else self.bucket.leaf_of_word()[words].reshape(-1, 1, LANES)
        left = self.reset(old, jax.tree.map(lambda x: x[leaf] if x.ndim else x, self.sent_with))
        return tuple(jnp.where(was_sent, x, y) for x, y in zip(left, old, strict=True)), old, was_sent

    def after(
        self, exchanged: Exchanged, values: tuple[Array, ...], go: Array, sent_with: PyTree = ()
    ) -> "SparseState":
        """The state after an exchange of `values`, as `take_in` returned them: sent entries are to be reset."""
        return dataclasses.replace(
            self,
            accumulated=values,
            to_reset=kept_unless(go, exchanged.sent, self.to_reset),
            sent_with=kept_unless(go, sent_with, self.sent_with),
            transport=exchanged.transport,
            step=self.step + go,
        )


def reset_to_zero(values: tuple[Array, ...], sent_with: PyTree) -> tuple[ArrayLike, ...]:
    """Nothing is left of a sent entry.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> gx.reset_to_zero((jnp.ones(3), jnp.ones(3)), sent_with=())
    (0, 0)
    """
    del sent_with
    return (0,) * len(values)


def add_gradient(values: tuple[Array, ...], inputs: tuple[Array, ...], was_sent: Array) -> tuple[Array, ...]:
    """r <- r + g.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.add_gradient((jnp.ones(2),), (jnp.array([0.5, 2.0]),), was_sent=jnp.zeros(2, bool))[0])
    [1.5 3. ]
    """
    del was_sent
    return (values[0] + inputs[0],)
