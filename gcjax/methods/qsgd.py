"""QSGD: every entry to one of a few evenly spaced levels of its bucket's norm, drawn without bias.

**Source.** Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", NeurIPS 2017, arXiv 1610.02132: the quantiser Q_s, its Elias coding, and the
buckets and maximum norm of the experiments.

**Wire format.** One uint32 vector per worker: a float32 norm for each of the paper's buckets, which are runs of
`bucket_size` entries of a leaf, the last of a leaf shorter; then `bits` packed masks, one bit an entry each, entry i in
bit i % 32 of word i // 32. The first bits - 1 masks are the level, lowest bit first; the last is the sign, 1 for
negative.

**Deviations.** Elias coding has no static size: with encoding="elias" the packed words are sent all the same, and the
report says how long the code would be; as in the paper, nothing marks the end of a bucket. s is
2**(bits - 1) - 1, what `bits` bits can hold beside the sign; the paper leaves it free. With bits=1 no level is left and
the sign is drawn, which the paper does not have.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._kernels.bits import LANES, pack_planes_of
from gcjax._validation import check_choice, check_integer, check_random_key
from gcjax.extend import (
    Bucket,
    Groups,
    bits_float,
    block_groups,
    compress,
    float_bits,
    gather_codec,
    uniform,
    unpack_planes,
)


def qsgd_compress(
    bits=4, bucket_size=512, *, norm="max", encoding="packed", key, axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the sign of every entry and one of s + 1 levels, relative to the norm of its bucket.

    .. math::
        Q_s(x_i) = \|x\| \, \mathrm{sign}(x_i) \, \xi_i, \qquad \ell = \lfloor s |x_i| / \|x\| \rfloor, \qquad
        \xi_i = \begin{cases} (\ell + 1) / s & \text{with probability } s |x_i| / \|x\| - \ell \\
        \ell / s & \text{else} \end{cases}

    with :math:`s = 2^{b - 1} - 1`, and the update is the mean over workers of Q(g). With b = 1 every entry is sent as
    plus or minus the norm, plus with probability :math:`(1 + x_i / \|x\|) / 2`. For the 2-norm over d entries,
    :math:`E \|Q_s(x) - x\|^2 \le \min(d / s^2, \sqrt d / s) \|x\|^2`, and few entries are not zero when s is below
    :math:`\sqrt d`. The maximum norm, the paper's choice in its experiments and the default here, spends all levels on
    the range that occurs: with 4 bits and buckets of 512 normally distributed entries the error is 0.036 of the square
    of the gradient, with the 2-norm 1.6.

    Keeps nothing; costs `bits` bits per parameter and 32 per bucket on the wire, which grow with the number of workers
    (an all-gather). Momentum, weight decay and learning rate come after it, clipping may stand before it:
    `optax.chain(gcjax.qsgd_compress(key=jax.random.key(0)), optax.sgd(0.1))`. Error feedback around it diverges where
    the variance exceeds the gradient's square; there is none.

    Args:
      bits: b, bits per entry with the sign, 1 to 8.
      bucket_size: entries that share a norm, a multiple of 32. Small leaves have buckets of their own.
      norm: "max" or "l2".
      encoding: "packed", or "elias" to report as `payload_bits` what the paper's code would take: for every entry that
        is not zero its distance from the one before and its level in Elias's omega code, and the sign.
      key: random key, made by `jax.random.key(seed)`; the same on all workers.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError, ValueError: for an argument out of range; for bits=1 with norm="l2", whose variance would be d - 1
        times the gradient's square, or with encoding="elias", which would have nothing to leave out.

    **Randomness**: every worker, step and entry draws its own, with 24 bits. **Bias**: none. **Non-finite input**: the
    update is NaN on all workers and the state stays as it was.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.qsgd_compress(bits=3, key=jax.random.key(0))
    >>> g = jnp.array([3.0, -1.0, 0.0, 1.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> print(first[:3], first[3] in (1.0, 2.0))
    [ 3. -1.  0.] True
    """
    check_integer("bits", bits, 1, 8)
    check_integer("bucket_size", bucket_size, LANES, multiple=LANES)
    check_choice("norm", norm, ("max", "l2"))
    check_choice("encoding", encoding, ("packed", "elias"))
    check_random_key("key", key)
    if bits == 1 and (norm, encoding) != ("max", "packed"):
        raise ValueError(f"bits=1 goes with norm='max' and encoding='packed' only, got {norm!r} and {encoding!r}")
    levels = max(2 ** (bits - 1) - 1, 1)

    def code(x, unit, draw):
        share = x / unit
        if bits == 1:
            return (draw >= (1 + share) / 2).astype(jnp.uint32)
        position = jnp.minimum(levels * jnp.abs(share), levels)  # where division is not exact: x / x above 1
        low = jnp.floor(position)
        level = low + (draw < position - low)
        return level.astype(jnp.uint32) | jnp.where(x < 0, jnp.uint32(levels + 1), 0)

    def encode(x, bucket: Bucket, key):
        groups = block_groups(bucket, bucket_size)
        (scale,) = groups.maxima(jnp.abs(x))
        if norm == "l2":
            scale = groups.norms(x, scale)
        unit = jnp.broadcast_to(groups.per_entry(jnp.where(scale > 0, scale, 1)), x.shape)
        planes = pack_planes_of(code, bits, x, unit, uniform(key, bucket.size))
        entry_bits = _elias_bits(planes, bits, groups) if encoding == "elias" else bits * bucket.entries
        return jnp.concatenate([float_bits(scale), planes]), 32 * len(groups) + entry_bits

    def decode(payload, bucket: Bucket):
        groups = block_groups(bucket, bucket_size)
        scale = groups.per_entry(bits_float(payload[: len(groups)]))
        code = unpack_planes(payload[len(groups) :], bits, bucket.size)
        magnitude = scale * ((code & levels).astype(jnp.float32) / levels) if bits > 1 else scale
        return jnp.where(code >> (bits - 1) != 0, -magnitude, magnitude)

    codec = gather_codec(encode, decode, feedback=False, key=key)
    return compress(codec, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _elias_bits(planes, bits: int, groups: Groups):
    """Bits of the gaps, signs and levels of all entries that are not zero, float32."""
    words = functools.reduce(jnp.bitwise_or, planes.reshape(bits, -1)[:-1])
    begin = jnp.arange(len(words), dtype=jnp.int32) * LANES
    # The last entry before each word that is not zero; where its bucket has none, the place before the bucket.
    last = lax.cummax(jnp.where(words != 0, begin + _highest_bit(words), -1))
    before_bucket = np.asarray([first * LANES - 1 for first, _ in groups.ranges], np.int32)[groups.group_of_word()]
    before = jnp.maximum(jnp.concatenate([jnp.full(1, -1, jnp.int32), last[:-1]]), before_bucket)
    lanes = jnp.arange(LANES, dtype=jnp.int32)
    below = words[:, None] & ((jnp.uint32(1) << lanes.astype(jnp.uint32)) - 1)
    previous = jnp.where(below != 0, begin[:, None] + _highest_bit(below), before[:, None])
    gap = (begin[:, None] + lanes - previous).reshape(-1)
    level = unpack_planes(planes, bits, len(gap)) & (2 ** (bits - 1) - 1)
    length = jnp.where(level > 0, _omega_length(gap) + 1 + _omega_length(level.astype(jnp.int32)), 0)
    (of_bucket,) = groups.sums(length[: groups.size].astype(jnp.float32))
    return jnp.sum(of_bucket)


def _highest_bit(x):
    """Position of the highest set bit, int32; -1 for 0."""
    return 31 - lax.clz(x).astype(jnp.int32)


def _omega_length(k):
    """Bits of the Elias omega code of k (int32, 1 or more): the binary forms of k, floor(log2 k), and so on; a 0."""
    length = jnp.int32(1)
    for _ in range(4):  # 2**31 -> 30 -> 4 -> 2 -> 1
        log = _highest_bit(k)
        length, k = length + jnp.where(k > 1, log + 1, 0), jnp.where(k > 1, log, k)
    return length
