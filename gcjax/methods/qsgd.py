"""QSGD: every entry is rounded to one of a few evenly spaced levels, relative to the norm of its block, without bias.

**Source.** Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", NeurIPS 2017, arXiv 1610.02132: the quantiser Q_s, its Elias coding, and the blocks
and maximum norm of the experiments. The paper calls the blocks buckets.

**Wire format.** One uint32 vector per worker and bucket: a float32 norm for each block; then `bits` packed masks with
one bit per entry (`gcjax.extend.pack_mask`). The first bits - 1 masks are the level, lowest bit first; the last is the
sign, 1 for negative. A block is the entries of bucket_size / 32 neighbouring mask words of a leaf, or fewer at its end.
In two phases: such a vector to each owner, for its pieces of the leaves; then one from each owner to all.

**Deviations.** The paper's blocks are consecutive entries; these are tiles of 32 rows. Elias coding has no static size:
with encoding="elias" the packed words are sent all the same, and the report has the length of the code, in which the
distance between two entries counts the bits of the mask between them, word by word, padding included. As in the paper,
nothing marks the end of a block. s is 2**(bits - 1) - 1, what `bits` bits can hold with the sign; the paper leaves it
free. bits=1 leaves no level, so the sign is drawn, which the paper does not have.
"""

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._kernels.bits import LANES, WORD, reduce_rows
from gcjax._kernels.floats import to_unit
from gcjax._types import Array, AxisNames
from gcjax._validation import check_choice, check_integer, check_random_key
from gcjax.extend import (
    Groups,
    bits_float,
    block_groups,
    compress,
    dense_codec,
    float_bits,
    pack_mask,
    pack_planes,
    uniform,
    unpack_planes,
)


