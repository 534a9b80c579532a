"""TernGrad: every entry becomes -1, 0 or +1 times one scale per leaf, drawn without bias.

**Source.** Wei Wen, Cong Xu, Feng Yan, Chunpeng Wu, Yandan Wang, Yiran Chen, Hai Li, "TernGrad: Ternary Gradients to
Reduce Communication in Distributed Deep Learning", NeurIPS 2017, arXiv 1705.07878, algorithm 1 with layer-wise
ternarising, gradient clipping and scaler sharing.

**Wire format.** Per bucket. aggregate="sum": an all-reduce (maximum) of one float32 per leaf; then an all-reduce (sum)
of uint32[b, words], in which each entry is a field of b bits that holds 0, 1 or 2 for -1, 0 and +1. The entry with bit
b * j + k of mask word w (`gcjax.extend.pack_mask`) is field j, counted from the lowest bits, of word [k, w]. b is wide
enough for the sum over all workers: 2, 4, 8 and 16 for up to 1, 7, 127 and 32767 workers. aggregate="gather": one
uint32 vector per worker: a float32 scale for each leaf; then two packed masks with one bit per entry, first 1 for
nonzero, then 1 for -1. In two phases: such a vector to each owner, for its pieces of the leaves; then one from each
owner to all.

**Deviations.** The standard deviation for the clipping is taken about zero, not about the leaf's mean: the paper
assumes a mean of zero, and a leaf with one entry, or with equal entries, would be clipped to zero. There is no
parameter server: with "sum" the workers receive the sum itself; with "gather" every worker decodes all messages, or
owners do and round the mean to the nearest of three values, with feedback and without clipping it.
"""

import jax.numpy as jnp
import optax

from gcjax._kernels.bits import LANES, WORD
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_choice, check_number, check_random_key, check_transport
from gcjax.extend import (
    Bucket,
    CodecState,
    Compressor,
    Groups,
    StepInput,
    StepResult,
    bits_float,
    compress,
    dense_codec,
    dense_report,
    float_bits,
    leaf_groups,
    pack_planes,
    step_key,
    uniform,
    unpack_planes,
)


