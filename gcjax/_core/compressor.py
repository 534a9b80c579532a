"""What a method is: the protocol of a compressor, and what it reports."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._kernels.buckets import Bucket
from gcjax._types import Array, PyTree


class SendReport(NamedTuple):
    """What one worker sent in one update of one bucket. Scalars.

    Attributes:
      selected: int32, entries that passed the method's test: sent + underflow + overflow.
      sent: int32, entries put on the wire.
      underflow: int32, entries too small for the value code.
      overflow: int32, entries beyond the capacity.
      capacity: int32, slots in the payload.
      wire_bytes: float32, bytes moved by metered collectives (`Comm.metered`). Those of the other collectives, which
        run on every step, are added by `compress`.
      payload_bits: float32, bits of this worker's message without padding.
      entropy_bits: float32, the least that any code takes for the same: where the places of the entries are sent, each
        set of places counts as equally likely.
    """

    selected: Array
    sent: Array
    underflow: Array
    overflow: Array
    capacity: Array
    wire_bytes: Array
    payload_bits: Array
    entropy_bits: Array


def dense_report(entries: int | Array, payload_bits: Array | float) -> SendReport:
    """The report of a method that sends something for each of the bucket's entries, with unmetered collectives.

    >>> from gcjax.extend import dense_report
    >>> report = dense_report(64, payload_bits=96)
    >>> print(report.sent, report.payload_bits)
    64 96.0
    """
    count, none = jnp.int32(entries), jnp.int32(0)
    bits = jnp.float32(payload_bits)
    return SendReport(count, count, none, none, count, jnp.float32(0), bits, bits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmptyState:
    """State of a method that keeps nothing: `Compressor(EmptyState, update)`.

    Attributes:
      bucket: where the leaves lie. Static.
    """

    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, zero: what is not sent is dropped."""
        return jnp.zeros(self.bucket.shape)


InitFn = Callable[[Bucket], PyTree]
Leaves = Sequence[Array]
UpdateFn = Callable[[Leaves, Leaves | None, PyTree, Comm, Array], tuple[Leaves, PyTree, SendReport]]


class Compressor(NamedTuple):
    """A method, as two pure functions over the leaves of one bucket.

    `update(gradient, sum_grad_squared, state, comm, all_finite)` takes a float32 array for each segment of the bucket,
    of its shape; the same or None; one worker's state; the collectives; and a bool scalar that is equal on all workers.
    It returns the update, arrays like the gradient's and bit-equal on all workers; the new state; and the report.
    `Bucket.join` and `Bucket.split` go from leaves to one array and back. `all_finite` is False when the input of any
    worker is not finite, or a gradient is 2**80 or more: the update must then be NaN everywhere and the state must come
    back as it was. jax_enable_x64 is off while either function is traced.

    Attributes:
      init: init(bucket) -> the state of one worker, a pytree node with two attributes: `bucket`, and `residual`,
        float32 of the bucket's shape, what this worker has taken in and neither sent nor given up. Its method
        `mixed(mixing)` says what `gcjax.resize` makes of its fields, see `gcjax.extend.Mixing`; without one, floats are
        averaged and all else counts as equal on all workers.
      update: see above.
      uses_squares: whether `update` reads `sum_grad_squared`, which training steps of gcjax then compute. If it gets
        None, the square of the gradient stands for it, and the transform warns (`gcjax.MissingSquaresWarning`).

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def init(bucket):
    ...     return gx.CodecState(jnp.zeros(1), jnp.int32(0), bucket)
    >>> def update(gradient, sum_grad_squared, state, comm, all_finite):
    ...     mean = comm.mean(tuple(jnp.where(all_finite, g, jnp.nan) for g in gradient))
    ...     entries = state.bucket.entries
    ...     return mean, state, gx.dense_report(entries, payload_bits=32 * entries)
    >>> tx = gx.compress(gx.Compressor(init, update))
    >>> print(tx.update(jnp.arange(3.0), tx.init(jnp.zeros(3)))[0])
    [0. 1. 2.]
    """

    init: InitFn
    update: UpdateFn
    uses_squares: bool = False


def checked(compressor: Compressor) -> Compressor:
    """A method whose functions raise TypeError where they do not return what `Compressor` asks for."""
    if not isinstance(compressor, Compressor):
        raise TypeError(
            "compress takes a Compressor, as gcjax.extend.sparse_method and gcjax.extend.dense_codec return it, got "
            f"{compressor!r}"
        )

    def init(bucket):
        state = compressor.init(bucket)
        lacking = [name for name in ("bucket", "residual") if name not in dir(state)]
        if lacking or jax.tree_util.all_leaves([state]):
            what = f"without {' and '.join(lacking)}" if lacking else "not registered by jax.tree_util"
            raise TypeError(
                f"init of a method must return a pytree node with the attributes bucket and residual, such as "
                f"gcjax.extend.CodecState, got a {type(state).__name__} {what}"
            )
        return state

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        result = compressor.update(gradient, sum_grad_squared, state, comm, all_finite)
        if not isinstance(result, tuple) or len(result) != 3:
            raise TypeError(f"update of a method must return (update, state, report), got {_kind(result)}")
        got, wanted = (list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (result[0], gradient))
        if got != wanted:
            other, leaf = next((x, y) for x, y in itertools.zip_longest(got, wanted) if x != y)
            raise TypeError(
                "update of a method must return an array for each leaf of the gradient, of its shape: got "
                f"{len(got)} for {len(wanted)}, the first wrong one {other} for {leaf}. Bucket.split cuts an array of "
                "the bucket's shape into its leaves"
            )
        if not isinstance(result[2], SendReport):
            raise TypeError(f"update of a method must return a SendReport, as dense_report, got {result[2]!r}")
        return result

    return Compressor(init, update, compressor.uses_squares)


def _kind(result: object) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
