"""Error feedback, once for all methods: what an update does not send stays in a residual and is added to the next.

Two lifts turn the heart of a method into a compressor. `sparse_method` takes a selection of entries, which are sent as
they are. `gather_codec` takes an encoder and a decoder, for payloads that do not add up: they are gathered, each is
decoded, and the results are averaged.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._bits import unpack_mask
from gcjax._codec import float_code
from gcjax._layout import Bucket
from gcjax._owners import take_back
from gcjax._random import step_key
from gcjax._sparse import check_transport, exchange
from gcjax._types import Array, Comm, Compressor, sent_whole

UNROLLED = 16  # payloads of up to so many workers are decoded in one pass over the bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseState:
    """State of one worker and bucket of n entries for a method that sends the selected entries as they are.

    accumulated: float32[n], the gradient taken in and not yet sent, but for what `reset` still removes.
    reset: uint32[words_for(n)], packed mask of the entries to set to zero before the next gradient is added: the same
      arithmetic as doing it at once, in one pass less.
    first: int32, where owners' queues begin next.  step: int32, updates done.  bucket: static.
    """

    accumulated: Array
    reset: Array
    first: Array
    step: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in and not yet sent."""
        return jnp.where(unpack_mask(self.reset, self.bucket.size), 0, self.accumulated)


def sparse_method(select: Callable, capacities: Callable, transport: str) -> Compressor:
    """A compressor that sends the entries which `select` chooses, as float32 values with 32-bit indices.

    select(a, step, bucket) -> uint32 mask words of the entries of a (float32[n], gradient plus residual) to send;
    capacities(bucket) -> ascending tuple of payload sizes. What does not fit the largest stays in the residual.
    transport: of the sparse exchange.
    """
    check_transport(transport)
    code = float_code(32)

    def init(bucket: Bucket) -> SparseState:
        return SparseState(
            accumulated=jnp.zeros(bucket.size),
            reset=jnp.zeros(bucket.words, jnp.uint32),
            first=jnp.int32(0),
            step=jnp.int32(0),
            bucket=bucket,
        )

    def update(gradient, sum_grad_squared, state, comm, ok):
        del sum_grad_squared
        bucket = state.bucket
        # Chosen entry by entry: a conditional around the whole step would make XLA copy the state.
        a = jnp.where(ok, state.residual + gradient, state.accumulated)
        words = select(a, state.step, bucket)
        no_scale, slots = jnp.zeros(0, jnp.uint32), capacities(bucket)
        out = exchange(a, words, state.first, no_scale, None, code, slots, comm, ok, transport=transport)
        reset = jnp.where(ok, out.words, state.reset)
        reset, (a,) = take_back(out.returned, reset, (a,), lambda word, rows: (0,))
        new = SparseState(
            accumulated=a,
            reset=reset,
            first=jnp.where(ok, out.first, state.first),
            step=state.step + ok,
            bucket=bucket,
        )
        return out.mean, new, out.sent

    return Compressor(init, update)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodecState:
    """State of one worker and bucket of n entries for a method that sends a code of every entry.

    error: float32[n], what the receivers have not yet seen, with error feedback; float32[1], zero, without.
    step: int32, updates done.  bucket: static.
    """

    error: Array
    step: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32[n], what this worker has taken in and not yet sent."""
        return jnp.broadcast_to(self.error, self.bucket.size)


def gather_codec(encode: Callable, decode: Callable, *, feedback: bool, key=None) -> Compressor:
    """A compressor that sends a code of every entry.

    encode(x, bucket, key) -> (payload uint32[m], bits): x is float32[n], the gradient plus, with `feedback`, the
    residual; key is this worker's own for this step, or None; bits is the length of the message without padding.
    decode(payload, bucket) -> float32[n], what the receivers see; the padding between leaves may hold anything.
    """

    def init(bucket: Bucket) -> CodecState:
        return CodecState(jnp.zeros(bucket.size if feedback else 1), jnp.int32(0), bucket)

    def update(gradient, sum_grad_squared, state, comm, ok):
        del sum_grad_squared
        bucket = state.bucket
        # In a skipped step x is the old error, so that nothing else needs it and XLA can work in its buffer.
        x = jnp.where(ok, state.error + gradient, state.error) if feedback else gradient
        draw = None if key is None else step_key(key, state.step, bucket, comm.rank())
        payload, bits = encode(x, bucket, draw)
        mean = gather_mean(payload, lambda payload: decode(payload, bucket), bucket.size, comm, ok)
        error = parameters_only(jnp.where(ok, x - decode(payload, bucket), x), bucket) if feedback else state.error
        return mean, CodecState(error, state.step + ok, bucket), sent_whole(bucket.entries, bits)

    return Compressor(init, update)


def gather_mean(payload, decode: Callable, size: int, comm: Comm, ok) -> Array:
    """The mean over workers of decode(payload), float32[size], NaN unless `ok`.

    Workers are added in the order of their numbers, so that the mean is bit-equal on all of them on any backend.
    """
    payloads = comm.gather(payload)
    mean = jnp.full(size, jnp.where(ok, 0.0, jnp.nan), jnp.float32)

    def add(worker, mean):
        return mean + decode(payloads[worker]) / comm.size

    if comm.size > UNROLLED:
        return lax.fori_loop(0, comm.size, add, mean)
    for worker in range(comm.size):  # XLA makes one pass of it
        mean = add(worker, mean)
    return mean


def parameters_only(x, bucket: Bucket) -> Array:
    """float32[n] with the padding between leaves set to zero."""
    if bucket.entries == bucket.size:
        return x
    return jnp.where(unpack_mask(bucket.valid_words(), bucket.size), x, 0)