def terngrad_compress(
    clip: ArrayLike | None = 2.5,
    *,
    aggregate: str = "sum",
    key: Array,
    transport: str = "all_gather",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends every entry as -1, 0 or +1, relative to the largest of its leaf after clipping.

        c = g clipped to +- clip * sqrt(mean(g**2))
        s = max(|c|)
        t = sign(c) with probability |c| / s, else 0

    for each leaf; the update is the mean over workers of s t. "sum" takes the largest s of all workers (the paper's
    scaler sharing). The draw is unbiased, with variance s |c| - c**2; clipping is not: where workers disagree it moves
    the optimum, and clip=None reaches it, at the price of more variance. Owners round to the nearest and owe the rest.

    State: none; in two phases a float32 per owned parameter. Wire: "sum" all-reduces 2, 4, 8 or 16 bits per parameter
    (up to 1, 7, 127, 32767 workers), "gather" sends 2; both add 32 per leaf. The optimiser comes after it:
    `optax.chain(gcjax.contrib.terngrad_compress(key=jax.random.key(0)), optax.sgd(0.1))`. The authors leave out the
    last layer (`optax.partition`).

    Args:
      clip: c, above 0; None for no clipping.
      aggregate: "sum" or "gather".
      key: random key, the same on all workers.
      transport, axis_name, inner_axis_name: see docs/common.md. A transport needs "gather".

    Raises:
      ValueError: for an argument out of range; for a transport of "sum", which has no choice.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.contrib.terngrad_compress(key=jax.random.key(0))
    >>> g = jnp.array([2.0, -2.0, 0.0, 1.0])
    >>> first, state = tx.update(g, tx.init(g))
    >>> print(first[:3], first[3] in (0.0, 2.0))
    [ 2. -2.  0.] True
    """
    if clip is not None:
        check_number("clip", clip, 0.0)
    check_choice("aggregate", aggregate, ("sum", "gather"))
    check_random_key("key", key)
    check_transport(transport)
    if aggregate == "sum" and transport != "all_gather":
        raise ValueError(f"transport={transport!r} needs aggregate='gather': sums are all-reduced")
    compressor = _summed(clip, key) if aggregate == "sum" else _gathered(clip, key, transport)
    return compress(compressor, axis_name=axis_name, inner_axis_name=inner_axis_name)


def _summed(clip: ArrayLike | None, key: Array) -> Compressor[CodecState]:
    """All workers use the largest scale of any, so that their codes can be added."""

    def init(bucket: Bucket) -> CodecState:
        return CodecState(jnp.zeros(1), jnp.int32(0), bucket)

    def update(step: StepInput, state: CodecState) -> StepResult[CodecState]:
        bucket, groups, x = state.bucket, leaf_groups(state.bucket), state.bucket.join(step.gradient)
        limit = _largest_clipped(x, groups, clip)
        scale = step.comm.max(limit)
        draw = uniform(step_key(key, state.step, bucket, step.comm.rank()), bucket.positions())
        clipped = jnp.minimum(jnp.abs(x), groups.per_entry(limit))
        taken = draw * groups.per_entry(scale) < clipped
        field = field_bits(step.comm.size)
        total = step.comm.sum(
            _pack_fields(jnp.where(taken, jnp.where(x < 0, 0, jnp.uint32(2)), 1), field, bucket.words)
        )
        count = _unpack_fields(total, field).astype(jnp.float32) - step.comm.size
        mean = bucket.split(jnp.where(step.go, count / step.comm.size * groups.per_entry(scale), jnp.nan))
        bits = field * bucket.entries + 32 * len(groups)
        return StepResult(
            mean, CodecState(state.error, state.step + step.go, bucket), dense_report(bucket.entries, bits)
        )

    return Compressor(init, update)


def _gathered(clip: ArrayLike | None, key: Array, transport: str) -> Compressor[CodecState]:
    """Every worker uses its own scale."""

    def code(x: Array, scale: Array, draw: Array | float) -> Array:
        taken = draw * scale < jnp.abs(x)  # a clipped entry has at least the scale: always taken
        return jnp.where(taken, jnp.where(x < 0, jnp.uint32(3), 1), 0)

    def encode(x: Array, bucket: Bucket, key: Array) -> tuple[Array, int]:
        return encoded(x, bucket, clip, uniform(key, bucket.positions()))

    def encode_mean(x: Array, bucket: Bucket, key: Array) -> tuple[Array, int]:
        del key
        return encoded(x, bucket, None, 0.5)  # to the nearest of the three

    def encoded(x: Array, bucket: Bucket, clip: ArrayLike | None, draw: Array | float) -> tuple[Array, int]:
        groups = leaf_groups(bucket)
        scale = _largest_clipped(x, groups, clip)
        codes = code(x, groups.per_entry(scale), draw)
        payload = jnp.concatenate([float_bits(scale), pack_planes(codes, 2, bucket.words)])
        return payload, 2 * bucket.entries + 32 * len(groups)

    def decode(payload: Array, bucket: Bucket) -> Array:
        groups = leaf_groups(bucket)
        code = unpack_planes(payload[len(groups) :], 2)
        scale = groups.per_entry(bits_float(payload[: len(groups)]))
        return jnp.where(code == 0, 0, jnp.where(code == 3, -scale, scale))

    return dense_codec(encode, decode, feedback=False, key=key, transport=transport, encode_mean=encode_mean)


def _largest_clipped(x: Array, groups: Groups, clip: ArrayLike | None) -> Array:
    """Each leaf's largest magnitude after clipping, float32[leaves]. To clip is to limit magnitudes to it."""
    (largest,) = groups.maxima(jnp.abs(x))
    if clip is None:
        return largest
    return jnp.minimum(largest, clip * groups.norms(x, largest) / jnp.sqrt(groups.counts()))


def field_bits(workers: int) -> int:
    """Bits that hold the sum of all workers' codes, at most 2 each, without a carry."""
    return next(bits for bits in (2, 4, 8, 16, 32) if 2 * workers < 2**bits)


def _pack_fields(values: Array, field: int, words: int) -> Array:
    """Integers below 2**field, uint32[blocks, 32, 128], of which `words` columns are used -> uint32[field, words]."""
    shifted = values.reshape(-1, WORD // field, field, LANES) << _shifts(field)
    packed = jnp.sum(shifted, axis=1, dtype=jnp.uint32)
    return packed.swapaxes(0, 1).reshape(field, -1)[:, :words]


def _unpack_fields(words: Array, field: int) -> Array:
    """The inverse of `_pack_fields`."""
    padded = jnp.pad(words, ((0, 0), (0, -words.shape[1] % LANES)))
    packed = padded.reshape(field, -1, LANES).swapaxes(0, 1)[:, None]
    values: Array = packed >> _shifts(field) & jnp.uint32(2**field - 1)
    return values.reshape(-1, WORD, LANES)


def _shifts(field: int) -> Array:
    return jnp.arange(0, WORD, field, dtype=jnp.uint32)[:, None, None]
