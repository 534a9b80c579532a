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
    """What `gcjax._kernels.hashing.hash_bits` gives: uint32 bits at each position, from the two words of a key."""
    x = np.asarray(positions, np.uint32) + np.uint32(words[0])
    return _mix(_mix(x) ^ np.uint32(words[1]))


def quick_bits(offset, positions):
    """What `gcjax._kernels.hashing.quick_bits` gives."""
    return _mix(np.asarray(positions, np.uint32) + np.uint32(offset))


def _mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(words, positions):
    """float32 in [0, 1), the same numbers as `gcjax._kernels.hashing.uniform` at these positions."""
    return (hash_bits(words, positions) >> np.uint32(8)).astype(F) * F(2.0**-24)


def largest(magnitudes, k):
    """Positions of the k largest of a flat array, of equal ones the first; nothing below the normal range."""
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))
    return [i for i in order[:k] if magnitudes[i] >= TINY]


class SparseOracle:
    """Error feedback around a selection: `select(a)` takes one worker's flat leaves, joined, returns positions to send.

    `capacity`: the largest number of entries that may be sent; beyond it the largest are.
    """

    def __init__(self, workers, sizes, select, capacity=None, transport="all_gather"):
        self.sizes, self.select = sizes, select
        self.wire = wire(transport, workers, sizes, capacity)
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
        mean, back = self.wire.deliver(messages)
        for w, returned in enumerate(back):
            for i, y in returned.items():
                self.a[w][i] += y
        return split(mean, self.sizes), counts


def split(flat, sizes):
    """One flat array of all parameters as a list of flat leaves."""
    return np.split(flat, np.cumsum(sizes)[:-1])


def wire(transport, workers, sizes, capacity):
    """How the entries travel that workers send: `fit` says which of a worker's do, `deliver` what becomes of them.

    capacity: a number of slots, a ladder of them, or None.
    """
    alone = transport == "all_gather" or workers == 1
    top = max(capacity) if isinstance(capacity, tuple) else capacity
    return ToAll(workers, sizes, top) if alone else ThroughOwners(workers, sizes, capacity)


class ToAll:
    def __init__(self, workers, sizes, capacity):
        del workers
        self.sizes, self.capacity = sizes, capacity

    def fit(self, worker, chosen, x):
        """Those of `chosen`, places among all parameters, that fit the payload; x: what lies there, flat."""
        del worker
        return keep_largest(self.capacity, chosen, x)

    def deliver(self, messages):
        """Each worker's {place: value} -> the mean, and of each worker {place: value} what comes back to it."""
        mean = np.zeros(sum(self.sizes), F)
        for message in messages:
            for i, y in message.items():
                mean[i] += F(y / F(len(messages)))
        return mean, [{} for _ in messages]


class ThroughOwners:
    def __init__(self, workers, sizes, capacity):
        self.workers, self.sizes, self.word_of = workers, sizes, places(sizes)
        ladder = capacity if isinstance(capacity, tuple) else (capacity,)
        self.ladder = sorted(max(math.ceil(math.ceil(rung / 32) * 32 / workers), 32) for rung in ladder)
        words = math.ceil((max(self.word_of) + 1) / 32) * 32
        self.rounds = math.ceil(words / workers / 32) * 32
        self.first_round = [0] * workers

    def owner(self, i):
        """Owner of a parameter, and the round in which it was dealt."""
        dealt_in, seat = divmod(self.word_of[i], self.workers)
        turn = int(quick_bits(np.uint32(0), np.array([dealt_in]))[0]) % self.workers
        return (seat - turn) % self.workers, dealt_in

    def fit(self, worker, chosen, x):
        chosen = keep_largest(self.ladder[-1] * self.workers, chosen, x)
        first, sent, stops = self.first_round[worker], [], []
        for owner in range(self.workers):
            by_round = {}
            for i in sorted(chosen):
                if self.owner(i)[0] == owner:
                    by_round.setdefault(self.owner(i)[1], []).append(i)
            room = self.ladder[-1]
            for dealt_in in sorted(by_round, key=lambda r: (r < first, r)):
                if len(by_round[dealt_in]) > room:
                    stops.append((dealt_in - first) % self.rounds)
                    break
                room -= len(by_round[dealt_in])
                sent += by_round[dealt_in]
        self.first_round[worker] = (first + min(stops)) % self.rounds if stops else 0
        return sorted(sent)

    def deliver(self, messages):
        share = F(1) / F(self.workers)  # XLA multiplies by it; where owners choose between ties, that matters
        sums, passed_on = np.zeros(sum(self.sizes), F), np.zeros(sum(self.sizes), F)
        for message in messages:
            for i, y in message.items():
                sums[i] += F(y * share)
        fullest = max(
            sum(self.owner(i)[0] == owner for i in message) for message in messages for owner in range(self.workers)
        )
        slots = next(rung for rung in self.ladder if rung >= fullest)
        back = []
        for owner in range(self.workers):
            owned = [i for i in range(len(sums)) if sums[i] != 0 and self.owner(i)[0] == owner]
            best = [owned[j] for j in largest(np.abs(sums[owned]), slots)]
            passed_on[best] = sums[best]
            back.append({i: F(sums[i] * F(self.workers)) for i in owned if i not in best})
        return passed_on, back


def places(sizes):
    """Every parameter's word of 32 entries in the flat bucket, in which every leaf begins at a new word."""
    place, offset = [], 0
    for size in sizes:
        place += [offset + i // 32 for i in range(size)]
        offset += -(-size // 32)
    return place


def keep_largest(limit, chosen, x):
    """Of chosen places those with the largest |x|, `limit` of them, of equal ones the first."""
    if limit is None or len(chosen) <= limit:
        return chosen
    chosen = sorted(chosen)
    return sorted(chosen[j] for j in largest([abs(x[i]) for i in chosen], limit))
