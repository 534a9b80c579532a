"""DRIVE and EDEN: rotate at random, then send signs or a few levels of the rotated entries and one scale per block.

**Source.** Shay Vargaftik, Ran Ben Basat, Amit Portnoy, Gal Mendelson, Yaniv Ben-Itzhak, Michael Mitzenmacher, "DRIVE:
One-bit Distributed Mean Estimation", NeurIPS 2021, arXiv 2105.08339, with the randomised Hadamard transform; with more
bits, the same authors' "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
ICML 2022, arXiv 2108.08842. The levels are those of Joel Max, "Quantizing for Minimum Distortion", 1960.

**Wire format.** One uint32 vector per worker and bucket: 2 words that seed the rotation; the entries of leaves with
fewer than 256, as float32 with the rotation's changes of sign; then for each block size, smallest first, a float32
scale for each block, and `bits` packed masks (`gcjax.extend.pack_mask`) of all its blocks, laid out like one leaf. The
first bits - 1 masks are the level, lowest bit first; the last is the sign, 1 for negative. In two phases: such a vector
to each owner, for its pieces of the leaves; then one from each owner to all.

**Deviations.** Every leaf is rotated in its own blocks, the last one padded with zeros. The papers rotate the whole
model, which would spread the error of large leaves to small ones. A block size is a power of 4, so the transform is two
small matrix products instead of log2 d passes. Its entries are in another order than in textbooks, which changes
nothing. Leaves of fewer than 256 entries are sent as they are, because the code of a small block is biased. EDEN's
fractional bits are left out.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._kernels.bits import WORD
from gcjax._kernels.buckets import pack_vector, packed_vector_size, unpack_vector
from gcjax._kernels.floats import to_unit
from gcjax._kernels.hashing import hash_words, seed_words
from gcjax._types import Array, AxisNames
from gcjax._validation import check_choice, check_flag, check_integer, check_random_key
from gcjax.extend import Bucket, bits_float, compress, dense_codec, float_bits, unpack_mask

BLOCKS = (256, 1024, 4096, 16384)  # blocks of 64 had ten times the bias of 256

# The levels that code the magnitude of a standard normal number with the least squared error, up to a scale.
LEVELS = {
    1: (1.0,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def drive_compress(
    bits: int = 1,
    *,
    block: int = 4096,
    feedback: bool = False,
    key: Array,
    transport: str = "all_gather",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
    overlap: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends every entry of the randomly rotated gradient as a sign or one of a few levels, and a scale per block.

        S = sum(x**2) / sum(|R x|)
        y = S * inverse(R) sign(R x)

    with R the Hadamard transform after random changes of sign, drawn anew by every worker in every step. For any
    gradient the rotated entries of a block are nearly normal, so their signs carry most of it. The update is the mean
    over workers of y; the workers' errors are independent, so p workers have 1/p of the squared error of one. With more
    bits, sign(R x) becomes Q(R x), the nearest of the 2**bits best levels for a normal number, and sum(|R x|) becomes
    sum(R x * Q(R x)). With `feedback`, x is the gradient plus a residual e, the scale has the least squared error,
    S = sum(|R x|) / d or sum(R x * Q(R x)) / sum(Q(R x)**2), and e <- x - y.

    The squared error is about 0.57, 0.13, 0.036, 0.0096 of the block's sum(x**2) for 1 to 4 bits, or 0.36, 0.12, 0.035,
    0.0095 with `feedback`. It is spread evenly over the block, including entries that were zero.

    In two phases each leaf is cut into a piece for each worker, its owner, and every piece is rotated in blocks of its
    own. The owner sends the mean in the same way, with the scale of least squared error, and adds what that leaves to
    the next mean.

    State: none; with `feedback` a float32 per parameter. In two phases with p workers a float32 for each p-th more, so
    the state is initialised where the number of workers is known (`gcjax.distribute`). Wire: `bits` bits per parameter
    and 32 per block, to every other worker ("all_gather") or twice in all ("two_phase"), each leaf rounded up to whole
    blocks. Leaves and pieces of fewer
    than 256 entries take 32 bits per entry. Every worker rotates once, and rotates back once per worker (in two phases
    twice in all), with 2 sqrt(block) multiplications per entry; on a CPU each rotation takes as long as about 5
    additions of two vectors of gradient length. Learning rate, weight decay and momentum come after it:
    `optax.chain(gcjax.drive_compress(key=key), optax.sgd(0.1))`.

    Args:
      bits: bits per entry, 1 (DRIVE) to 4 (EDEN).
      block: largest block that is rotated: 256, 1024, 4096 or 16384 entries. Smaller leaves have smaller blocks.
      feedback: keep what was not sent, and send it later.
      key: random key, made by `jax.random.key(seed)`; the same on all workers.
      transport: as in `gcjax.ef_sign_compress`.
      axis_name, inner_axis_name, overlap: as in `gcjax.compress`.

    Raises:
      ValueError: for an unsupported number of bits, block size or transport.
      TypeError: for `bits` that are not an int, a `feedback` that is not a bool, or a missing key.

    **Randomness**: the rotation's signs; per message. **Bias**: with a uniformly drawn rotation there would be none
    without `feedback`. With this rotation the mean of many draws is off by up to 1 % of the gradient's norm in a block
    of 256, and less in larger blocks. If only a few entries of a block are not zero, the largest of them become too
    large and the others too small. With `feedback` it is biased, which the residual corrects. **Non-finite input**: the
    update is NaN on all workers and every worker's state stays as it was.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.drive_compress(key=jax.random.key(0))
    >>> g = jnp.zeros(256).at[1].set(3.0)  # all rotated entries have the same magnitude, so the signs are exact
    >>> update, state = tx.update(g, tx.init(g))
    >>> print(update[:4])
    [0. 3. 0. 0.]
    """
    check_integer("bits", bits, 1, max(LEVELS))
    check_choice("block", block, BLOCKS)
    check_flag("feedback", feedback)
    check_random_key("key", key)

    def encode(x, bucket, key):
        return encoded(x, bucket, key, feedback)

    def encode_mean(x, bucket, key):
        return encoded(x, bucket, key, True)

    def encoded(x, bucket, key, least_error):
        words = seed_words(key)
        leaves = bucket.split(_flip(x, words))
        message, length = [words], 64
        for d, numbers in _leaves_by_block(bucket, block).items():
            padded = [jnp.pad(leaves[i].reshape(-1), (0, -leaves[i].size % d)) for i in numbers]
            scale, planes = _encode_blocks(jnp.concatenate(padded).reshape(-1, d), bits, least_error)
            message += [float_bits(scale), planes]
            length += len(scale) * (32 + (bits * d if d > 1 else 0))
        return jnp.concatenate(message), length

    def decode(payload, bucket):
        begin, leaves = 2, [jnp.zeros(0)] * len(bucket.segments)
        for d, numbers in _leaves_by_block(bucket, block).items():
            counts = [math.ceil(bucket.segments[i].size / d) for i in numbers]
            end = begin + sum(counts)
            planes = payload[end : end + (packed_vector_size(sum(counts) * d, bits) if d > 1 else 0)]
            y = _decode_blocks(bits_float(payload[begin:end]), planes, d, bits)
            for i, piece in zip(numbers, jnp.split(y, np.cumsum(counts)[:-1]), strict=True):
                leaves[i] = piece.reshape(-1)[: bucket.segments[i].size]
            begin = end + len(planes)
        return _flip(bucket.join(leaves), payload[:2])

    codec = dense_codec(encode, decode, feedback=feedback, key=key, transport=transport, encode_mean=encode_mean)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name, overlap=overlap)


