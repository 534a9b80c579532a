"""DRIVE and EDEN: rotate at random, send signs or a few levels of what comes out and one scale a block.

**Source.** Shay Vargaftik, Ran Ben Basat, Amit Portnoy, Gal Mendelson, Yaniv Ben-Itzhak, Michael Mitzenmacher, "DRIVE:
One-bit Distributed Mean Estimation", NeurIPS 2021, arXiv 2105.08339, with the randomised Hadamard transform; with more
bits, the same authors' "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
ICML 2022, arXiv 2108.08842. The levels are those of Joel Max, "Quantizing for Minimum Distortion", 1960.

**Wire format.** One uint32 vector per worker and bucket: 2 words that stand for the rotation; the entries of leaves
with fewer than 256, as float32, signs changed as by the rotation; then for each size of blocks, smallest first, a
float32 scale for each block, and `bits` packed masks, one bit an entry each, entry i in bit i % 32 of word i // 32. The
first bits - 1 masks are the level, lowest bit first; the last is the sign, 1 for negative.

**Deviations.** Every leaf is rotated in blocks of its own, the last one filled up with zeros; the papers rotate the
model as a whole, by which the error of large leaves would reach small ones. A block is a power of 4, so that its
transform is two small matrix products, not log2 d passes. Its entries come out in another order than the textbook's,
which changes nothing. Leaves of fewer than 256 entries are sent as they are: the code of so few is biased. EDEN also
has fractions of a bit; not so here.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._kernels.bits import LANES, to_unit, words_for
from gcjax._kernels.buckets import join
from gcjax._kernels.hashing import hash_words, seed_words
from gcjax._validation import check_choice, check_flag, check_integer, check_random_key
from gcjax.extend import (
    Bucket,
    Groups,
    Segment,
    bits_float,
    compress,
    float_bits,
    gather_codec,
    pack_planes,
    unpack_mask,
    unpack_planes,
)

BLOCKS = (256, 1024, 4096, 16384)  # blocks of 64 had ten times the bias of 256

# The magnitudes that code a standard normal number with the least squared error (1 bit: the scale makes up for it).
LEVELS = {
    1: (1.0,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def drive_compress(
    bits=1, *, block=4096, feedback=False, key, axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends every entry of the randomly rotated gradient as a sign, or as one of a few levels, and a scale a block.

    .. math::
        S = \frac{\|x\|_2^2}{\|Rx\|_1}, \qquad y = S\, R^{-1} \mathrm{sign}(Rx)

    with R the Hadamard transform after random changes of sign, drawn anew for every worker and step: the rotated
    entries of a block are nearly normal, whatever the gradient, so that their signs carry most of it. The update is the
    mean over workers of y; the workers' errors are independent, and p of them have a p-th of one's. With more bits,
    sign(Rx) gives way to Q(Rx), the nearest of the 2**bits best levels for a normal number, and the norm in S to
    :math:`\langle Rx, Q(Rx) \rangle`. With `feedback`, x is the gradient plus a residual e, the scale that of the least
    squared error, :math:`S = \|Rx\|_1 / d` or :math:`\langle Rx, Q(Rx) \rangle / \|Q(Rx)\|_2^2`, and
    :math:`e \leftarrow x - y`.

    The squared error is about 0.57, 0.13, 0.036, 0.0096 of the block's :math:`\|x\|_2^2` for 1 to 4 bits, with
    `feedback` 0.36, 0.12, 0.035, 0.0095. It spreads evenly over the block, also over entries that were zero.

    Costs `bits` bits per parameter and 32 per block on the wire, and no state; with `feedback` a float32 per parameter.
    Every worker rotates once and rotates back once for each worker, at 2 sqrt(block) multiplications an entry; on a CPU
    each takes as long as some 5 additions of two vectors of gradient length. Learning rate, weight decay and momentum
    come after it: `optax.chain(gcjax.drive_compress(key=key), optax.sgd(0.1))`.

    Args:
      bits: bits for each entry, 1 (DRIVE) to 4 (EDEN).
      block: the most entries that are rotated together: 256, 1024, 4096 or 16384. Of a smaller leaf there are fewer.
      feedback: keep what was not sent, and send it later.
      key: from `jax.random.key`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a number of bits or a block that is not offered.
      TypeError: for `bits` that are not an int, a `feedback` that is not a bool, or a missing key.

    **Randomness**: the rotation's signs; per worker. **Bias**: without `feedback` none for a rotation drawn evenly from
    all. For this one the mean of many is off by up to a hundredth of the gradient's norm in a block of 256 and by less
    in larger ones; but where only a few entries of a block are not zero, the largest of them come out too large and the
    others too small. With `feedback` biased, made up for by the residual. **Non-finite input**: the update is NaN on
    all workers and every worker's state stays as it was.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.drive_compress(key=jax.random.key(0))
    >>> g = jnp.zeros(256).at[1].set(3.0)  # rotated, all entries are of one size: their signs tell everything
    >>> update, state = tx.update(g, tx.init(g))
    >>> print(update[:4])
    [0. 3. 0. 0.]
    """
    check_integer("bits", bits, 1, max(LEVELS))
    check_choice("block", block, BLOCKS)
    check_flag("feedback", feedback)
    check_random_key("key", key)

    def encode(x, bucket: Bucket, key):
        words = seed_words(key)
        x = _flip(x, words)
        message, length = [words], 64
        for d, segments in _cut(bucket, block).items():
            filled = [jnp.pad(x[s.offset : s.offset + s.size], (0, -s.size % d)) for s in segments]
            scale, planes = _encode_blocks(jnp.concatenate(filled), d, bits, feedback)
            message += [float_bits(scale), planes]
            length += len(scale) * (32 + (bits * d if d > 1 else 0))
        return jnp.concatenate(message), length

    def decode(payload, bucket: Bucket):
        cut, begin, parts = _cut(bucket, block), 2, []
        for d, segments in cut.items():
            sizes = [math.ceil(s.size / d) * d for s in segments]
            end = begin + sum(sizes) // d
            planes = payload[end : end + (bits * words_for(sum(sizes)) if d > 1 else 0)]
            y = _decode_blocks(bits_float(payload[begin:end]), planes, d, bits)
            pieces = jnp.split(y, np.cumsum(sizes)[:-1])
            parts += [(s.offset, piece[: s.size]) for s, piece in zip(segments, pieces, strict=True)]
            begin = end + len(planes)
        return _flip(join(bucket.size, parts), payload[:2])

    codec = gather_codec(encode, decode, feedback=feedback, key=key)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _cut(bucket: Bucket, block: int) -> dict[int, list[Segment]]:
    """Size of blocks, smallest first -> the leaves cut into such: the largest up to `block` and the leaf's, else 1."""
    by_size: dict[int, list[Segment]] = {}
    for s in bucket.segments:
        by_size.setdefault(max(d for d in (1, *BLOCKS) if d <= min(s.size, block)), []).append(s)
    return dict(sorted(by_size.items()))


