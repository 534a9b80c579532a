"""Signs of mistakes that no type shows: seen in a few entries of every update, at the price of a few bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._comm.comm import Comm
from gcjax._kernels.bits import float_bits
from gcjax._types import Array

SAMPLE = 128  # entries at most that are looked at in each leaf
KEPT = 0.95  # of the running mean, in each update


class Symptoms(NamedTuple):
    """What one worker has seen. Scalars.

    Attributes:
      updates: int32, updates so far.
      rank: int32, the number of the worker whose state this is; -1 before the first update.
      misplaced: int32, updates so far in which some worker had the state of another.
      identical: int32, updates so far in which all workers had the same gradient.
      squares_ratio: float32, running mean of sum(g**2) / sum(sum_grad_squared), from 1; it stays 1 for methods without
        squares. For n samples per worker it is 1 where they are noise, n where they agree, and far below 1 where the
        gradient was scaled without its squares.
    """

    updates: Array
    rank: Array
    misplaced: Array
    identical: Array
    squares_ratio: Array

    @classmethod
    def create(cls) -> "Symptoms":
        none = jnp.int32(0)
        return cls(none, jnp.int32(-1), none, none, jnp.float32(1))

    def claims(self, gradients: Iterable[Sequence[Array]], comm: Comm) -> Array:
        """int32[3], of which `after` needs the maxima over the workers."""
        fingerprint = _fingerprint(gradients, comm)
        misplaced = (self.rank >= 0) & (self.rank != comm.rank())
        return jnp.stack([fingerprint, -fingerprint, misplaced.astype(jnp.int32)])

    def after(
        self,
        largest: Array,
        gradients: Iterable[Sequence[Array]],
        squares: Iterable[Sequence[Array] | None],
        comm: Comm,
    ) -> "Symptoms":
        """After an update; `largest` are the maxima of all workers' `claims`."""
        identical = (largest[0] == -largest[1]) & (comm.size > 1)
        return Symptoms(
            updates=self.updates + 1,
            rank=comm.rank(),
            misplaced=self.misplaced + largest[2],
            identical=self.identical + identical,
            squares_ratio=_updated_ratio(self.squares_ratio, gradients, squares),
        )


def _fingerprint(gradients: Iterable[Sequence[Array]], comm: Comm) -> Array:
    """int32 from 1 on, equal on workers with equal gradients; of gradients that are zero, the worker's number + 1."""
    total, nonzero = jnp.uint32(0), jnp.bool_(False)
    for number, x in enumerate(x for leaves in gradients for x in leaves):
        bits = float_bits(_sample(x))
        weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + (2 * SAMPLE * number + 1)
        total += jnp.sum(bits * weights, dtype=jnp.uint32)
        nonzero |= jnp.any(bits << 1 != 0)
    mixed = ((total ^ total >> 16) >> 1).astype(jnp.int32) | 1 << 30
    return jnp.where(nonzero, mixed, comm.rank() + 1)


def _updated_ratio(
    mean: Array, gradients: Iterable[Sequence[Array]], squares: Iterable[Sequence[Array] | None]
) -> Array:
    """The running mean after one more ratio. Without squares, or where all are zero, it stays."""
    above = below = jnp.float32(0)
    for leaves, of_leaves in zip(gradients, squares, strict=True):
        for g, s in zip(leaves, of_leaves or (), strict=False):
            some, all_of = _sample(g), g.size
            above += jnp.sum(some * some) * (all_of / some.size)
            below += jnp.sum(_sample(s)) * (all_of / some.size)
    known = (below > 0) & jnp.isfinite(above) & jnp.isfinite(below)
    return jnp.where(known, KEPT * mean + (1 - KEPT) * above / jnp.where(known, below, 1), mean)


def _sample(x: Array) -> Array:
    """Entries from the middle of the leaf along all axes but the last, without a change of its layout: float32[m]."""
    if x.ndim == 0:
        return x.reshape(1)
    middle = [size // 2 for size in x.shape[:-1]]
    length = min(x.shape[-1], SAMPLE)
    start = [*middle, (x.shape[-1] - length) // 2]
    return jax.lax.slice(x, start, [*(i + 1 for i in middle), start[-1] + length]).reshape(-1)
