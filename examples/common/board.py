"""The nodes' models and states in MPI one-sided windows: memory that every node reads and writes without asking."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

# A node's memory: a header of int64 words, among them these, then its communication copy, float32.
SEQUENCE, STEPS, BEAT, STATE = range(4)
HEADER = 64  # bytes
RUNNING, DONE, REPORTED = range(3)  # values of STATE


class Board:
    """The communication copies of all nodes, with a header each.

    Reads are not torn: each copy has a sequence number, odd while a node writes. A writer takes it from even to odd by
    an atomic compare-and-swap, so that there is one writer at a time. A reader that finds an odd number, or another
    one after reading, drops what it read. No node waits for a number to change; a busy copy is skipped.

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
        self._put(self.rank, 0, np.zeros(HEADER // 8, np.int64))
        self._put(self.rank, HEADER, start)

    def header(self, rank: int) -> np.ndarray:
        """The header of a node, int64[8]."""
        return self._get(rank, 0, np.empty(HEADER // 8, np.int64))

    def set_word(self, word: int, value: int) -> None:
        """Set a word of this node's header. Only the node itself writes them, except for the sequence number."""
        self._put(self.rank, 8 * word, np.array([value], np.int64))

    def read(self, rank: int) -> np.ndarray | None:
        """A node's copy, float32[n]; None while some node writes it."""
        before = self._sequence(rank)
        if before % 2:
            return None
        copy = self._get(rank, HEADER, np.empty(self.size, np.float32))
        return copy if self._sequence(rank) == before else None

    def add(self, rank: int, change: np.ndarray) -> bool:
        """Add to a node's copy. Returns False, and does nothing, while another node writes it."""
        sequence = self._sequence(rank)
        if sequence % 2 or not self._swap(rank, sequence, sequence + 1):
            return False
        copy = self._get(rank, HEADER, np.empty(self.size, np.float32))
        self._put(rank, HEADER, copy + change)
        self._swap(rank, sequence + 1, sequence + 2)
        return True

    def add_to_own(self, change: np.ndarray, live: np.ndarray, patience: float) -> np.ndarray:
        """Add to this node's copy, waiting for other writers, which take microseconds.

        A writer that dies leaves the sequence number odd. After `patience` seconds the copy is therefore replaced by
        `live + change`. If the writer was only stopped and then ends its write, it can tear one read.

        Args:
          change: float32[n], what to add.
          live: float32[n], this node's model, from which to make a new copy.
          patience: seconds.

        Returns:
          The copy.
        """
        begin = time.monotonic()
        while not self.add(self.rank, change):
            sequence = self._sequence(self.rank)
            if time.monotonic() - begin > patience and sequence % 2 and self._swap(self.rank, sequence, sequence + 2):
                self._put(self.rank, HEADER, live + change)
                self._swap(self.rank, sequence + 2, sequence + 3)
                break
        while (copy := self.read(self.rank)) is None and time.monotonic() - begin < 2 * patience:
            pass
        return live + change if copy is None else copy

    def close(self) -> None:
        """Free the memory. Waits for all nodes."""
        self._window.Unlock_all()
        self._window.Free()

    def _sequence(self, rank: int) -> int:
        found = np.empty(1, np.int64)
        self._window.Fetch_and_op(np.zeros(1, np.int64), found, rank, 8 * SEQUENCE, self._mpi.NO_OP)
        self._window.Flush(rank)
        return int(found[0])

    def _swap(self, rank: int, old: int, new: int) -> bool:
        """Set a sequence number to `new` if it is `old`; whether it was."""
        found = np.empty(1, np.int64)
        new_word, old_word = np.array([new], np.int64), np.array([old], np.int64)
        self._window.Compare_and_swap(new_word, old_word, found, rank, 8 * SEQUENCE)
        self._window.Flush(rank)
        return int(found[0]) == old

    def _get(self, rank: int, at: int, into: np.ndarray) -> np.ndarray:
        self._window.Get([into, self._mpi.BYTE], rank, [at, into.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)
        return into

    def _put(self, rank: int, at: int, values: np.ndarray) -> None:
        self._window.Put([values, self._mpi.BYTE], rank, [at, values.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)


class Peers:
    """Which nodes are alive: those whose beat changed in the last `patience` seconds, or that are done.

    Attributes:
      nodes: number of all nodes.
    """

    def __init__(self, board: Board, nodes: int, patience: float):
        self._board, self._patience, self.nodes = board, patience, nodes
        self._heard = [(-1, time.monotonic())] * nodes  # last beat of each node, and when it was first seen

    def state(self, rank: int) -> int | None:
        """RUNNING, DONE or REPORTED; None for a node that is lost."""
        header = self._board.header(rank)
        beat, now = int(header[BEAT]), time.monotonic()
        if beat != self._heard[rank][0]:
            self._heard[rank] = (beat, now)
        silent = header[STATE] == RUNNING and now - self._heard[rank][1] > self._patience
        return None if silent else int(header[STATE])

    def choose(self, rng: np.random.Generator) -> int | None:
        """A random other node that is alive; None if there is none."""
        for partner in map(int, rng.permutation(self.nodes)):
            if partner != self._board.rank and self.state(partner) is not None:
                return partner
        return None
