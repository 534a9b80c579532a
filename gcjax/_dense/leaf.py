"""The lift for authors from outside: a method as two functions over the plain array of a leaf, as in GRACE.

**Source** of the interface: Hang Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine
Learning", ICDCS 2021, doi 10.1109/ICDCS51616.2021.00060.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gcjax._core.compressor import Compressor, StepInput, StepResult, dense_report
from gcjax._dense.parts import add_decoded
from gcjax._kernels.buckets import Bucket, Segment, split_vector
from gcjax._kernels.hashing import step_key
from gcjax._types import Array, PyTree
from gcjax._validation import check_flag, check_function
from gcjax._xla import kept_unless

# The second is a random key in a method with one, else None: `compress` may be typed for either.
Compress = Callable[[Array, Any], PyTree]
Decompress = Callable[[PyTree, tuple[int, ...]], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeafState:
    """State of one worker and bucket, for a method of `leaf_codec`.

    Attributes:
      errors: with feedback float32 of each leaf's shape, what the receivers have not yet seen; () without.
      step: int32, updates done.
      bucket: where the leaves lie. Static.
    """

    errors: tuple[Array, ...]
    step: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, what this worker has taken in and not yet sent."""
        return self.bucket.join(self.errors) if self.errors else jnp.zeros(self.bucket.shape)


def leaf_codec(
    compress: Compress, decompress: Decompress, *, feedback: bool = True, key: Array | None = None
) -> Compressor[LeafState]:
    """A compressor made of two functions over the plain array of a leaf.

    Every worker's arrays go to all workers in one all-gather, bit by bit in their own dtypes, and each worker averages
    the decompressed leaves. `dense_codec` has owners too, and `sparse_method` lengths that follow the data.

    Args:
      compress: compress(x, key) -> an array or a pytree of arrays to send, of 1, 2 or 4 bytes an entry, with shapes
        that follow from the shape of x. x, float32 of the leaf's shape, is the gradient plus, with `feedback`, the
        residual. key is this worker's own for this step and leaf, or None.
      decompress: decompress(arrays, shape) -> floats of the leaf's shape, as the receivers see it. A leaf of more than
        2**28 entries comes in flat parts.
      feedback: keep what the receivers have not seen, and add it to the next gradient: for biased methods.
      key: random key, the same on all workers, for a method that draws random numbers.

    Raises:
      TypeError: an argument of the wrong type; (from `update`) a result of `compress` or `decompress` of another form.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> def compress(x, key):  # int8 and a scale
    ...     scale = jnp.maximum(jnp.max(jnp.abs(x)), 1e-30) / 127
    ...     return jnp.round(x / scale).astype(jnp.int8), scale
    >>> def decompress(arrays, shape):
    ...     return arrays[0] * arrays[1]
    >>> tx = gx.compress(gx.leaf_codec(compress, decompress))
    >>> print(tx.update(jnp.array([127.0, -64.4]), tx.init(jnp.zeros(2)))[0])
    [127. -64.]
    """
    check_function("compress", compress, "lambda x, key: x.astype(jnp.bfloat16)")
    check_function("decompress", decompress, "lambda arrays, shape: arrays.astype(jnp.float32)")
    check_flag("feedback", feedback)

    def init(bucket: Bucket) -> LeafState:
        errors = tuple(jnp.zeros(s.shape) for s in bucket.segments) if feedback else ()
        return LeafState(errors, jnp.int32(0), bucket)

    def update(step: StepInput, state: LeafState) -> StepResult[LeafState]:
        bucket, comm, go = state.bucket, step.comm, step.go
        leaves = tuple(step.gradient)
        if feedback:
            leaves = kept_unless(go, tuple(e + g for e, g in zip(state.errors, leaves, strict=True)), state.errors)
        own_key = None if key is None else step_key(key, state.step, bucket, comm.rank())
        payloads = [_payload(compress, x, own_key, number) for number, x in enumerate(leaves)]
        gathered = comm.gather(jnp.concatenate([p.words for p in payloads]))

        def mean_of(words: Array, payload: _Payload, segment: Segment) -> Array:
            start = jnp.full(segment.shape, jnp.where(go, 0.0, jnp.nan), jnp.float32)
            return add_decoded(start, words, lambda words: _restored(decompress, payload, words, segment.shape))

        ends = np.cumsum([len(p.words) for p in payloads])[:-1]
        parts = list(zip(jnp.split(gathered, ends, axis=1), payloads, bucket.segments, strict=True))
        mean = [mean_of(*part) for part in parts]
        errors = state.errors
        if feedback:
            seen = [_restored(decompress, p, p.words, s.shape) for _, p, s in parts]
            errors = kept_unless(go, tuple(x - y for x, y in zip(leaves, seen, strict=True)), state.errors)
        report = dense_report(bucket.entries, sum(p.bits for p in payloads))
        return StepResult(mean, LeafState(errors, state.step + go, bucket), report)

    return Compressor(init, update)


class _Payload(NamedTuple):
    """The arrays for one leaf, as words.

    Attributes:
      words: uint32.
      like: the arrays' shapes and dtypes.
      bits: length without padding.
    """

    words: Array
    like: PyTree
    bits: int


def _payload(compress: Compress, x: Array, key: Array | None, number: int) -> _Payload:
    arrays = compress(x, None if key is None else jax.random.fold_in(key, number))
    leaves = jax.tree.leaves(arrays)
    wrong = [a for a in leaves if not isinstance(a, jax.Array) or a.dtype.itemsize not in (1, 2, 4)]
    if wrong or not leaves:
        raise TypeError(f"compress must return arrays of 1, 2 or 4 bytes an entry, got {_kind(wrong)}")
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    return _Payload(jnp.concatenate([_words_of(a) for a in leaves]), like, sum(8 * a.nbytes for a in leaves))


def _kind(wrong: list[PyTree]) -> str:
    if not wrong:
        return "nothing"
    return f"{wrong[0].dtype}{list(wrong[0].shape)}" if hasattr(wrong[0], "dtype") else repr(wrong[0])


def _restored(decompress: Decompress, payload: _Payload, words: Array, shape: tuple[int, ...]) -> Array:
    like, structure = jax.tree.flatten(payload.like)
    parts = split_vector(words, [(_size(a),) for a in like])
    x = decompress(jax.tree.unflatten(structure, map(_array_of, parts, like)), shape)
    if jnp.shape(x) != shape or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(
            f"decompress must return floats of the leaf's shape {shape}, got {jnp.result_type(x)}{list(jnp.shape(x))}"
        )
    return x.astype(jnp.float32)


def _size(like: jax.ShapeDtypeStruct) -> int:
    """Words of an array."""
    return -(-math.prod(like.shape) * like.dtype.itemsize // 4)


def _words_of(x: Array) -> Array:
    """The bits of an array, uint32, padded with zeros to whole words."""
    x = x.astype(jnp.uint8).reshape(-1) if x.dtype == bool else x.reshape(-1)
    per_word = 4 // x.dtype.itemsize
    rows = jnp.pad(x, (0, -len(x) % per_word)).reshape((-1, per_word) if per_word > 1 else -1)
    return lax.bitcast_convert_type(rows, jnp.uint32)


def _array_of(words: Array, like: jax.ShapeDtypeStruct) -> Array:
    """The inverse of `_words_of`."""
    dtype = jnp.uint8 if like.dtype == bool else like.dtype
    flat = lax.bitcast_convert_type(words, dtype).reshape(-1)[: math.prod(like.shape)]
    return flat.reshape(like.shape).astype(like.dtype)