def _leaves_by_block(bucket: Bucket, block: int) -> dict[int, list[int]]:
    """Block size, smallest first -> the numbers of the segments with blocks of this size.

    It is the largest that exceeds neither `block` nor the leaf, or 1 for a leaf that is not rotated.
    """
    by_size: dict[int, list[int]] = {}
    for i, s in enumerate(bucket.segments):
        by_size.setdefault(max(d for d in (1, *BLOCKS) if d <= min(s.size, block)), []).append(i)
    return dict(sorted(by_size.items()))


def _encode_blocks(x: Array, bits: int, feedback: bool) -> tuple[Array, Array]:
    """float32[blocks, d] -> their scales, and the bit planes of signs and levels. A block of 1 is its own scale."""
    d, levels = x.shape[1], LEVELS[bits]
    if d == 1:
        return x[:, 0], jnp.zeros(0, jnp.uint32)
    unit = to_unit(jnp.max(jnp.abs(x), axis=1, keepdims=True))  # keeps squares in float32's range
    z = _hadamard(x * unit)
    energy = _sums(z * z)
    level = _nearest(jnp.abs(z), jnp.sqrt(energy / d), levels)
    q = _look_up(level, levels)
    product = _sums(jnp.abs(z) * q)
    # z is sqrt(d) Rx in this unit, and the decoder applies sqrt(d) times the inverse of R.
    scale = product / (d * _sums(q * q)) if feedback else energy / (d * jnp.where(product > 0, product, 1))
    code = (level | jnp.where(z < 0, jnp.uint32(1 << (bits - 1)), 0)).reshape(-1)
    return (scale / unit)[:, 0], pack_vector(code, bits)


