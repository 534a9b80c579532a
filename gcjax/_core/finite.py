"""Whether gradients and their squares are good to take in."""

import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.bits import LANES, float_bits
from gcjax._types import Array

# Gradients from here on count as not finite. What methods add up then stays in float32's range: 2**28 entries of a
# bucket, over 2**20 steps.
LARGEST = 2.0**80


def bad_leaves(gradients: Iterable[Sequence[Array]], squares: Iterable[Sequence[Array] | None]) -> Array:
    """How many arrays have an entry that is not finite or not below `LARGEST`, or a negative square: int32."""
    # Both differences are zero for good values, and otherwise NaN or positive.
    scaled = [g * (2.0**128 / LARGEST) for leaves in gradients for g in leaves]  # infinite from LARGEST on
    bad = [_any_nonzero(g - g) for g in scaled]
    bad += [_any_nonzero(jnp.abs(s) - s) for leaves in squares if leaves is not None for s in leaves]
    return jnp.sum(jnp.stack(bad), dtype=jnp.int32)


def _any_nonzero(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=_any_nonzero_on_cpu, default=lambda x: jnp.any(x != 0))


def _any_nonzero_on_cpu(x: Array) -> Array:
    """Reduced over short runs of rows first: a plain any() takes several times as long."""
    rows, columns = _rows_and_columns(x.shape)
    bits = float_bits(x).reshape(-1, rows, columns)
    return jnp.any(lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,)) != 0)


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Two numbers whose product divides the size: rows, at most 16, and columns, the last axis where it is long."""
    size, columns = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    if columns < LANES:
        columns = _largest_divisor(size, 8 * LANES)
    return _largest_divisor(size // columns, 16), columns


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
