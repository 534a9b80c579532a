"""What the numpy oracles of the methods share: loops over entries, without JAX or anything of the package.

A worker's gradient is a list of flat float32 arrays, one per leaf. Scalars are np.float32 throughout, so that sums and
products round as they do in the package.
"""

import math

import numpy as np
from rows import INDICES

F = np.float32
INDEX = np.concatenate(INDICES)  # on the wire, of every parameter
FLOAT_MAX = F(np.finfo(np.float32).max)
TINY = F(np.finfo(np.float32).tiny)


def floor_log2(x) -> int:
    """Exponent of the power of two at or below |x| > 0."""
    return math.frexp(abs(float(x)))[1] - 1


def nearest_power(x) -> int:
    """Exponent of the power of two nearest to |x| > 0; the mid-point rounds up."""
    k = floor_log2(x)
    return k + 1 if abs(float(x)) >= 1.5 * 2.0**k else k


def hash_bits(words, positions):
    """The bits of `gcjax._kernels.hashing.hash_bits` at each position, uint32, from the two words of a key."""
    x = np.asarray(positions, np.uint32) + np.uint32(words[0])
    return _mix(_mix(x) ^ np.uint32(words[1]))


def quick_bits(offset, positions):
    """The bits of `gcjax._kernels.hashing.quick_bits`."""
    return _mix(np.asarray(positions, np.uint32) + np.uint32(offset))


def _mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(words, positions):
    """The numbers of `gcjax._kernels.hashing.uniform` at these positions, float32 in [0, 1)."""
    return (hash_bits(words, positions) >> np.uint32(8)).astype(F) * F(2.0**-24)


def largest(magnitudes, k, index=INDEX):
    """Positions of the k largest; ties go to the lowest index. Nothing below the normal range is selected."""
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], index[i]))
    return [i for i in order[:k] if magnitudes[i] >= TINY]


class SparseOracle:
    """Error feedback around a selection.

    Args:
      workers: number of workers.
      sizes: entries of each leaf.
      select: select(a, step) -> positions to send, with a one worker's leaves as one flat array.
      capacity: most entries that can be sent, or several capacities, or None. On overflow the largest are sent.
      transport: "all_gather" or "two_phase".
    """

    def __init__(self, workers, sizes, select, capacity=None, transport="all_gather"):
        self.sizes, self.select = sizes, select
        self.wire = wire(transport, workers, sizes, capacity, "float32")
        self.a = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        messages, counts = [], []
        for w, leaves in enumerate(gradients):
            self.a[w] = self.a[w] + np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(F)
            chosen = list(self.select(self.a[w], self.steps))
            sent = self.wire.fit(w, chosen, self.a[w])
            messages.append({i: self.a[w][i] for i in sent})
            self.a[w][sent] = 0
            counts.append((len(chosen), len(sent), 0, len(chosen) - len(sent)))
        self.steps += 1
        return split(self.wire.deliver(messages), self.sizes), counts


def split(flat, sizes):
    """One flat array of all parameters as a list of flat leaves."""
    return np.split(flat, np.cumsum(sizes)[:-1])


def wire(transport, workers, sizes, capacity, values):
    """The exchange: `fit` selects the entries of a worker that are sent, `deliver` adds those of all workers.

    Where sources leave open how much room a message has, `allow` is told of a step before it.

    Args:
      transport: "all_gather" or "two_phase".
      workers: number of workers.
      sizes: entries of each leaf.
      capacity: a number of slots, several of them, or None.
      values: how owners send theirs: "float32" or "power_of_two".
    """
    if transport == "all_gather" or workers == 1:
        return AllGather(sizes, max(capacity) if isinstance(capacity, tuple) else capacity)
    return Owners(workers, sizes, values)


