"""The lift for methods that send a code of every entry, with error feedback: what was not sent joins the next gradient.

Payloads of such methods do not add up. They are gathered, each is decoded, and the results are averaged.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._core.compressor import Compressor, dense_report
from gcjax._kernels.bits import unpack_mask
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.hashing import step_key
from gcjax._types import Array

UNROLLED = 16  # payloads of up to this many workers are decoded in one pass over the bucket

Encode = Callable[[Array, Bucket, Array | None], tuple[Array, Array | float]]
Decode = Callable[[Array, Bucket], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodecState:
    """State of one worker and bucket, for a method that sends a code of every entry.

    Attributes:
      error: with error feedback float32 of the bucket's shape, what the receivers have not yet seen; without it
        float32[1], zero.
      step: int32, updates done.
      bucket: where the leaves lie. Static.
    """

    error: Array
    step: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, what this worker has taken in and not yet sent."""
        return jnp.broadcast_to(self.error, self.bucket.shape)


def gather_codec(encode: Encode, decode: Decode, *, feedback: bool, key: Array | None = None) -> Compressor:
    """A compressor that sends a code of every entry.

    Args:
      encode: encode(x, bucket, key) -> (payload uint32[m], bits): x, float32 of the bucket's shape, is the gradient
        plus, with `feedback`, the residual; key is this worker's own for this step, or None; bits is the message's
        length without padding.
      decode: decode(payload, bucket) -> float32 of the bucket's shape, what the receivers see. The padding may hold any
        value.
      feedback: keep what the receivers have not seen, and add it to the next gradient.
      key: random key, the same on all workers, for a method that draws random numbers.
    """

    def init(bucket):
        return CodecState(jnp.zeros(bucket.shape if feedback else 1), jnp.int32(0), bucket)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        bucket, x = state.bucket, state.bucket.join(gradient)
        if feedback:  # in a skipped step x is the old error, so that nothing else needs it and XLA works in its buffer
            x = jnp.where(all_finite, state.error + x, state.error)
        own_key = None if key is None else step_key(key, state.step, bucket, comm.rank())
        payload, bits = encode(x, bucket, own_key)
        mean = gather_mean(payload, lambda payload: decode(payload, bucket), bucket.shape, comm, all_finite)
        error = state.error
        if feedback:
            error = parameters_only(jnp.where(all_finite, x - decode(payload, bucket), x), bucket)
        new = CodecState(error, state.step + all_finite, bucket)
        return bucket.split(mean), new, dense_report(bucket.entries, bits)

    return Compressor(init, update)


def gather_mean(
    payload: Array, decode: Callable[[Array], Array], shape: tuple[int, ...], comm: Comm, all_finite: Array
) -> Array:
    """The mean over workers of decode(payload), float32 of this shape; NaN unless `all_finite`.

    Workers are added in the order of their numbers, so that the mean is bit-equal on all of them on any backend.
    """
    payloads = comm.gather(payload)
    mean = jnp.full(shape, jnp.where(all_finite, 0.0, jnp.nan), jnp.float32)

    def add(worker, mean):
        return mean + decode(payloads[worker]) / comm.size

    if comm.size > UNROLLED:
        return lax.fori_loop(0, comm.size, add, mean)
    for worker in range(comm.size):  # XLA makes one pass of it
        mean = add(worker, mean)
    return mean


def parameters_only(x: Array, bucket: Bucket) -> Array:
    """A bucket's array with its padding set to zero."""
    if bucket.entries == bucket.size:
        return x
    return jnp.where(unpack_mask(jnp.asarray(bucket.valid_words())), x, 0)
