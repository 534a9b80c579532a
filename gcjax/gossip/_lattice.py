"""The modulo lattice: sends a vector in a few bits per entry to a receiver that holds a near one, and detects failure.

**Source.** Peter Davies, Vijaykrishna Gurunathan, Niusha Moshrefi, Saleh Ashkboos, Dan Alistarh, "New Bounds For
Distributed Mean Estimation and Variance Reduction", ICLR 2021, arXiv 2002.09268: the cubic lattice with a colour per
point; SwarmSGD (arXiv 1910.12308) sends models with it. The error depends on the distance between the two vectors, not
on their norm.

**Wire format.** uint32[1 + bits * words]: a checksum, then `bits` packed masks of as many words as the bucket uses,
lowest bit first: the integer of each entry modulo 2**bits.

**Deviations.** Rounding is stochastic and therefore unbiased. The checksum covers the whole integers, before the
modulo: if any is decoded wrongly, the two agree with a probability of about 2**-32. A scale for each entry replaces the
random rotation.
"""

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.bits import pack_planes, unpack_planes
from gcjax._kernels.floats import TINY, exponent, magnitude_bits, power_of_two
from gcjax._kernels.hashing import quick_bits, uniform
from gcjax._types import Array, ArrayLike

FINEST = 2.0**-24  # of a vector's largest entry: float32 resolves nothing finer, so no scale needs to be
_LIMIT = 1 << 30  # larger integers could overflow int32
_STRIDE = 0x9E3779B1  # prime, near 2**32 / golden ratio: neighbouring places get distant numbers


def lattice_points(x: Array, scale: ArrayLike, key: Array) -> tuple[Array, Array]:
    """Every entry's lattice point scale * z, with z one of the two integers around x / scale, drawn to have the mean x.

    The error is below `scale`. Two senders with the same key and scale draw alike: equal entries give equal points.

    Args:
      x: float32[blocks, 32, 128], zero where it is padding.
      scale: float32, positive, a scalar or one that broadcasts to x; the receiver must know it. Powers of two make
        scale * z exact.
      key: random key.

    Returns:
      z, int32 of the shape of x, and a bool: whether all entries are finite and below 2**30 scales.
    """
    share = x / scale
    low = jnp.floor(share)
    return _as_integers(low + (uniform(key, _places(x)) < share - low))


def encode_points(points: Array, in_range: Array, bits: int, words: int) -> Array:
    """The result of `lattice_points` modulo 2**bits: uint32[1 + bits * words], the checksum first.

    Unless `in_range`, `decode` rejects the checksum. `bits` is 4 to 16; `words` are the mask words that are used.
    """
    checksum = _checksum(points)
    checksum = jnp.where(in_range, checksum, ~checksum)
    return jnp.concatenate([checksum[None], pack_planes(points & ((1 << bits) - 1), bits, words)])


def decode(words: Array, reference: Array, scale: ArrayLike, bits: int) -> tuple[Array, Array]:
    """Recover the sent points: of all points with these low bits, the ones nearest to the receiver's own vector.

    Args:
      words: as `encode_points` returns them.
      reference: float32[blocks, 32, 128], the receiver's own vector. Decoding is certain to be right while
        |x - reference| <= margin(scale, bits).
      scale: as given to `lattice_points`.
      bits: as given to `encode_points`.

    Returns:
      float32[blocks, 32, 128], and a bool: whether the checksum agrees. If it does not, the values are meaningless.
    """
    nearest, in_range = _as_integers(jnp.round(reference / scale))
    sent = unpack_planes(words[1:], bits).astype(jnp.int32)
    unused = 32 - bits
    points = nearest + (((sent - nearest) << unused) >> unused)  # the difference as a signed number of `bits` bits
    return points.astype(jnp.float32) * scale, in_range & (_checksum(points) == words[0])


def margin(scale: Array | float, bits: int) -> Array | float:
    """The largest distance between sender and receiver at which decoding never fails."""
    return scale * (2 ** (bits - 1) - 1.5)


def scale_for(distance: ArrayLike, bits: int) -> Array:
    """The smallest power of two whose margin is at least `distance` (finite), and at least 2**-126."""
    wanted = jnp.maximum(distance / jnp.float32(margin(1, bits)), TINY)
    return power_of_two(exponent(magnitude_bits(wanted) + jnp.uint32((1 << 23) - 1)))


def _as_integers(x: Array) -> tuple[Array, Array]:
    in_range = jnp.abs(x) < _LIMIT  # False for NaN
    return jnp.where(in_range, x, 0).astype(jnp.int32), jnp.all(in_range)


def _checksum(points: Array) -> Array:
    place = _places(points) * jnp.uint32(_STRIDE)
    return jnp.sum(quick_bits(place, lax.bitcast_convert_type(points, jnp.uint32)), dtype=jnp.uint32)


def _places(x: Array) -> Array:
    return jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
