"""Sketched-SGD: a count sketch that is summed over the workers finds the entries to send; a second round sends them.

**Source.** Nikita Ivkin, Daniel Rothchild, Enayat Ullah, Vladimir Braverman, Ion Stoica, Raman Arora,
"Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, arXiv 1903.04488, with the masked momentum of
the authors' code.

**Wire format.** Per bucket two all-reduces: the sketch, float32[rows, columns]; the candidates' values,
float32[4 k], in the order of their indices.

**Deviations.** (1) Entries are not hashed one by one. The bucket is divided into stretches of `columns` entries, and a
row is the sum of the stretches, each rotated by a random amount, of entries with random signs. Two entries of different
stretches collide in a row with probability 1 / columns, as with the paper's hashes, and two entries of one stretch
never do, so estimates are unbiased with at most the same variance. But neighbours collide with neighbours: a run of
large entries is found or missed as a whole. On a CPU this takes a fortieth of the time of a scatter. (2) Rotations and
signs are drawn anew in each step, so that no two entries always collide; the paper keeps them. (3) There is always a
second round, with exact values, which costs little compared with the sketch; in the authors' code it is optional. (4)
The learning rate is applied after the compressor, not within its memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._jax_compat import equal_everywhere
from gcjax._kernels.bits import WORD, position_of, to_blocks
from gcjax._kernels.hashing import quick_bits
from gcjax._sparse.compaction import assign_slots, slot_indices
from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_integer, check_number, check_random_key, static_share
from gcjax.extend import (
    Bucket,
    Compressor,
    Exchanged,
    SparseState,
    StepInput,
    StepResult,
    add_gradient,
    bits_float,
    compress,
    count_for_density,
    dense_report,
    float_bits,
    hash_bits,
    parameters_only,
    reset_to_zero,
    step_key,
    top_k_mask,
    unpack_mask,
)

CANDIDATES = 4  # p_2, per entry sent: their exact values are compared in the second round
_SIGN = np.uint32(1 << 31)


def sketch_compress(
    density: float,
    rows: int = 5,
    columns: int | None = None,
    *,
    key: Array,
    momentum: float = 0.9,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the k entries whose sum over the workers is largest, according to a count sketch.

        u <- m u + g;  v <- v + u
        S = mean over workers of sketch(v)
        C = the 4 k largest of |estimate(S)|
        w = mean over workers of v at C

    The update is the k entries of w of largest magnitude, k = max(1, floor(density * parameters)); every worker sets
    its u and v to zero there. An estimate is the median over the rows of the entry's cells with their signs undone:
    unbiased, but the choice of the largest is biased. A sent entry loses its u. A cell's noise has a variance below
    |mean v|^2 / columns: to find entries whose square is above |mean v|^2 / k, `columns` must be several times k. Its
    cost does not grow with the number of workers.

    State: two float32 and a bit per parameter, one less with `momentum=0`. Wire: 32 (rows * columns + 4 k) bits, by
    default 54 words per sent entry. Weight decay comes before it, the learning rate after it:
    `optax.chain(gcjax.contrib.sketch_compress(0.001, key=jax.random.key(0)), optax.sgd(0.1))`.

    Args:
      density: share of the entries to send, in (0, 1].
      rows, columns: of the sketch: an odd number; cells per row, at most one per entry, None for 10 k.
      key: random key, the same on all workers.
      momentum: m, in [0, 1); static. With 0 nothing is lost.
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density, momentum or size out of range, or an even number of rows.

    >>> import gcjax, jax, jax.numpy as jnp
    >>> tx = gcjax.contrib.sketch_compress(density=0.5, key=jax.random.key(0))
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(g, state)  # u = 1.9 g and v = 2.9 g for the entries not sent before
    >>> print(first, second)
    [3. 0. 2. 0.] [ 3.  -2.9  0.   0. ]
    """
    density = static_share("density", density)
    check_integer("rows", rows, 1)
    if rows % 2 == 0:
        raise ValueError(f"rows must be odd, so that the median is one of them, got {rows}")
    check_integer("columns", 1 if columns is None else columns, 1)
    check_random_key("key", key)
    check_number("momentum", momentum, 0.0, 1.0, low_included=True, high_included=False)

    def init(bucket: Bucket) -> SparseState:
        return SparseState.create(bucket, reset=reset_to_zero, transport="all_gather", arrays=1 if momentum == 0 else 2)

    def accumulate(state: SparseState, gradient: Sequence[Array], go: Array) -> tuple[Array, ...]:
        if momentum == 0:
            return state.take_in(add_gradient, gradient, go=go)
        # v in a pass of its own, from the chosen u: XLA then computes both in the buffers of the old ones.
        _, u = state.take_in(add_to_velocity, gradient, go=go)
        v = state.accumulated[0]
        return jnp.where(go, jnp.where(unpack_mask(state.to_reset), 0, v) + u, v), u

    def add_to_velocity(values: tuple[Array, ...], inputs: tuple[Array, ...], was_sent: Array) -> tuple[Array, ...]:
        (v, u), (g,) = values, inputs
        return v, momentum * u + g

    def update(step: StepInput, state: SparseState) -> StepResult[SparseState]:
        bucket = state.bucket
        k = count_for_density(density, bucket.entries)
        width = min(10 * k if columns is None else columns, bucket.entries)
        slots = min(CANDIDATES * k, bucket.entries)
        values = accumulate(state, step.gradient, step.go)
        v = values[0].reshape(-1)
        hashes = _draw(step_key(key, equal_everywhere(state.step), bucket), rows, width, bucket.size)
        table = step.comm.mean(_sketch(v, hashes, width))
        estimates = _estimate(table, hashes, bucket.size)
        possible = parameters_only(estimates.reshape(bucket.shape), bucket)
        found = assign_slots(top_k_mask(possible, slots))
        index, slot = slot_indices(found, slots), jnp.arange(slots, dtype=jnp.int32)
        position = position_of(index)
        w = step.comm.mean(jnp.where(slot < found.total, v[position], 0))
        sent = unpack_mask(top_k_mask(to_blocks(w), k)).reshape(-1)[:slots]
        count = jnp.sum(sent, dtype=jnp.int32)
        # The second condition is always true; it makes XLA write the zeros after the last use of the estimates.
        fill = jnp.where(step.go & (count <= slots), 0.0, jnp.nan)
        mean = _overwritten(estimates, width, lambda stretch: jnp.full(width, fill))
        # Unused slots go out of bounds, each to a position of its own, so that "unique" holds for them too.
        mean = mean.at[jnp.where(sent, position, bucket.size + slot)].add(w, mode="drop", unique_indices=True)
        report = dense_report(count, 32 * (rows * width + slots))._replace(capacity=jnp.int32(k))
        sent_mask = _packed_mask(index, sent, bucket.size // WORD)
        exchanged = Exchanged(bucket.split(mean), sent_mask, state.transport, report)
        return StepResult(exchanged.mean, state.after(exchanged, values, step.go), report)

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _packed_mask(index: Array, sent: Array, words: int) -> Array:
    """uint32[words], packed mask of the entries in `index` (int32[k]) that were sent (bool[k])."""
    bit = jnp.uint32(1) << (index % WORD).astype(jnp.uint32)
    return jnp.zeros(words, jnp.uint32).at[jnp.where(sent, index // WORD, words)].add(bit, mode="drop")


class Hashes(NamedTuple):
    """The random numbers of a sketch.

    Attributes:
      sign: uint32[rows], the seed of each row's signs.
      rotation: int32[rows, stretches], number of cells by which each stretch is rotated.
    """

    sign: Array
    rotation: Array


def _draw(key: Array, rows: int, width: int, size: int) -> Hashes:
    stretches = -(-size // width)
    bits = hash_bits(key, jnp.arange(rows * (1 + stretches)))
    return Hashes(bits[:rows], (bits[rows:] % width).astype(jnp.int32).reshape(rows, stretches))


def _signed(x: Array, sign: Array, begin: ArrayLike) -> Array:
    """x, the entries from `begin` on, with the random signs of a row. Its own inverse."""
    bits = quick_bits(sign, jnp.arange(len(x), dtype=jnp.int32) + begin)
    return bits_float(float_bits(x) ^ (bits & _SIGN))


def _sketch(v: Array, hashes: Hashes, width: int) -> Array:
    """float32[n] -> float32[rows, width]: entry i is added to cell (i + its stretch's rotation) % width of each row."""
    rows, stretches = hashes.rotation.shape
    last = (stretches - 1) * width

    def add(stretch: ArrayLike, x: Array, tables: list[Array]) -> list[Array]:
        def add_to(table: Array, row: int) -> Array:
            at = hashes.rotation[row, stretch]
            cells = lax.dynamic_slice(table, (at,), (width,)) + _signed(x, hashes.sign[row], stretch * width)
            return lax.dynamic_update_slice(table, cells, (at,))

        return [add_to(table, row) for row, table in enumerate(tables)]

    # Tables of twice the width, so that a rotated stretch is contiguous. The ragged end goes first, outside the loop.
    tables = add(stretches - 1, jnp.pad(v[last:], (0, last + width - len(v))), [jnp.zeros(2 * width)] * rows)
    tables = lax.fori_loop(
        0, stretches - 1, lambda i, t: add(i, lax.dynamic_slice(v, (i * width,), (width,)), t), tables
    )
    return jnp.stack([table[:width] + table[width:] for table in tables])


def _estimate(table: Array, hashes: Hashes, size: int) -> Array:
    """float32[rows, width] -> float32[size]: for each entry the median of its cells with their signs undone."""
    rows, width = table.shape
    doubled = [jnp.concatenate([row, row]) for row in table]

    def estimate(stretch: ArrayLike) -> Array:
        def one(row: int) -> Array:
            cells = lax.dynamic_slice(doubled[row], (hashes.rotation[row, stretch],), (width,))
            return _signed(cells, hashes.sign[row], stretch * width)

        return _median([one(row) for row in range(rows)])

    # The start depends on the table, so that XLA can put it into the gradient's buffer.
    return _overwritten(jnp.full(size, table[0, 0]), width, estimate)


def _overwritten(x: Array, width: int, piece: Callable[[ArrayLike], Array]) -> Array:
    """x with each stretch i replaced by piece(i), float32[width]. A loop, so that XLA works in the buffer of x."""
    last = (len(x) - 1) // width * width

    def write(stretch: Array, x: Array) -> Array:
        return lax.dynamic_update_slice(x, piece(stretch), (stretch * width,))

    written: Array = lax.fori_loop(0, last // width, write, x)
    return written.at[last:].set(piece(last // width)[: len(x) - last])


def _median(xs: Sequence[Array]) -> Array:
    """The median of an odd number of arrays, entry by entry, by odd-even transposition sort."""
    xs = list(xs)
    for round_number in range(len(xs)):
        for i in range(round_number % 2, len(xs) - 1, 2):
            less = xs[i] < xs[i + 1]
            xs[i], xs[i + 1] = jnp.where(less, xs[i], xs[i + 1]), jnp.where(less, xs[i + 1], xs[i])
    return xs[len(xs) // 2]