def qsgd_compress(
    bits: int = 4,
    bucket_size: int = 512,
    *,
    norm: str = "max",
    encoding: str = "packed",
    key: Array,
    transport: str = "all_gather",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the sign of every entry and one of s + 1 levels, relative to the norm of its block.

        l = floor(s |x_i| / norm)
        Q(x_i) = norm * sign(x_i) * (l + 1) / s   with probability s |x_i| / norm - l
                 norm * sign(x_i) * l / s         otherwise

    with s = 2**(bits - 1) - 1 and the norm of the entry's block; the update is the mean over workers of Q(g). With 1
    bit every entry is sent as plus or minus the norm, plus with probability (1 + x_i / norm) / 2. For the 2-norm over d
    entries, the squared error is at most min(d / s^2, sqrt(d) / s) of |x|^2 in expectation, and few entries are not
    zero when s is below sqrt(d). The maximum norm, which the paper uses in its experiments and which is the default
    here, spends all levels on the range that occurs: with 4 bits and blocks of 512 normally distributed entries the
    squared error is 0.036 of the squared gradient, and 1.6 with the 2-norm.

    State: none; in two phases with p workers a float32 for each p-th parameter, so the state is initialised where the
    number of workers is known (`gcjax.distribute`). Wire: `bits` bits per parameter and 32 per block, to every other
    worker ("all_gather") or twice in all ("two_phase"). In two phases each leaf is cut into a piece for each worker,
    its owner, and a block never spans two pieces. The owner rounds the mean to the nearest level of its block's maximum
    (with 1 bit, to its mean magnitude, in which padding counts as zeros) and adds what that leaves to the next mean.
    Workers have no error feedback: it would diverge where the variance exceeds the squared gradient. Momentum, weight
    decay and learning rate come after it, clipping may come before it:
    `optax.chain(gcjax.qsgd_compress(key=jax.random.key(0)), optax.sgd(0.1))`.

    Args:
      bits: b, bits per entry with the sign, 1 to 8.
      bucket_size: entries per block, which share a norm; a multiple of 32. A block never spans two leaves.
      norm: "max" or "l2".
      encoding: "packed", or "elias" to report as `payload_bits` the length of the paper's code: for every entry that is
        not zero, its distance from the previous one and its level in Elias's omega code, and the sign.
      key: random key, made by `jax.random.key(seed)`; the same on all workers.
      transport: as in `gcjax.ef_sign_compress`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Raises:
      ValueError: for an argument out of range or an unknown transport; for bits=1 with norm="l2", whose variance would
        be d - 1 times the squared gradient, or with encoding="elias", which would have no zeros to leave out.
      TypeError: for an argument of the wrong type.

    **Randomness**: every worker, step and entry draws its own, with 24 bits. **Bias**: none; in two phases owners round
    to the nearest, which what they owe corrects. **Non-finite input**: the
    update is NaN on all workers and the state stays as it was.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.qsgd_compress(bits=3, key=jax.random.key(0))
    >>> g = jnp.array([3.0, -1.0, 0.0, 1.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> print(first[:3], first[3] in (1.0, 2.0))
    [ 3. -1.  0.] True
    """
    check_integer("bits", bits, 1, 8)
    check_integer("bucket_size", bucket_size, WORD, multiple=WORD)
    check_choice("norm", norm, ("max", "l2"))
    check_choice("encoding", encoding, ("packed", "elias"))
    check_random_key("key", key)
    if bits == 1 and (norm, encoding) != ("max", "packed"):
        raise ValueError(f"bits=1 needs norm='max' and encoding='packed', got norm={norm!r} and encoding={encoding!r}")
    levels = max(2 ** (bits - 1) - 1, 1)

    def code(share, draw):
        if bits == 1:
            return (draw >= (1 + share) / 2).astype(jnp.uint32)
        position = jnp.minimum(levels * jnp.abs(share), levels)  # rounding may make x / x larger than 1
        low = jnp.floor(position)
        level = low + (draw < position - low)
        return level.astype(jnp.uint32) | jnp.where(share < 0, jnp.uint32(levels + 1), 0)

    def encode(x, bucket, key):
        blocks = block_groups(bucket, bucket_size)
        (scale,) = blocks.maxima(jnp.abs(x))
        if norm == "l2":
            scale = blocks.norms(x, scale)
        return encoded(x, bucket, blocks, scale, uniform(key, bucket.positions()))

    def encode_mean(x, bucket, key):
        del key
        blocks = block_groups(bucket, bucket_size)
        if bits == 1:  # signs of the largest would overshoot
            (scale,) = (total / blocks.counts() for total in blocks.sums(jnp.abs(x)))
        else:
            (scale,) = blocks.maxima(jnp.abs(x))
        return encoded(x, bucket, blocks, scale, 0.5)

    def encoded(x, bucket, blocks, scale, draw):
        unit = to_unit(scale)  # XLA multiplies by the inverse of the divisor, which would underflow for huge scales
        share = x * blocks.per_entry(unit) / blocks.per_entry(jnp.where(scale > 0, scale * unit, 1))
        planes = pack_planes(code(share, draw), bits, bucket.words)
        level = unpack_planes(planes, bits) & levels
        entry_bits = _elias_bits(level, blocks) if encoding == "elias" else bits * bucket.entries
        return jnp.concatenate([float_bits(scale), planes]), 32 * len(blocks) + entry_bits

    def decode(payload, bucket):
        blocks = block_groups(bucket, bucket_size)
        scale = blocks.per_entry(bits_float(payload[: len(blocks)]))
        code = unpack_planes(payload[len(blocks) :], bits)
        magnitude = scale * ((code & levels).astype(jnp.float32) / levels) if bits > 1 else scale
        return jnp.where(code >> (bits - 1) != 0, -magnitude, magnitude)

    codec = dense_codec(encode, decode, feedback=False, key=key, transport=transport, encode_mean=encode_mean)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _elias_bits(level: Array, blocks: Groups) -> Array:
    """Bits of the gaps, signs and levels of all entries that are not zero, float32[]."""
    words = pack_mask(level > 0)
    begin = jnp.arange(len(words), dtype=jnp.int32) * WORD
    # For each word, the last entry before it that is not zero, or the place before its block if there is none.
    last = lax.cummax(jnp.where(words != 0, begin + _highest_bit(words), -1))
    before_block = np.asarray([first * WORD - 1 for first, _ in blocks.ranges], np.int32)[blocks.group_of_word()]
    before = jnp.maximum(jnp.concatenate([jnp.full(1, -1, jnp.int32), last[:-1]]), before_block)
    words, begin, before = (x.reshape(-1, 1, LANES) for x in (words, begin, before))
    row = jnp.arange(WORD, dtype=jnp.int32)[:, None]
    below = words & ((jnp.uint32(1) << row.astype(jnp.uint32)) - 1)
    gap = begin + row - jnp.where(below != 0, begin + _highest_bit(below), before)
    length = jnp.where(level > 0, _omega_length(gap) + 1 + _omega_length(level.astype(jnp.int32)), 0)
    (of_word,) = reduce_rows((lax.add, length))
    return jnp.sum(of_word.astype(jnp.float32))


def _highest_bit(x: Array) -> Array:
    """Position of the highest set bit, int32; -1 for 0."""
    return 31 - lax.clz(x).astype(jnp.int32)


def _omega_length(k: Array) -> Array:
    """Bits of the Elias omega code of k (int32, at least 1): k, floor(log2 k), and so on in binary, and a 0."""
    length = jnp.int32(1)
    for _ in range(4):  # 2**31 -> 30 -> 4 -> 2 -> 1
        log = _highest_bit(k)
        length, k = length + jnp.where(k > 1, log + 1, 0), jnp.where(k > 1, log, k)
    return length
