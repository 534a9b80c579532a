"""The capacities of a sparse message: numbers of slots, of which the exchange picks one in every step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gcjax._kernels.bits import LANES, WORD
from gcjax._kernels.buckets import Bucket

SMALLEST = 1 << 14  # the entries divided by it are the smallest capacity where only the largest is given


def check_capacity(capacity: int | float | tuple[int, ...] | None) -> None:
    """Raise unless `capacity` is None, a float in (0, 1], an int above 1, or a tuple of positive ints.

    An int of 1 would be a single slot, where all of the parameters (1.0) are more likely to be meant.

    >>> import gcjax.extend as gx
    >>> gx.check_capacity((64, 0))
    Traceback (most recent call last):
    ValueError: capacity must be at least 1 slot, got (64, 0)
    """
    if isinstance(capacity, float):
        if not 0 < capacity <= 1:
            raise ValueError(f"capacity must be in (0, 1] as a share of the parameters, or an int, got {capacity!r}")
        return
    slots = capacity if isinstance(capacity, tuple) else () if capacity is None else (capacity,)
    for value in slots:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"capacity must be an int, a float, a tuple of ints or None, got {capacity!r}")
        if value < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity!r}")
    if capacity == 1:
        raise ValueError("capacity=1 is a single slot; give 1.0 for as many slots as there are parameters")
    if capacity == ():
        raise ValueError("capacity must name at least one size, got ()")


def capacities_for(capacity: float | tuple[int, ...] | None, entries: int) -> tuple[int, ...]:
    """The numbers of slots of a method's messages, ascending, rounded up to whole groups.

    Args:
      capacity: an int, a tuple of ints, or a float: a share of the entries, which is the largest capacity. The others
        are smaller by factors of the square root of two, down to 1/16384 of the entries. None for 0.25.
      entries: of the bucket.

    Raises:
      ValueError: `capacity` is something else, or not positive.

    >>> import gcjax.extend as gx
    >>> gx.capacities_for((100, 20_000), 1_000_000)
    (128, 20000)
    >>> capacities = gx.capacities_for(0.25, 1_000_000)
    >>> capacities[0], capacities[-1]
    (256, 250112)
    """
    if capacity is None:
        capacity = 0.25
    sizes: tuple[Any, ...] = capacity if isinstance(capacity, tuple) else (capacity,)
    allowed = (int, np.integer) if isinstance(capacity, tuple) else (int, np.integer, float)
    if not sizes or not all(isinstance(size, allowed) for size in sizes) or min(sizes) <= 0:
        raise ValueError(
            "capacity must be a number of slots, a tuple of them, or a share of the entries as a float, got "
            f"{capacity!r}"
        )
    if isinstance(capacity, float):
        return in_groups(ladder(-(-entries // SMALLEST), math.ceil(capacity * entries)))
    return in_groups(sizes)


def capacities_around(
    count: Callable[[Bucket], int], shares: Sequence[float], capacity: float | tuple[int, ...] | None
) -> Callable[[Bucket], float | tuple[int, ...]]:
    """From a bucket to `capacity`, or if that is None to these shares of the wanted count, at most all entries."""

    def capacities(bucket: Bucket) -> float | tuple[int, ...]:
        if capacity is not None:
            return capacity
        return tuple(min(math.ceil(share * count(bucket)), bucket.entries) for share in shares)

    return capacities


def in_groups(wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted numbers of slots, rounded up to whole groups of a message, without repetitions, ascending.

    Groups have as many lanes as possible, up to 128, so long as rounding up adds little.
    """
    lanes = min(max(min(wanted) // 256, max(wanted) // 16384, 1), LANES)
    group = WORD << lanes.bit_length() - 1
    return tuple(sorted({-(-slots // group) * group for slots in wanted}))


def ladder(smallest: int, largest: int) -> list[int]:
    """Numbers from `smallest` to `largest`, in factors of the square root of two."""
    sizes, size = [], float(smallest)
    while size < largest:
        sizes.append(round(size))
        size *= 2**0.5
    return [*sizes, largest]
