"""What the methods should do, entry by entry, in plain numpy: loops, no JAX, nothing shared with the package.

A worker's gradient is a list of flat float32 arrays, one per leaf. Scalars are np.float32 throughout, so that sums and
products round as they do in the package.
"""

import math

import numpy as np

F = np.float32
FLOAT_MAX = F(np.finfo(np.float32).max)
TINY = F(np.finfo(np.float32).tiny)


def floor_log2(x) -> int:
    """Exponent of the power of two at or below |x| > 0."""
    return math.frexp(abs(float(x)))[1] - 1


def nearest_power(x) -> int:
    """Exponent of the power of two nearest to |x| > 0; the mid-point goes up."""
    k = floor_log2(x)
    return k + 1 if abs(float(x)) >= 1.5 * 2.0**k else k


def as_float16(x) -> np.float32:
    return F(np.float16(x))


def hash_bits(words, positions):
    """What `gcjax._random.hash_bits` gives: uint32 bits at each position, from the two words of a key."""
    x = np.asarray(positions, np.uint32) + np.uint32(words[0])
    return _mix(_mix(x) ^ np.uint32(words[1]))


def quick_bits(offset, positions):
    """What `gcjax._random.quick_bits` gives."""
    return _mix(np.asarray(positions, np.uint32) + np.uint32(offset))


def _mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(words, positions):
    """float32 in [0, 1), the same numbers as `gcjax._random.uniform` at these positions."""
    return (hash_bits(words, positions) >> np.uint32(8)).astype(F) * F(2.0**-24)


def largest(magnitudes, k):
    """Positions of the k largest of a flat array, of equal ones the first; nothing below the normal range."""
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))
    return [i for i in order[:k] if magnitudes[i] >= TINY]


class SparseOracle:
    """Error feedback around a selection: `select(a)` takes one worker's flat leaves, joined, returns positions to send.

    `capacity`: the largest number of entries that may be sent; beyond it see `first_that_fit`.
    """

    def __init__(self, workers, sizes, select, capacity=None):
        self.sizes, self.select, self.capacity = sizes, select, capacity
        self.a = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.steps, self.first_word = 0, [0] * workers

    def step(self, gradients, squares):
        del squares
        mean, counts = np.zeros(sum(self.sizes), F), []
        for w, leaves in enumerate(gradients):
            a = self.a[w] + np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(F)
            chosen = list(self.select(a, self.steps))
            sent = chosen
            if self.capacity is not None:
                sent, self.first_word[w] = first_that_fit(chosen, self.sizes, self.capacity, self.first_word[w])
            for i in sorted(sent):
                mean[i] += F(a[i] / F(len(gradients)))
                a[i] = 0
            self.a[w] = a
            counts.append((len(chosen), len(sent), 0, len(chosen) - len(sent)))
        self.steps += 1
        return split(mean, self.sizes), counts


def split(flat, sizes):
    """One flat array of all parameters as a list of flat leaves."""
    return np.split(flat, np.cumsum(sizes)[:-1])


def first_that_fit(chosen, sizes, capacity, first_word):
    """Of entries given by their place among all parameters, those that fit the payload, and the next first word.

    They go in whole words of 32 entries of the flat bucket, in which every leaf begins at a new word.
    """
    if len(chosen) <= capacity:
        return chosen, 0
    place, offset = [], 0
    for size in sizes:
        place += [offset + i // 32 for i in range(size)]
        offset += -(-size // 32)
    words = {}
    for i in sorted(chosen):
        words.setdefault(place[i], []).append(i)
    sent = []
    for word in sorted(words, key=lambda word: (word < first_word, word)):
        if len(sent) + len(words[word]) > capacity:
            return sent, word
        sent += words[word]
    raise AssertionError("unreachable: more than fits, and yet all fitted")
