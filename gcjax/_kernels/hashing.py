"""Random bits by hashing positions: for random numbers of gradient length, and for the hash functions of sketches.

The bits of a `jax.random` key at position i are a mixing hash of i and of two words of the key. On CPU
`jax.random.bits` of gradient length took seven times as long as adding two arrays; this takes no longer than the pass
that uses it. The mixer is Chris Wellons' "lowbias32" (https://nullprogram.com/blog/2018/07/31/).
"""

import jax
import jax.numpy as jnp

from gcjax._kernels.buckets import Bucket
from gcjax._types import Array, ArrayLike


def step_key(key: Array, step: Array, bucket: Bucket, rank: Array | None = None) -> Array:
    """The random key of one update of one bucket: the same on all workers, or with `rank` each worker's own.

    >>> import jax, jax.numpy as jnp, gcjax.extend as gx
    >>> bucket = gx.Bucket((gx.Segment(leaf=0, begin=0, size=3, word=0, shape=(3,)),))
    >>> key = jax.random.key(0)
    >>> bool(gx.step_key(key, 1, bucket) == gx.step_key(key, 2, bucket))
    False
    """
    first = bucket.segments[0]
    key = jax.random.fold_in(jax.random.fold_in(key, step), first.leaf)
    key = jax.random.fold_in(key, first.begin)  # a leaf may be split into several buckets
    return key if rank is None else jax.random.fold_in(key, rank)


def hash_bits(key: Array, position: Array) -> Array:
    """uint32 random bits of the shape of `position` (non-negative integers).

    >>> import jax, jax.numpy as jnp, gcjax.extend as gx
    >>> bits = gx.hash_bits(jax.random.key(0), jnp.arange(1000))
    >>> print(bits.dtype, bits.shape)
    uint32 (1000,)
    """
    offset, mask = jax.random.bits(key, (2,), jnp.uint32)
    return _mix(quick_bits(offset, position) ^ mask)


def quick_bits(offset: Array, position: Array) -> Array:
    """`hash_bits` from one word, with half the work. Another offset gives the same sequence, shifted."""
    return _mix(position.astype(jnp.uint32) + offset)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(key: Array, position: Array) -> Array:
    """float32 of the shape of `position` (non-negative integers), uniform in [0, 1), multiples of 2**-24.

    >>> import jax, jax.numpy as jnp, gcjax.extend as gx
    >>> x = gx.uniform(jax.random.key(0), jnp.arange(1000))
    >>> print(x.shape, x.min() >= 0, x.max() < 1, x.mean().round(1))
    (1000,) True True 0.5
    """
    return (hash_bits(key, position) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def scatter_positions(size: int, count: int, step: ArrayLike) -> Array:
    """int32[count] positions below `size`, one at a hashed place in each of `count` equal stretches; all if they fit.

    They depend on `step` (int32) alone. They are not independent, but miss any period of the data.
    """
    if size <= count:
        return jnp.minimum(jnp.arange(count, dtype=jnp.int32), max(size - 1, 0))
    slot = jnp.arange(count, dtype=jnp.uint32)
    stretch, rest = divmod(size, count)
    # slot * rest is at most 2**32 - 2**16 for up to 2**16 stretches; some stretches are one longer.
    begin, end = (number * stretch + number * rest // count for number in (slot, slot + 1))
    length = end - begin if rest else stretch
    return (begin + _mix(slot ^ _mix(jnp.uint32(step) + 1)) % length).astype(jnp.int32)
