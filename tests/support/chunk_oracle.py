"""How leaves are cut into chunks, written as loops."""

import math

import numpy as np


def parts(length, chunk):
    """(number, length) of the fewest equal parts of an axis, at most `chunk` long."""
    number = math.ceil(length / chunk)
    return number, math.ceil(length / number)


class ChunkedLeaf:
    """A leaf as a matrix, padded to whole chunks.

    Attributes:
      size: entries of the leaf.
      height, width: of a chunk.
      chunks: for each chunk, the slices of its rows and columns.
    """

    def __init__(self, shape, chunk):
        self.size = math.prod(shape)
        if len(shape) > 1:
            self._rows, self._columns = self.size // shape[-1], shape[-1]
        elif self.size <= chunk**2:
            self._rows, self._columns = 1, self.size
        else:
            self._rows, self._columns = math.ceil(self.size / chunk), chunk
        (down, self.height), (across, self.width) = parts(self._rows, chunk), parts(self._columns, chunk)
        corners = [(i * self.height, j * self.width) for i in range(down) for j in range(across)]
        self.chunks = [(slice(i, i + self.height), slice(j, j + self.width)) for i, j in corners]
        self._padded = down * self.height, across * self.width

    def matrix(self, leaf, fill=0.0):
        flat = np.full(self._rows * self._columns, fill, float)
        flat[: self.size] = leaf
        result = np.full(self._padded, fill, float)
        result[: self._rows, : self._columns] = flat.reshape(self._rows, self._columns)
        return result

    def flat(self, matrix):
        return matrix[: self._rows, : self._columns].reshape(-1)[: self.size]