def _encode_blocks(x, d: int, bits: int, feedback: bool):
    """Blocks of d entries -> their scales and the planes of what goes with them; an entry alone is its own scale."""
    if d == 1:
        return x, jnp.zeros(0, jnp.uint32)
    blocks, levels = _blocks(len(x) // d, d), LEVELS[bits]
    unit = to_unit(*blocks.maxima(jnp.abs(x)))  # keeps squares in float32's range
    z = _hadamard(x * blocks.per_entry(unit), d)
    (energy,) = blocks.sums(z * z)
    level = _nearest(jnp.abs(z), blocks.per_entry(jnp.sqrt(energy / d)), levels)
    q = _look_up(level, levels)
    product, own = blocks.sums(jnp.abs(z) * q, q * q)
    # z is sqrt(d) Rx in these units, and what the decoder applies is sqrt(d) times the inverse of R.
    scale = product / (d * own) if feedback else energy / (d * jnp.where(product > 0, product, 1))
    return scale / unit, pack_planes(level | jnp.where(z < 0, jnp.uint32(1 << (bits - 1)), 0), bits)


def _decode_blocks(scale, planes, d: int, bits: int):
    if d == 1:
        return scale
    blocks, sign = _blocks(len(scale), d), 1 << (bits - 1)
    code = unpack_planes(planes, bits, blocks.size)
    q = _look_up(code & (sign - 1), LEVELS[bits])
    return _hadamard(jnp.where(code & sign != 0, -q, q), d) * blocks.per_entry(scale)


def _blocks(count: int, d: int) -> Groups:
    words = d // LANES
    ranges = tuple((k * words, (k + 1) * words) for k in range(count))
    return Groups(ranges, (d,) * count, words_for(count * d), count * d)


def _flip(x, words):
    """Changes the signs of half of the entries of x, drawn from the two words; done twice it changes nothing."""
    flips = unpack_mask(hash_words(words, jnp.arange(words_for(len(x)))), len(x))
    return bits_float(float_bits(x) ^ (flips.astype(jnp.uint32) << 31))


def _hadamard(x, block: int):
    """The Walsh-Hadamard transform of each block of x, unscaled: applied twice it gives block * x.

    With a block as a square matrix X this is H (H X)^T = (H X H)^T, H the textbook's matrix: rows, turned, rows again.
    """
    side = math.isqrt(block)
    h = np.ones((1, 1), np.float32)
    while len(h) < side:
        h = np.block([[h, h], [h, -h]])

    def transform_rows(x):
        return jnp.matmul(x.reshape(-1, side), h, precision=lax.Precision.HIGHEST)

    turned = transform_rows(x).reshape(-1, side, side).swapaxes(1, 2)
    return transform_rows(turned).reshape(-1)


def _nearest(magnitude, unit, levels):
    """Number of the level nearest to magnitude / unit, uint32."""
    number = jnp.zeros(magnitude.shape, jnp.uint32)
    for below, above in itertools.pairwise(levels):
        number += magnitude > (below + above) / 2 * unit
    return number


def _look_up(number, levels):
    """Levels by their numbers; a gather would be slower."""
    value = jnp.full(number.shape, levels[0], jnp.float32)
    for k in range(1, len(levels)):
        value = jnp.where(number == k, levels[k], value)
    return value
