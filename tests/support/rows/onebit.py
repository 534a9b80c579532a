"""onebit_compress: its rows, the oracle and the recommended chain."""

import numpy as np
from oracle import F

import gcjax
from rows import SHAPES, Row, before_sgd, made_by


def columns_of(shape):
    """Where the entries of each column lie in the flat leaf, and whether the leaf is a matrix."""
    size = int(np.prod(shape))
    if len(shape) > 1 and 1 < shape[-1] < size:
        return [range(j, size, shape[-1]) for j in range(shape[-1])], True
    return [range(begin, min(begin + 512, size)) for begin in range(0, size, 512)], False


def two_means(column):
    """Each entry replaced by the mean of the entries with its sign; zero counts as plus."""
    out = np.zeros(len(column), F)
    for mask in (column >= 0, column < 0):
        if mask.any():
            out[mask] = F(np.mean(column[mask], dtype=np.float64))
    return out


class OneBitOracle:
    def __init__(self, workers, sizes):
        self.workers, self.sizes = workers, sizes
        self.first = [[np.zeros(n, F) for n in sizes] for _ in range(workers)]
        self.second = [np.zeros(n, F) for n in sizes]
        # The columns of each matrix are divided between the workers; those of all other leaves are divided together.
        self.owned = []  # (owner, leaf, entries of the column)
        others = []
        for leaf, shape in enumerate(SHAPES.values()):
            columns, is_matrix = columns_of(shape)
            if is_matrix:
                self.share([(leaf, np.array(c)) for c in columns])
            else:
                others += [(leaf, np.array(c)) for c in columns]
        self.share(others)

    def share(self, columns):
        width = -(-len(columns) // self.workers)
        self.owned += [(i // width, leaf, entries) for i, (leaf, entries) in enumerate(columns)]

    def step(self, gradients, squares):
        del squares
        update = [np.zeros(n, F) for n in self.sizes]
        for owner, leaf, column in self.owned:
            mean = self.second[leaf][column]
            for w, leaves in enumerate(gradients):
                a = leaves[leaf][column]
                if w != owner:
                    a = a + self.first[w][leaf][column]
                    sent = two_means(a)
                    self.first[w][leaf][column] = a - sent
                    a = sent
                mean = mean + a / F(self.workers)
            update[leaf][column] = two_means(mean)
            self.second[leaf][column] = mean - update[leaf][column]
        entries = sum(self.sizes)
        return update, [(entries, entries, 0, 0)] * self.workers


ROWS = [
    Row("onebit", "onebit_compress", made_by(gcjax.onebit_compress), OneBitOracle, conserves=True, rtol=1e-5),
]
CHAINS = {"onebit_compress": before_sgd(gcjax.onebit_compress)}