class AllGather:
    def __init__(self, sizes, capacity):
        self.sizes, self.capacity = sizes, capacity

    def allow(self, capacity, update):
        """Nothing is left open: entries that the largest capacity cannot hold wait."""

    def fit(self, worker, chosen, x):
        """The chosen parameters that fit into the payload; x has the values of all parameters, flat."""
        del worker
        return keep_largest(self.capacity, chosen, x)

    def deliver(self, messages):
        """Each worker's {parameter: value} -> the mean."""
        mean = np.zeros(sum(self.sizes), F)
        for message in messages:
            for i, y in message.items():
                mean[i] += F(y / F(len(messages)))
        return mean


class Owners:
    """The mask words are dealt to the owners in rounds of one word each; see `gcjax._sparse.owners`."""

    def __init__(self, workers, sizes, values):
        self.workers, self.sizes, self.values = workers, sizes, values
        self.rounds = 128  # each owner has room for the words of one block, as it has at least one of them
        self.first_round = [0] * workers
        self.leaf = np.repeat(np.arange(len(sizes)), sizes)
        self.owner_of = np.array([self.owner(i)[0] for i in range(sum(sizes))])
        self.owed = np.zeros(sum(sizes), F)

    def allow(self, capacity, update):
        """Of a step: the slots of all owners together, and the mean, which shows whether they sent all entries."""
        self.slots, self.update = capacity // self.workers, update

    def owner(self, i):
        """The owner of parameter i, and the round in which its word was dealt."""
        dealt_in, seat = divmod(INDEX[i] // 32, self.workers)
        rotation = int(quick_bits(np.uint32(0), np.array([dealt_in]))[0]) % self.workers
        return (seat - rotation) % self.workers, dealt_in

    def fit(self, worker, chosen, x):
        chosen = keep_largest(self.slots * self.workers, chosen, x)
        first, sent, stops = self.first_round[worker], [], []
        for owner in range(self.workers):
            by_round = {}
            for i in chosen:
                if self.owner_of[i] == owner:
                    by_round.setdefault(self.owner(i)[1], []).append(i)
            room = self.slots
            for dealt_in in sorted(by_round, key=lambda r: (r < first, r)):
                if len(by_round[dealt_in]) > room:
                    stops.append((dealt_in - first) % self.rounds)
                    break
                room -= len(by_round[dealt_in])
                sent += by_round[dealt_in]
        self.first_round[worker] = (first + min(stops)) % self.rounds if stops else 0
        return sorted(sent)

    def deliver(self, messages):
        share = F(1) / F(self.workers)  # XLA multiplies by it
        total = self.owed.copy()
        for message in messages:
            for i, y in message.items():
                total[i] += F(y * share)
        exponent = {}  # of the largest of each owner's part of a leaf
        for i in np.flatnonzero(total):
            at = self.owner_of[i], self.leaf[i]
            exponent[at] = max(exponent.get(at, -999), floor_log2(total[i]))
        codes = [self._code(x, exponent.get((self.owner_of[i], self.leaf[i]))) for i, x in enumerate(total)]
        going = np.array([code != 0 and x != owed for code, x, owed in zip(codes, total, self.owed, strict=True)])
        if self.update[~going].any():  # the owners sent the codes of all their entries
            going[:] = True
        passed_on = np.where(going, codes, F(0))
        self.owed = total - passed_on
        return passed_on

    def _code(self, x, exponent):
        """What all workers see of a value x, where 2**exponent is the power of two at or below the largest."""
        if abs(x) < TINY:
            return F(0)
        if self.values == "float32":
            return x
        power = min(nearest_power(x), exponent)
        return F(math.copysign(2.0**power, x)) if power >= exponent - 6 else F(0)


def keep_largest(limit, chosen, x):
    """The `limit` chosen parameters with the largest |x|; ties go to the lowest index. None keeps them all."""
    if limit is None or len(chosen) <= limit:
        return chosen
    return [chosen[j] for j in largest([abs(x[i]) for i in chosen], limit, INDEX[chosen])]
