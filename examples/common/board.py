"""The nodes' models in MPI one-sided windows: memory that every node reads and writes without asking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER = 8  # bytes before a node's copy: its sequence number, int64


class Board:
    """The communication copies of all nodes.

    Reads are not torn: each copy has a sequence number, odd while a node writes. A writer takes it from even to odd by
    an atomic compare-and-swap, so that there is one writer at a time. A reader that finds an odd number, or another
    one after reading, drops what it read. No node waits for another's copy: a busy one is skipped.

    Attributes:
      rank: of this node.
      size: entries of a copy.
    """

    def __init__(self, comm: MPI.Comm, start: np.ndarray):
        """Make the board. All nodes of `comm` call this, each with its own copy float32[n]."""
        from mpi4py import MPI

        self._mpi, self.rank, self.size = MPI, comm.rank, len(start)
        self._window = MPI.Win.Allocate(HEADER + 4 * self.size, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)  # a shared lock that is kept for ever and excludes no node
        self._put(self.rank, 0, np.zeros(1, np.int64))
        self._put(self.rank, HEADER, start)

    def read(self, rank: int) -> np.ndarray | None:
        """A node's copy, float32[n]; None while some node writes it."""
        before = self._sequence(rank)
        if before % 2:
            return None
        copy = self._get(rank)
        return copy if self._sequence(rank) == before else None

    def add(self, rank: int, change: np.ndarray) -> bool:
        """Add to a node's copy. Returns False, and does nothing, while another node writes it."""
        sequence = self._sequence(rank)
        if sequence % 2 or not self._swap(rank, sequence, sequence + 1):
            return False
        self._put(rank, HEADER, self._get(rank) + change)
        self._swap(rank, sequence + 1, sequence + 2)
        return True

    def add_to_own(self, change: np.ndarray) -> np.ndarray:
        """Add to this node's copy and return it. Waits for other writers, which take microseconds."""
        while not self.add(self.rank, change):
            pass
        while (copy := self.read(self.rank)) is None:
            pass
        return copy

    def close(self) -> None:
        """Free the memory. Waits for all nodes."""
        self._window.Unlock_all()
        self._window.Free()

    def _sequence(self, rank: int) -> int:
        found = np.empty(1, np.int64)
        self._window.Fetch_and_op(np.zeros(1, np.int64), found, rank, 0, self._mpi.NO_OP)
        self._window.Flush(rank)
        return int(found[0])

    def _swap(self, rank: int, old: int, new: int) -> bool:
        """Set a sequence number to `new` if it is `old`; whether it was."""
        found = np.empty(1, np.int64)
        self._window.Compare_and_swap(np.array([new], np.int64), np.array([old], np.int64), found, rank, 0)
        self._window.Flush(rank)
        return int(found[0]) == old

    def _get(self, rank: int) -> np.ndarray:
        copy = np.empty(self.size, np.float32)
        self._window.Get([copy, self._mpi.BYTE], rank, [HEADER, copy.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)
        return copy

    def _put(self, rank: int, at: int, values: np.ndarray) -> None:
        self._window.Put([values, self._mpi.BYTE], rank, [at, values.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)
