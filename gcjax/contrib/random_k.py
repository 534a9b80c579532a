"""Random-k: every worker sends the same random entries, so that an all-reduce adds the values and no index is sent.

**Source.** Sebastian Stich, Jean-Baptiste Cordonnier, Martin Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv
1809.07599 (rand-k with memory); Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank
Gradient Compression for Distributed Optimization", NeurIPS 2019, arXiv 1905.13727 (random block).

**Wire format.** Per bucket one float32 all-reduce of the drawn entries' values, in the order of the draw, which the
number of steps done seeds.

**Deviations.** (1) Not every subset can be drawn: the d entries are rotated by a random amount and divided into k
stretches whose lengths differ by at most one, and one entry is drawn from each. Every entry is drawn with probability
k/d, without replacement, which is all that the bounds below need. Neighbours are drawn together less often than in a
uniform subset. This needs k hashes and no permutation of d. (2) d and k count padding: large leaves are padded to
multiples of 4,096 entries, and small ones to multiples of 32. (3) PowerSGD's block is one run of k entries; here blocks
start at multiples of their size, and any number of them is drawn. A block is a run of neighbours in a large leaf. Small
leaves lie side by side as matrices of 32 rows, and a block there goes along the rows of all of them.
"""

import jax.numpy as jnp
import optax

from gcjax._jax_compat import equal_everywhere
from gcjax._kernels.bits import BLOCK, LANES, WORD
from gcjax._types import Array, AxisNames
from gcjax._validation import check_flag, check_integer, check_random_key, static_share
from gcjax.extend import (
    Bucket,
    CodecState,
    Compressor,
    StepInput,
    StepResult,
    compress,
    count_for_density,
    dense_report,
    hash_bits,
    step_key,
)


def random_k_compress(
    density: float,
    *,
    key: Array,
    block: int = 1,
    feedback: bool = True,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends k random entries of gradient plus residual, the same on all workers, as values without indices.

        a = g + e
        y = a  at the entries S, 0 elsewhere
        e <- a - y

    with S the k entries drawn for this step, k = max(1, floor(density * d)); the update is the mean over workers of y.
    Entries are delayed, nothing is lost, and the mean of |a - y|^2 is (1 - k / d) |a|^2. Without `feedback` nothing is
    kept and y = (d / k) g at S: unbiased, and the mean of |y - g|^2 is (d / k - 1) |g|^2. The all-reduce does not grow
    with the number of workers. With `feedback` an entry waits d/k steps on average and then sends the sum: divide the
    learning rate by about d/k, or the steps overshoot.

    State: a float32 per parameter with `feedback`, none without. Wire: 32 bits per sent entry. The optimiser comes
    after it: `optax.chain(gcjax.contrib.random_k_compress(0.1, key=jax.random.key(0)), optax.sgd(0.01))`.

    Args:
      density: share of the entries to send, in (0, 1].
      key: random key, the same on all workers.
      block: entries per block. Blocks are drawn instead of entries, at least one, which is faster on most devices.
      feedback: keep the entries that are not sent in a residual.
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density or block out of range.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.contrib.random_k_compress(density=0.25, key=jax.random.key(0), block=8)
    >>> g = jnp.ones(32)
    >>> first, state = tx.update(g, tx.init(g))
    >>> print(first.reshape(4, 8)[:, 0])
    [0. 1. 0. 0.]
    """
    density = static_share("density", density)
    check_random_key("key", key)
    check_integer("block", block, 1)
    check_flag("feedback", feedback)

    def init(bucket: Bucket) -> CodecState:
        return CodecState(jnp.zeros(bucket.shape if feedback else 1), jnp.int32(0), bucket)

    def update(step: StepInput, state: CodecState) -> StepResult[CodecState]:
        bucket, x = state.bucket, state.bucket.join(step.gradient)
        if feedback:  # in a skipped step x is the old error, so that nothing else needs it and XLA works in its buffer
            x = jnp.where(step.go, state.error + x, state.error)
        entries = bucket.words * WORD
        size = min(block, entries)
        blocks = -(-entries // size)
        count = count_for_density(density, blocks)
        drawn = _draw(step_key(key, equal_everywhere(state.step), bucket), count, blocks)
        within = jnp.arange(size, dtype=jnp.int32)
        place = _place((drawn[:, None] * size + within).reshape(-1), bucket)
        own = x.at[place].get(mode="fill", fill_value=0)  # the last block may extend past the end
        values = step.comm.mean(own if feedback else own * (blocks / count))
        # The fill value depends on the values, so that XLA can write the zeros into the gradient's buffer.
        fill = jnp.where(step.go & ~jnp.isnan(values[0]), 0.0, jnp.nan)
        mean = jnp.full(bucket.shape, fill).at[place].add(values, mode="drop", unique_indices=True)
        error = state.error
        if feedback:
            error = x.at[place].set(jnp.where(step.go, 0, own), mode="drop", unique_indices=True)
        new = CodecState(error, state.step + step.go, bucket)
        return StepResult(bucket.split(mean), new, dense_report(len(own), 32 * len(own)))

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _place(number: Array, bucket: Bucket) -> tuple[Array, Array, Array]:
    """Block, row and lane of the entries with these numbers; out of bounds where a number is too high.

    Entries are numbered block by block and row by row, but for the unused columns of the last block.
    """
    last, columns = bucket.size - BLOCK, bucket.words - (bucket.size - BLOCK) // WORD
    row, lane = (number - last) // columns, (number - last) % columns
    position = jnp.where(number < last, number, last + row * LANES + lane)
    return position // BLOCK, position // LANES % WORD, position % LANES


def _draw(key: Array, count: int, total: int) -> Array:
    """int32[count] distinct numbers below `total`, each of them drawn with probability count / total."""
    stretch, longer = divmod(total, count)  # the first `longer` stretches have one more
    slot = jnp.arange(count, dtype=jnp.int32)
    length = (stretch + (slot < longer)).astype(jnp.uint32)
    begin = slot * stretch + jnp.minimum(slot, longer)
    place = (hash_bits(key, slot) % length).astype(jnp.int32)
    rotation = _remainder(hash_bits(key, count + jnp.arange(2)), total)
    return (begin + place + rotation) % total


def _remainder(words: Array, divisor: int) -> Array:
    """(words[0] * 2**32 + words[1]) % divisor, for a divisor up to 2**28. With 64 bits the bias is negligible."""
    rest: Array = jnp.uint32(0)
    for word in words:
        for shift in range(28, -4, -4):
            rest = (rest * 16 + (word >> shift & 15)) % divisor
    return rest.astype(jnp.int32)
