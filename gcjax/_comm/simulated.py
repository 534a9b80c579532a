"""Simulated workers that all send what this one sends: to list and time what a method does.

A transform made without axis names gets simulated workers from `simulated_workers`. Traced on shapes alone, they list
every transfer; run, they take the time of compressing and decoding, without a network.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._comm.collectives import GATHER_ROWS, mesh_comm, replaced_comm
from gcjax._comm.comm import Comm
from gcjax._types import Array, PyTree

# Square matrices stand for a model of which only the size is known.
SIDE = 1000  # rows of each
MATRICES = 256  # a model of more of them has larger ones, so that tracing a method takes seconds
LARGEST_SIDE = 1 << 14  # such a matrix fills a bucket


class Transfer(NamedTuple):
    """One collective.

    Attributes:
      kind: "maximum", "all_reduce", "all_gather" or "all_to_all".
      bytes: what one worker puts in.
    """

    kind: str
    bytes: int


Record = list["Transfer | list[Record]"]  # transfers, and for each conditional a record of each of its branches


def ring_bytes(transfer: Transfer, workers: int) -> float:
    """What one worker sends, and receives, with ring algorithms."""
    shares = {"maximum": 2 / workers, "all_reduce": 2 / workers, "all_gather": 1, "all_to_all": 1 / workers}
    return shares[transfer.kind] * (workers - 1) * transfer.bytes


def arriving_bytes(transfer: Transfer, workers: int) -> int:
    """Bytes that a worker holds in memory after the transfer."""
    return transfer.bytes * (workers if transfer.kind == "all_gather" else 1)


def model_of(size: int) -> list[jax.ShapeDtypeStruct]:
    """A model of `size` parameters: square matrices, of `SIDE` rows in a model of usual size, and the rest."""
    side = min(max(SIDE, math.isqrt(size // MATRICES)), max(math.isqrt(size), 1), LARGEST_SIDE)
    rows, rest = divmod(size, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * (rows // side) + [(rows % side, side), (rest,)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes if math.prod(shape)]


def transfers_of(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, workers: int, squares: bool
) -> tuple[Transfer, ...]:
    """What one worker sends in one update, in order. Only traces: nothing is computed or allocated.

    Of several capacities, the largest counts.

    Args:
      tx: a transform made without axis names.
      params: arrays or `jax.ShapeDtypeStruct`s.
      workers: number of workers.
      squares: whether `tx` takes `sum_grad_squared`.
    """
    record: Record = []

    def update(gradient: PyTree, zeros: Array) -> PyTree:
        extra = {"sum_grad_squared": gradient} if squares else {}
        with simulated_workers(workers, zeros, record):
            return tx.update(gradient, tx.init(gradient), **extra)

    jax.eval_shape(update, params, jax.ShapeDtypeStruct((workers,), jnp.int32))
    return _with_largest_branches(record, workers)


def _with_largest_branches(record: Record, workers: int) -> tuple[Transfer, ...]:
    transfers: list[Transfer] = []
    for entry in record:
        if isinstance(entry, Transfer):
            transfers.append(entry)
        else:
            branches = [_with_largest_branches(branch, workers) for branch in entry]
            transfers += max(branches, key=lambda branch: sum(ring_bytes(t, workers) for t in branch), default=())
    return tuple(transfers)


@contextlib.contextmanager
def simulated_workers(workers: int, zeros: Array, record: Record) -> Iterator[None]:
    """Inside, transforms without axis names have `workers` workers. `zeros` is as for `SimulatedComm`."""

    def factory(axis_names: tuple[str, ...], inner_axes: tuple[str, ...]) -> Comm:
        return mesh_comm(axis_names, inner_axes) if axis_names else SimulatedComm(workers, zeros, record)

    with replaced_comm(factory):
        yield


class SimulatedComm(Comm):
    """Workers that all send the same. Every transfer is appended to `record`.

    Args:
      workers: how many.
      zeros: int32[workers], opaque zeros: otherwise XLA decodes one payload and reuses it for all workers.
      record: list to append to.
    """

    def __init__(self, workers: int, zeros: Array, record: Record) -> None:
        self.size, self._zeros, self._record = workers, zeros, record

    def rank(self) -> Array:
        return self._zeros[0]

    def max(self, x: Array) -> Array:
        self._note("maximum", x.nbytes)
        return x + self._zeros[0].astype(x.dtype)

    def sum(self, x: Array) -> Array:
        self._note("all_reduce", x.nbytes)
        return self._total(x)

    def mean(self, tree: PyTree) -> PyTree:  # in one transfer: XLA combines all-reduces that do not wait for each other
        self._note("all_reduce", sum(x.nbytes for x in jax.tree.leaves(tree)))
        return jax.tree.map(lambda x: self._total(x) / self.size, tree)

    def gather(self, x: Array) -> Array:
        self._note("all_gather", -(-x.size // GATHER_ROWS) * GATHER_ROWS * x.dtype.itemsize)
        return self._rows(x)

    def all_to_all(self, x: Array) -> Array:
        self._note("all_to_all", x.nbytes)
        return self._rows(x[0])  # what the others send to worker 0 is what it sends to itself

    def bytes_moved(self) -> float:
        return sum(ring_bytes(entry, self.size) for entry in self._record if isinstance(entry, Transfer))

    def metered(self) -> Callable[[], Comm]:
        branches: list[Record] = []
        self._record.append(branches)

        def branch() -> Comm:
            branches.append([])
            return SimulatedComm(self.size, self._zeros, branches[-1])

        return branch

    def _note(self, kind: str, nbytes: int) -> None:
        self._record.append(Transfer(kind, nbytes))

    def _total(self, x: Array) -> Array:
        return self.size * x + self._zeros[0].astype(x.dtype)

    def _rows(self, x: Array) -> Array:
        return x[None] + self._zeros.astype(x.dtype).reshape(-1, *[1] * x.ndim)
