"""The collectives that a method may use."""

import dataclasses
from collections.abc import Callable

from gcjax._types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Comm:
    """The collectives that a method may use. They are injected, so that no method names one of JAX's.

    Bytes are counted at trace time as ring algorithms move them. With p workers, what one worker sends (and receives)
    for m bytes is (p - 1) m for a gather, 2 (p - 1) / p m for a maximum, sum or mean, and (p - 1) / p m for an
    all-to-all. What is gathered is padded to a multiple of 8 entries. With inner workers, m is the size of one worker's
    share, padding included, and what moves between the inner workers is not counted.

    Attributes:
      size: number of workers p. Static.
      rank: rank() -> int32[], this worker's number.
      max: max(x) -> the maximum over the workers, of the shape of x, equal on all workers.
      sum: sum(x) -> the sum over the workers, of the shape of x, equal on all workers.
      mean: mean(x) -> the mean over the workers, of the shape of x, equal on all workers; also of a tuple of arrays, in
        one all-reduce.
      gather: gather(x) -> (p, *x.shape), row w from worker w, equal on all workers.
      all_to_all: all_to_all(x) with x of shape (p, ...): sends row w to worker w; returns row w from worker w.
      bytes_moved: bytes_moved() -> float, what the calls so far make one worker send.
      metered: metered() -> branch, and branch() -> the same collectives with the count at zero. For code that runs on
        some steps only: one metered() for a conditional, one branch() in each of its branches.
      inner_workers: number of inner workers that share the work of one worker here. All collectives but the maximum
        are cut into as many parts. Static.
    """

    size: int
    rank: Callable[[], Array]
    max: Callable[[Array], Array]
    sum: Callable[[Array], Array]
    mean: Callable[[PyTree], PyTree]
    gather: Callable[[Array], Array]
    all_to_all: Callable[[Array], Array]
    bytes_moved: Callable[[], float]
    metered: Callable[[], Callable[[], "Comm"]]
    inner_workers: int = 1
