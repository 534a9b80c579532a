"""Whether gradients and their squares are good to take in."""

import functools
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax

from gcjax._kernels.bits import LANES
from gcjax._kernels.floats import float_bits
from gcjax._types import Array

# Gradients from here on count as not finite. What methods add up then stays in float32's range: 2**28 entries of a
# bucket, over 2**20 steps.
LARGEST = 2.0**80


def bad_leaves(gradients: Iterable[Sequence[Array]], squares: Iterable[Sequence[Array] | None]) -> Array:
    """In how many leaves an entry is not finite or not below `LARGEST`, or its square negative or NaN: int32."""
    bad = []
    for of_bucket, of_squares in zip(gradients, squares, strict=True):
        for i, g in enumerate(of_bucket):
            scaled = g * (2.0**128 / LARGEST)  # infinite from LARGEST on
            # All differences are zero for good values, and otherwise NaN or positive.
            differences = [scaled - scaled]
            if of_squares is not None:
                differences.append(jnp.abs(of_squares[i]) - of_squares[i])
            bad.append(_any_nonzero(*differences))
    return jnp.sum(jnp.stack(bad), dtype=jnp.int32)


def _any_nonzero(*arrays: Array) -> Array:
    return lax.platform_dependent(
        *arrays,
        cpu=_any_nonzero_on_cpu,
        default=lambda *arrays: jnp.any(functools.reduce(jnp.logical_or, [x != 0 for x in arrays])),
    )


def _any_nonzero_on_cpu(*arrays: Array) -> Array:
    """Reduced over short runs of rows first: a plain any() takes several times as long."""
    rows, columns = _rows_and_columns(arrays[0].shape)
    bits = functools.reduce(lax.bitwise_or, map(float_bits, arrays)).reshape(-1, rows, columns)
    return jnp.any(lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,)) != 0)


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Two numbers whose product divides the size: rows, at most 16, and columns, the last axis where it is long."""
    size, columns = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    if columns < LANES:
        columns = _largest_divisor(size, 8 * LANES)
    return _largest_divisor(size // columns, 16), columns


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
