"""Rows and oracle of drive_compress."""

import jax
import numpy as np
import optax
from oracle import hash_bits

import gcjax
from rows import OFFSETS, Row, seed_words

KEY = jax.random.key(11)
BLOCK = 256
LEVELS = {1: [1.0], 3: [0.2451, 0.7560, 1.3439, 2.1520]}


def sylvester(d):
    """The Hadamard matrix by its definition: entry (i, j) is -1 where i and j share an odd number of bits."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)])


def signs_of(words, count):
    """The changes of sign of a rotation: entry i is turned where bit i % 32 of the hash of i // 32 is set."""
    hashes = hash_bits(words, np.arange(-(-count // 32)))
    return np.array([-1.0 if int(hashes[i // 32]) >> (i % 32) & 1 else 1.0 for i in range(count)])


def quantised(u, levels):
    return np.copysign([min(levels, key=lambda level: abs(level - abs(x))) for x in u], np.where(u < 0, -1, 1))


class DriveOracle:
    """In float64. A leaf of 256 entries and more goes in blocks of 256, the last one filled up with zeros."""

    def __init__(self, workers, sizes, bits, feedback):
        self.sizes, self.levels, self.feedback = sizes, LEVELS[bits], feedback
        self.h = sylvester(BLOCK)
        self.errors = [[np.zeros(n) for n in sizes] for _ in range(workers)]
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        mean = [np.zeros(n) for n in self.sizes]
        for w, leaves in enumerate(gradients):
            signs = signs_of(seed_words(KEY, self.steps, rank=w), OFFSETS[-1] + self.sizes[-1])
            for i, (g, begin) in enumerate(zip(leaves, OFFSETS, strict=True)):
                x = g + self.errors[w][i]
                y = x if len(x) < BLOCK else self.decoded(x, signs[begin : begin + len(x)])
                mean[i] += y / len(gradients)
                if self.feedback:
                    self.errors[w][i] = x - y
        self.steps += 1
        entries = sum(self.sizes)
        return [leaf.astype(np.float32) for leaf in mean], [(entries, entries, 0, 0)] * len(gradients)

    def decoded(self, x, signs):
        size = len(x)
        x, signs = np.pad(x, (0, -size % BLOCK)), np.pad(signs, (0, -size % BLOCK))
        y = np.zeros(len(x))
        for begin in range(0, len(x), BLOCK):
            part = slice(begin, begin + BLOCK)
            if not x[part].any():
                continue
            rotation = self.h * signs[part] / np.sqrt(BLOCK)
            rotated = rotation @ x[part]
            q = quantised(rotated * np.sqrt(BLOCK) / np.linalg.norm(x[part]), self.levels)
            scale = rotated @ q / (q @ q) if self.feedback else x[part] @ x[part] / (rotated @ q)
            y[part] = rotation.T @ (scale * q)
        return y[:size]


def drive(bits, feedback):
    def make(axis_name=None, **more):
        return gcjax.drive_compress(bits, feedback=feedback, key=KEY, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return DriveOracle(workers, sizes, bits, feedback)

    name = f"drive-{bits}{'-feedback' if feedback else ''}"
    return Row(name, "drive_compress", make, make_oracle, conserves=feedback, rtol=1e-5)


ROWS = [drive(1, False), drive(3, True)]


# All leaves of that model are small and go as they are; tests/test_drive.py has a larger one.
def chain(axis_name, learning_rate):
    return optax.chain(gcjax.drive_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"drive_compress": chain}
