"""The lift for methods that send a code of every entry, with error feedback: what was not sent joins the next gradient.

Payloads of such methods do not add up. Each is decoded, and the results are averaged: by every worker, which gathers
all of them, or by owners in two phases (`gcjax._dense.parts`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._core.compressor import Compressor, Leaves, StepInput, StepResult, dense_report
from gcjax._core.mixing import Mixing
from gcjax._core.owned import Owned
from gcjax._dense.parts import add_decoded, cut, goes_through_owners, parameters_of, part_of, pieces_for, uncut
from gcjax._kernels.bits import unpack_mask
from gcjax._kernels.buckets import Bucket
from gcjax._kernels.hashing import step_key
from gcjax._types import Array
from gcjax._validation import check_transport

# The third is a random key in a method with one, else None: `encode` may be typed for either.
Encode = Callable[[Array, Bucket, Any], tuple[Array, Array | float]]
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
      owned: what this worker keeps as an owner; None for a method that has no owners.
    """

    error: Array
    step: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})
    owned: Owned | None = None

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, what this worker has taken in and not yet sent."""
        own = jnp.broadcast_to(self.error, self.bucket.shape)
        return own if self.owned is None else own + self.owned.residual()

    def mixed(self, mixing: Mixing) -> "CodecState":
        """See `gcjax._core.mixing`. Where the method has no feedback, what no owner holds any more is lost."""
        error, owned = mixing.means(self.error), self.owned
        if owned is not None:
            owned, left = owned.mixed(mixing)
            error = error + left if error.shape[1:] == self.bucket.shape else error
        return CodecState(error, mixing.equal(self.step), self.bucket, owned)


def dense_codec(
    encode: Encode,
    decode: Decode,
    *,
    feedback: bool,
    key: Array | None = None,
    transport: str = "all_gather",
    encode_mean: Encode | None = None,
) -> Compressor[CodecState]:
    """A compressor that sends a code of every entry.

    With the transport "all_gather", every worker's code goes to all workers. In two phases the code of each piece of
    the leaves goes to its owner, and the owner's code of the mean goes to all: 2 / p of the traffic for p workers. Then
    `encode` and `decode` get the pieces of one owner as a bucket. What is relative to a leaf becomes relative to a
    piece of it. A small leaf costs more than its share: a piece takes at least one mask word and one scale.

    An owner keeps what coding its mean has left, and adds it to the next mean. So it must not code the mean at random:
    the error of an unbiased code may be larger than what is coded, and would grow from step to step.

    Args:
      encode: encode(x, bucket, key) -> (payload uint32[m], bits): x, float32 of the bucket's shape, is the gradient
        plus, with `feedback`, the residual; key is this worker's own for this step and message, or None; bits is the
        message's length without padding.
      decode: decode(payload, bucket) -> float32 of the bucket's shape, what the receivers see. The padding may hold any
        value.
      feedback: keep what the receivers have not seen, and add it to the next gradient. Owners always do.
      key: random key, the same on all workers, for a method that draws random numbers.
      transport: "all_gather", "two_phase", or "auto" for the one that moves fewer bytes.
      encode_mean: how owners encode the mean, with an error smaller than the mean; None for `encode`.

    Raises:
      ValueError: for an unknown transport.
      TypeError: (from `update`) `encode` or `decode` returns something else.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def encode(x, bucket, key):  # the signs
    ...     return gx.pack_mask(x < 0)[: bucket.words], bucket.entries
    >>> def decode(payload, bucket):
    ...     return jnp.where(gx.unpack_mask(payload), -1.0, 1.0)
    >>> tx = gx.compress(gx.dense_codec(encode, decode, feedback=True))
    >>> print(tx.update(jnp.array([2.0, -3.0]), tx.init(jnp.zeros(2)))[0])
    [ 1. -1.]
    """
    check_transport(transport)
    encode, decode = _checked_encode(encode), _checked_decode(decode)
    codec = _Codec(encode, encode if encode_mean is None else _checked_encode(encode_mean), decode, feedback)

    def init(bucket: Bucket) -> CodecState:
        error = jnp.zeros(bucket.shape if feedback else 1)
        return CodecState(error, jnp.int32(0), bucket, Owned.create(bucket, pieces_for(transport)))

    def update(step: StepInput, state: CodecState) -> StepResult[CodecState]:
        bucket = state.bucket
        own_key = None if key is None else step_key(key, state.step, bucket, step.comm.rank())

        def words_of(workers: int) -> int:
            part = part_of(bucket, workers)
            x = jax.ShapeDtypeStruct(part.shape, jnp.float32)
            return jax.eval_shape(lambda x, key: encode(x, part, key)[0], x, own_key).size

        owned = state.owned
        if owned is not None and owned.owed is not None and goes_through_owners(transport, step.comm, words_of):
            mean, new, bits = codec.in_two_phases(step.gradient, state, owned, owned.owed, step.comm, step.go, own_key)
        else:
            mean, new, bits = codec.by_gather(step.gradient, state, step.comm, step.go, own_key)
        new = dataclasses.replace(new, step=state.step + step.go)
        return StepResult(mean, new, dense_report(bucket.entries, bits))

    return Compressor(init, update)


def _checked_encode(encode: Encode) -> Encode:
    def run(x: Array, bucket: Bucket, key: Array | None) -> tuple[Array, Array | float]:
        result = encode(x, bucket, key)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "encode must return (payload, bits), a uint32 vector and its length in bits without padding, got "
                f"{result!r}"
            )
        return result

    return run


def _checked_decode(decode: Decode) -> Decode:
    def run(payload: Array, bucket: Bucket) -> Array:
        x = decode(payload, bucket)
        if jnp.shape(x) != bucket.shape or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(
                f"decode must return floats of the bucket's shape {bucket.shape}, got {jnp.result_type(x)}"
                f"{list(jnp.shape(x))}"
            )
        return x

    return run


class _Codec(NamedTuple):
    """The two transports. Both return the mean, the state with its old step, and the bits that this worker sends."""

    encode: Encode
    encode_mean: Encode
    decode: Decode
    feedback: bool

    def by_gather(
        self, gradient: Leaves, state: CodecState, comm: Comm, go: Array, key: Array | None
    ) -> tuple[Leaves, CodecState, Array | float]:
        bucket, x = state.bucket, state.bucket.join(gradient)
        if self.feedback:  # in a skipped step x is the old error, so that nothing else needs it and XLA works in it
            x = jnp.where(go, state.error + x, state.error)
        payload, bits = self.encode(x, bucket, key)
        mean = gather_mean(payload, lambda payload: self.decode(payload, bucket), bucket.shape, comm, go)
        if self.feedback:
            error = parameters_only(jnp.where(go, x - self.decode(payload, bucket), x), bucket)
            state = dataclasses.replace(state, error=error)
        return bucket.split(mean), state, bits

    def in_two_phases(
        self,
        gradient: Leaves,
        state: CodecState,
        owned: Owned,
        owed: Array,
        comm: Comm,
        go: Array,
        key: Array | None,
    ) -> tuple[Leaves, CodecState, Array | float]:
        bucket, part, rank = state.bucket, part_of(state.bucket, comm.size), comm.rank()
        if self.feedback:
            errors = bucket.split(state.error)
            gradient = [jnp.where(go, e + g, e) for e, g in zip(errors, gradient, strict=True)]
        parts = cut(gradient, bucket, comm.size)

        def encode_part(x: Array, key: Array | None) -> tuple[Array, Array]:
            payload, bits = self.encode(x, part, key)
            return payload, jnp.float32(bits)

        def decode(payload: Array) -> Array:
            return self.decode(payload, part)

        # Every message has a key of its own: equal draws in both phases would make the code of the mean biased.
        keys = key if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(comm.size + 1))
        payloads, bits = jax.vmap(encode_part)(parts, None if keys is None else keys[:-1])
        total = add_decoded(owed, comm.all_to_all(payloads), decode)
        total = parameters_of(total, rank, bucket, comm.size)
        own, own_bits = self.encode_mean(total, part, None if keys is None else keys[-1])
        mean = [jnp.where(go, x, jnp.nan) for x in uncut(jax.vmap(decode)(comm.gather(own)), bucket)]

        if self.feedback:
            left = jnp.where(go, parts - jax.vmap(decode)(payloads), parts)
            state = dataclasses.replace(state, error=bucket.join(uncut(left, bucket)))
        state = dataclasses.replace(state, owned=owned.after(total - decode(own), rank, go))
        return mean, state, jnp.sum(bits) + jnp.float32(own_bits)


def gather_mean(
    payload: Array, decode: Callable[[Array], Array], shape: tuple[int, ...], comm: Comm, go: Array
) -> Array:
    """The mean over workers of decode(payload), float32 of this shape; NaN unless `go`.

    >>> import types, jax.numpy as jnp, gcjax.extend as gx
    >>> comm = types.SimpleNamespace(size=2, gather=lambda x: jnp.stack([x, 3 * x]))  # stands for a `Comm`
    >>> print(gx.gather_mean(jnp.uint32([1, 2]), jnp.float32, (2,), comm, go=True))
    [2. 4.]
    """
    start = jnp.full(shape, jnp.where(go, 0.0, jnp.nan), jnp.float32)
    return add_decoded(start, comm.gather(payload), decode)


def parameters_only(x: Array, bucket: Bucket) -> Array:
    """A bucket's array with its padding set to zero.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(leaf=0, begin=0, size=3, word=0, shape=(3,)),))
    >>> print(gx.parameters_only(jnp.ones(bucket.shape), bucket).sum())
    3.0
    """
    if bucket.entries == bucket.size:
        return x
    return jnp.where(unpack_mask(jnp.asarray(bucket.valid_words())), x, 0)
