"""The lift for methods that send selected entries as they are."""

from collections.abc import Callable

import jax.numpy as jnp

from gcjax._core.compressor import Compressor, StepInput, StepResult
from gcjax._kernels.bits import WORD
from gcjax._kernels.buckets import Bucket
from gcjax._sparse.capacities import capacities_for
from gcjax._sparse.exchange import exchange
from gcjax._sparse.message import Message
from gcjax._sparse.state import SparseState, add_gradient, reset_to_zero
from gcjax._sparse.value_codes import float_code
from gcjax._types import Array
from gcjax._validation import check_function, check_transport

Select = Callable[[Array, Array, Bucket], Array]
Capacity = Callable[[Bucket], float | tuple[int, ...]]


def sparse_method(select: Select, capacity: Capacity, transport: str = "auto") -> Compressor[SparseState]:
    """A compressor that sends the entries which `select` chooses, as float32 values with their places in compact form.

    Entries that are not sent stay in the residual.

    Args:
      select: select(a, step, bucket) -> packed mask (`pack_mask`) of the entries of a to send, with a, of the bucket's
        shape, the gradient plus the residual. Padding that it chooses is not sent.
      capacity: capacity(bucket) -> slots of the payload, as `capacities_for` takes them.
      transport: "all_gather", "two_phase" or "auto": see docs/common.md.

    Raises:
      ValueError: for another transport; (from `update`) a capacity that is not positive.
      TypeError: `select` or `capacity` is no function; (from `update`) `select` returns no packed mask.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def select(a, step, bucket):
    ...     return gx.pack_mask(jnp.abs(a) > 1.5)
    >>> tx = gx.compress(gx.sparse_method(select, capacity=lambda bucket: bucket.entries))
    >>> print(tx.update(jnp.array([1.0, -3.0, 2.0]), tx.init(jnp.zeros(3)))[0])
    [ 0. -3.  2.]
    """

    check_function("select", select, "lambda a, step, bucket: gcjax.extend.pack_mask(jnp.abs(a) > 1)")
    check_function("capacity", capacity, f"lambda bucket: {512 if callable(capacity) else capacity!r}")

    def parameters(a: Array, step: Array, bucket: Bucket) -> Array:
        mask = select(a, step, bucket)
        _check_packed(mask, bucket)
        return mask & bucket.valid_words()

    return method_without_padding(parameters, capacity, transport)


def _check_packed(mask: Array, bucket: Bucket) -> None:
    words = bucket.size // WORD
    dtype, shape = getattr(mask, "dtype", None), getattr(mask, "shape", None)
    if dtype != jnp.uint32 or shape != (words,):
        got = repr(mask) if dtype is None or shape is None else f"{dtype}{list(shape)}"
        raise TypeError(
            f"select must return a packed mask, uint32[{words}], got {got}. To pack bools of the bucket's shape "
            f"{bucket.shape}, use gcjax.extend.pack_mask(mask)"
        )


def method_without_padding(select: Select, capacity: Capacity, transport: str) -> Compressor[SparseState]:
    """`sparse_method` for a `select` that never chooses padding, which would make other entries of a message wrong."""
    check_transport(transport)
    code = float_code()

    def init(bucket: Bucket) -> SparseState:
        return SparseState.create(bucket, reset=reset_to_zero, transport=transport)

    def update(step: StepInput, state: SparseState) -> StepResult[SparseState]:
        bucket = state.bucket
        (a,) = state.take_in(add_gradient, step.gradient, go=step.go)
        message = Message(
            a, select(a, state.step, bucket), code, bucket, capacities_for(capacity(bucket), bucket.entries)
        )
        exchanged = exchange(message, state.transport, step.comm, step.go)
        return StepResult(exchanged.mean, state.after(exchanged, (a,), step.go), exchanged.report)

    return Compressor(init, update)
