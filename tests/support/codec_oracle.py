"""Codes of every entry, for numpy oracles: gathered whole, or through owners in two phases, with loops over workers."""

import math

import numpy as np
from oracle import F
from rows import places_of, seed_words


class CodecOracle:
    """Workers that exchange a code of every entry.

    Args:
      workers: number of workers.
      sizes: entries of each leaf.
      code: code(leaves, places, words) -> what the receivers see: leaves are flat arrays, `places` says where they lie
        in the bucket, and words are the two of the message's key, or None.
      key: random key, or None.
      feedback: keep what the receivers have not seen.
      transport: "all_gather" or "two_phase".
      code_mean: how owners send the mean; None for `code`.
      owners_keep: owners keep what the workers have not seen of the mean.
      dtype: of all arithmetic.
    """

    def __init__(
        self,
        workers,
        sizes,
        code,
        *,
        key=None,
        feedback=False,
        transport="all_gather",
        code_mean=None,
        owners_keep=True,
        dtype=F,
    ):
        self.owners_keep = owners_keep
        self.workers, self.sizes, self.code, self.code_mean = workers, sizes, code, code_mean or code
        self.key, self.feedback, self.dtype, self.steps = key, feedback, dtype, 0
        self.two_phase = transport == "two_phase" and workers > 1
        self.share = dtype(1) / dtype(workers)  # XLA multiplies by it
        self.errors = [[np.zeros(n, dtype) for n in sizes] for _ in range(workers)]
        self.piece_sizes = [math.ceil(n / workers) for n in sizes]
        self.owed = [[np.zeros(n, dtype) for n in self.piece_sizes] for _ in range(workers)]

    def step(self, gradients, squares):
        del squares
        taken_in = [
            [x.astype(self.dtype) + e for x, e in zip(leaves, errors, strict=True)]
            for leaves, errors in zip(gradients, self.errors, strict=True)
        ]
        mean, seen = self.through_owners(taken_in) if self.two_phase else self.gathered(taken_in)
        if self.feedback:
            self.errors = [[x - y for x, y in zip(a, b, strict=True)] for a, b in zip(taken_in, seen, strict=True)]
        self.steps += 1
        return [leaf.astype(F) for leaf in mean], [(sum(self.sizes),) * 2 + (0, 0)] * self.workers

    def words(self, worker, message=None):
        return None if self.key is None else seed_words(self.key, self.steps, rank=worker, message=message)

    def mean(self, start, messages):
        """`start` plus the mean of the workers' leaves. As XLA fuses it: each product is exact until it is added."""
        for leaves in messages:
            start = [
                (x + y.astype(np.float64) * float(self.share)).astype(self.dtype)
                for x, y in zip(start, leaves, strict=True)
            ]
        return start

    def gathered(self, taken_in):
        seen = [self.code(leaves, places_of(self.sizes), self.words(w)) for w, leaves in enumerate(taken_in)]
        return self.mean([np.zeros(n, self.dtype) for n in self.sizes], seen), seen

    def through_owners(self, taken_in):
        places = places_of(self.piece_sizes)
        sent = [  # [worker][owner] -> pieces
            [self.code(self.pieces(leaves, owner), places, self.words(w, owner)) for owner in range(self.workers)]
            for w, leaves in enumerate(taken_in)
        ]
        mean = []
        for owner in range(self.workers):
            total = self.mean(self.owed[owner], [by_owner[owner] for by_owner in sent])
            total = self.cleared(total, owner)
            passed_on = self.code_mean(total, places, self.words(owner, self.workers))
            mean.append(passed_on)
            if self.owners_keep:
                left = [x - y for x, y in zip(total, passed_on, strict=True)]
                self.owed[owner] = self.cleared(left, owner)
        return self.joined(mean), [self.joined(by_owner) for by_owner in sent]

    def pieces(self, leaves, owner):
        """Piece number `owner` of every leaf, padded with zeros."""
        padded = [np.pad(x, (0, self.workers * n - len(x))) for x, n in zip(leaves, self.piece_sizes, strict=True)]
        return [x[owner * n : (owner + 1) * n] for x, n in zip(padded, self.piece_sizes, strict=True)]

    def joined(self, by_owner):
        """The leaves, from the pieces of each owner."""
        return [np.concatenate(pieces)[:n] for pieces, n in zip(zip(*by_owner, strict=True), self.sizes, strict=True)]

    def cleared(self, pieces, owner):
        """Zeros beyond the ends of the leaves."""
        within = [owner * n + np.arange(n) < size for n, size in zip(self.piece_sizes, self.sizes, strict=True)]
        return [np.where(inside, x, self.dtype(0)) for inside, x in zip(within, pieces, strict=True)]
