"""What a method is: the protocol of a compressor, and what it reports."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._kernels.buckets import Bucket
from gcjax._types import Array


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


Leaves = Sequence[Array]
S = TypeVar("S")


class StepInput(NamedTuple):
    """The input of one step of a method, of one bucket and worker.

    Attributes:
      gradient: float32, an array for each segment of the bucket, of its shape.
      squares: the same for `sum_grad_squared`, or None.
      comm: the collectives.
      go: bool, equal on all workers. False where the input of any worker is not finite, or a gradient is 2**80 or more:
        the update must then be NaN everywhere, and the state must come back as it was.
    """

    gradient: Leaves
    squares: Leaves | None
    comm: Comm
    go: Array


class StepResult(NamedTuple, Generic[S]):
    """The result of one step of a method.

    Attributes:
      mean: the update, arrays like the gradient's, bit-equal on all workers.
      state: the new state.
      report: what was sent.
    """

    mean: Leaves
    state: S
    report: SendReport


class Compressor(NamedTuple, Generic[S]):
    """A method, as two pure functions over the leaves of one bucket. S is the type of its state.

    `Bucket.join` and `Bucket.split` go from leaves to one array and back. jax_enable_x64 is off while either function
    is traced.

    Attributes:
      init: init(bucket) -> the state of one worker, a pytree node with two attributes: `bucket`, and `residual`,
        float32 of the bucket's shape, what this worker has taken in and neither sent nor given up. Its method
        `mixed(mixing)` says what `gcjax.resize` makes of its fields, see `gcjax.extend.Mixing`; without one, floats are
        averaged and all else counts as equal on all workers.
      update: update(step, state) -> `StepResult`, of a `StepInput` and the state of one worker.
      uses_squares: whether `update` reads `step.squares`, which training steps of gcjax then compute. If it gets None,
        the square of the gradient stands for it, and the transform warns (`gcjax.MissingSquaresWarning`).

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def update(step, state):
    ...     mean = step.comm.mean(tuple(jnp.where(step.go, g, jnp.nan) for g in step.gradient))
    ...     entries = state.bucket.entries
    ...     return gx.StepResult(mean, state, gx.dense_report(entries, payload_bits=32 * entries))
    >>> tx = gx.compress(gx.Compressor(gx.EmptyState, update))
    >>> print(tx.update(jnp.arange(3.0), tx.init(jnp.zeros(3)))[0])
    [0. 1. 2.]
    """

    init: Callable[[Bucket], S]
    update: Callable[[StepInput, S], StepResult[S]]
    uses_squares: bool = False


def checked(compressor: Compressor[S]) -> Compressor[S]:
    """A method whose functions raise TypeError where they do not return what `Compressor` asks for."""
    if not isinstance(compressor, Compressor):
        raise TypeError(
            "compress takes a Compressor, as gcjax.extend.sparse_method and gcjax.extend.dense_codec return it, got "
            f"{compressor!r}"
        )

    def init(bucket: Bucket) -> S:
        state = compressor.init(bucket)
        lacking = [name for name in ("bucket", "residual") if name not in dir(state)]
        if lacking or jax.tree_util.all_leaves([state]):
            what = f"without {' and '.join(lacking)}" if lacking else "not registered by jax.tree_util"
            raise TypeError(
                f"init of a method must return a pytree node with the attributes bucket and residual, such as "
                f"gcjax.extend.CodecState, got a {type(state).__name__} {what}"
            )
        return state

    def update(step: StepInput, state: S) -> StepResult[S]:
        result = compressor.update(step, state)
        if not isinstance(result, StepResult):
            raise TypeError(f"update of a method must return a StepResult(mean, state, report), got {_kind(result)}")
        got, wanted = (list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (result.mean, step.gradient))
        if got != wanted:
            other, leaf = next((x, y) for x, y in itertools.zip_longest(got, wanted) if x != y)
            raise TypeError(
                "update of a method must return an array for each leaf of the gradient, of its shape: got "
                f"{len(got)} for {len(wanted)}, the first wrong one {other} for {leaf}. Bucket.split cuts an array of "
                "the bucket's shape into its leaves"
            )
        if not isinstance(result.report, SendReport):
            raise TypeError(f"update of a method must return a SendReport, as dense_report, got {result.report!r}")
        return result

    return Compressor(init, update, compressor.uses_squares)


def _kind(result: object) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