def _sums(x: Array) -> Array:
    return jnp.sum(x, axis=1, keepdims=True)


def _decode_blocks(scale: Array, planes: Array, d: int, bits: int) -> Array:
    """The inverse: float32[blocks, d]."""
    if d == 1:
        return scale[:, None]
    sign = 1 << (bits - 1)
    code = unpack_vector(planes, bits, len(scale) * d)
    q = _look_up(code & (sign - 1), LEVELS[bits])
    return _hadamard(jnp.where(code & sign != 0, -q, q).reshape(-1, d)) * scale[:, None]


def _flip(x: Array, words: Array) -> Array:
    """A bucket's array with about half of the signs changed, drawn from the two words. Its own inverse."""
    flips = unpack_mask(hash_words(words, jnp.arange(x.size // WORD)))
    return bits_float(float_bits(x) ^ (flips.astype(jnp.uint32) << 31))


def _hadamard(x: Array) -> Array:
    """The Walsh-Hadamard transform of each block, [blocks, d] -> [blocks, d], unscaled: applied twice it gives d * x.

    For a block as a square matrix X this is H (H X)^T = (H X H)^T with the textbook's matrix H.
    """
    side = math.isqrt(x.shape[1])
    h = np.ones((1, 1), np.float32)
    while len(h) < side:
        h = np.block([[h, h], [h, -h]])

    def transform_rows(x):
        return jnp.matmul(x.reshape(-1, side), h, precision=lax.Precision.HIGHEST)

    transposed = transform_rows(x).reshape(-1, side, side).swapaxes(1, 2)
    return transform_rows(transposed).reshape(x.shape)


def _nearest(magnitude: Array, unit: Array, levels: tuple[float, ...]) -> Array:
    """Number of the level nearest to magnitude / unit, uint32."""
    number = jnp.zeros(magnitude.shape, jnp.uint32)
    for below, above in itertools.pairwise(levels):
        number += magnitude > (below + above) / 2 * unit
    return number


def _look_up(number: Array, levels: tuple[float, ...]) -> Array:
    """Levels by their numbers, without a gather, which would be slower."""
    value = jnp.full(number.shape, levels[0], jnp.float32)
    for k in range(1, len(levels)):
        value = jnp.where(number == k, levels[k], value)
    return value
