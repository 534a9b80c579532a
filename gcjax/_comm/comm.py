"""The collectives that a method may use."""

import abc
from collections.abc import Callable

from gcjax._types import Array, PyTree


class Comm(abc.ABC):
    """The collectives that a method may use. They are injected, so that no method names one of JAX's.

    Bytes are counted at trace time as ring algorithms move them. With p workers, one worker sends (and receives), for m
    bytes, (p - 1) m in a gather, 2 (p - 1) / p m in a maximum, sum or mean, and (p - 1) / p m in an all-to-all. A
    gathered array is padded to a multiple of 8 entries. With inner workers, m is the size of one worker's share with
    its padding, and the traffic between the inner workers is not counted.

    Attributes:
      size: number of workers p. Static.
      inner_workers: number of inner workers that share the work of one worker here. All collectives but the maximum
        are cut into as many parts. Static.
    """

    size: int
    inner_workers: int = 1

    @abc.abstractmethod
    def rank(self) -> Array:
        """This worker's number, int32[]."""

    @abc.abstractmethod
    def max(self, x: Array) -> Array:
        """The maximum over the workers, of the shape of x, equal on all workers."""

    @abc.abstractmethod
    def sum(self, x: Array) -> Array:
        """The sum over the workers, of the shape of x, equal on all workers."""

    @abc.abstractmethod
    def mean(self, tree: PyTree) -> PyTree:
        """The mean over the workers of an array, or of each of several in one all-reduce; equal on all workers."""

    @abc.abstractmethod
    def gather(self, x: Array) -> Array:
        """(p, *x.shape), row w from worker w, equal on all workers."""

    @abc.abstractmethod
    def all_to_all(self, x: Array) -> Array:
        """Send row w of x, of shape (p, ...), to worker w; return row w from worker w."""

    @abc.abstractmethod
    def bytes_moved(self) -> float:
        """Bytes that the calls so far make one worker send."""

    @abc.abstractmethod
    def metered(self) -> Callable[[], "Comm"]:
        """For code that runs on some steps only: a function that returns the same collectives with the count at zero.

        Call metered() once for a conditional, and its result once in each of the branches.
        """
