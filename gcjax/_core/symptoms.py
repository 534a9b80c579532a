"""Signs of mistakes that no type shows: seen in a few entries of every update, at the price of a few bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._comm.comm import Comm
from gcjax._kernels.floats import bits_float, float_bits
from gcjax._types import Array

SAMPLE = 128  # entries at most that are looked at in each leaf
RATIO = 3  # of the claims, the bits of the ratio
NOT_FINITE = 0x7F800000  # the bits of infinity, below those of NaN
KEPT = 0.95  # of the running mean, in each update


class Symptoms(NamedTuple):
    """What has been seen so far. Scalars, equal on all workers but for `rank`.

    Attributes:
      rank: int32, the number of the worker whose state this is; -1 before the first update.
      misplaced: int32, updates so far in which some worker had the state of another.
      identical: int32, updates so far in which all workers had the same gradient.
      squares_ratio: float32, running mean of the workers' largest sum(g**2) / sum(sum_grad_squared), from 1; it stays 1
        for methods without squares. For n samples per worker it is 1 where they are noise, n where they agree, and far
        below 1 where the gradient was scaled without its squares.
    """

    rank: Array
    misplaced: Array
    identical: Array
    squares_ratio: Array

    @classmethod
    def create(cls) -> "Symptoms":
        none = jnp.int32(0)
        return cls(jnp.int32(-1), none, none, jnp.float32(1))

    def claims(
        self, gradients: Iterable[Sequence[Array]], squares: Iterable[Sequence[Array] | None], comm: Comm
    ) -> Array:
        """int32[4], of which `after` needs the maxima over the workers."""
        leaves = [g for of_bucket in gradients for g in of_bucket]
        samples = _samples(leaves)
        fingerprint = _fingerprint(samples, comm)
        misplaced = (self.rank >= 0) & (self.rank != comm.rank())
        ratio = _ratio(leaves, samples, [s for of_bucket in squares for s in of_bucket or ()])
        # The bits of positive numbers are in their order.
        parts = fingerprint, -fingerprint, misplaced, float_bits(ratio)
        return jnp.stack([x.astype(jnp.int32) for x in parts])

    @staticmethod
    def agreed_on(largest: Array, flag: Array) -> Array:
        """`flag`, or 1 if a sample of some worker holds NaN.

        The method waits for the result, and so for the last look at the gradients: XLA can then reuse their buffers.
        """
        return jnp.where(largest[RATIO] > NOT_FINITE, 1, flag)

    def after(self, largest: Array, comm: Comm) -> "Symptoms":
        """After an update; `largest` are the maxima of all workers' `claims`."""
        identical = (largest[0] == -largest[1]) & (comm.size > 1)
        ratio, mean = bits_float(largest[RATIO].astype(jnp.uint32)), self.squares_ratio
        return Symptoms(
            rank=comm.rank(),
            misplaced=self.misplaced + largest[2],
            identical=self.identical + identical,
            squares_ratio=jnp.where(ratio > 0, KEPT * mean + (1 - KEPT) * ratio, mean),
        )


def _fingerprint(samples: Array, comm: Comm) -> Array:
    """int32 from 1 on, equal on workers with equal gradients; of gradients that are zero, the worker's number + 1."""
    bits = float_bits(samples)
    weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape) + 1
    total = jnp.sum(bits * weights, dtype=jnp.uint32)
    mixed = ((total ^ total >> 16) >> 1).astype(jnp.int32) | 1 << 30
    return jnp.where(jnp.any(bits << 1 != 0), mixed, comm.rank() + 1)


def _ratio(gradients: Sequence[Array], samples: Array, squares: Sequence[Array]) -> Array:
    """sum(g**2) / sum(sum_grad_squared), of the samples: float32. 0 where nothing can be said, NaN for NaN."""
    stands_for = np.array([g.size / min(g.shape[-1], SAMPLE) if g.ndim else 1 for g in gradients], np.float32)[:, None]
    above = jnp.sum(samples * samples * stands_for)
    below = jnp.sum(_samples(squares) * stands_for) if squares else jnp.float32(0)
    known = (below > 0) & (above < jnp.inf) & (below < jnp.inf)
    ratio = jnp.where(known, above / jnp.where(known, below, 1), 0)
    return jnp.where(jnp.isnan(above) | jnp.isnan(below), jnp.nan, ratio)


def _samples(leaves: Sequence[Array]) -> Array:
    """Entries of every leaf, filled up with zeros: float32[leaves, SAMPLE]. In one array, as kernels per leaf cost."""
    return jnp.stack([jnp.pad(some, (0, SAMPLE - some.size)) for some in map(_sample, leaves)])


def _sample(x: Array) -> Array:
    """Entries from the middle of the leaf along all axes but the last, without a change of its layout: float32[m]."""
    if x.ndim == 0:
        return x.reshape(1)
    middle = [size // 2 for size in x.shape[:-1]]
    length = min(x.shape[-1], SAMPLE)
    start = [*middle, (x.shape[-1] - length) // 2]
    return jax.lax.slice(x, start, [*(i + 1 for i in middle), start[-1] + length]).reshape(-1)
