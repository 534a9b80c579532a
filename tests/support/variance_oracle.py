"""What variance_compress and strom_compress should do, entry by entry, in plain numpy."""

import math

import numpy as np
from oracle import FLOAT_MAX, TINY, F, floor_log2, nearest_power, split, wire


class VarianceWorker:
    """One worker: `step` takes in a gradient, selects entries, and resets those that `fit` lets through."""

    def __init__(self, sizes, alpha, decay, threshold=None, underflow="keep"):
        self.alpha, self.decay, self.threshold = F(alpha), F(decay), threshold
        self.underflow = underflow
        self.r = [np.zeros(n, F) for n in sizes]
        self.v = [np.zeros(n, F) for n in sizes]

    def step(self, gradient, squares, fit):
        """Returns ({(leaf, entry): value as received}, count passed, count underflowed, count overflowed)."""
        passed, sendable = [], []
        for leaf, (g, s) in enumerate(zip(gradient, squares, strict=True)):
            for i in range(len(g)):
                self.r[leaf][i] += F(g[i])
                self.v[leaf][i] = min(F(self.v[leaf][i] + F(s[i])), FLOAT_MAX)
                if self._passes(self.r[leaf][i], self.v[leaf][i]):
                    passed.append((leaf, i))
        top = self._tops(passed)
        for leaf, i in passed:
            if self._encodable(self.r[leaf][i], top[leaf]):
                sendable.append((leaf, i))
        sent = fit(sendable)
        values = {at: self._rounded(self.r[at[0]][at[1]], top[at[0]]) for at in sent}
        dropped = set(passed) - set(sendable) if self.underflow == "drop" else set()
        self._reset(values, dropped)
        return values, len(passed), len(passed) - len(sendable), len(sendable) - len(sent)

    def _passes(self, r, v):
        passes = F(r * r) > min(F(self.alpha * v), FLOAT_MAX)
        return passes and (self.threshold is None or abs(r) > F(self.threshold))

    def _tops(self, passed):
        """floor(log2) of the largest passed magnitude of each leaf."""
        top = {}
        for leaf, i in passed:
            k = floor_log2(self.r[leaf][i]) if self.r[leaf][i] else -999
            top[leaf] = max(top.get(leaf, -999), k)
        return top

    def _encodable(self, x, top):
        if abs(x) < TINY:
            return False
        return self.threshold is not None or nearest_power(x) >= top - 7

    def _rounded(self, x, top):
        if self.threshold is not None:
            return F(math.copysign(self.threshold, x))
        return F(math.copysign(2.0 ** min(nearest_power(x), top), x))

    def _reset(self, values, dropped):
        for leaf in range(len(self.r)):
            for i in range(len(self.r[leaf])):
                r, v = self.r[leaf][i], self.v[leaf][i]
                if (leaf, i) in dropped:
                    self.r[leaf][i] = self.v[leaf][i] = 0
                elif (leaf, i) not in values:
                    self.v[leaf][i] = self.decay * v
                elif self.threshold is not None:
                    tau = F(self.threshold)
                    self.r[leaf][i] = r - values[leaf, i]
                    self.v[leaf][i] = self.decay * max(F(v - 2 * abs(r) * tau + tau * tau), F(0))
                else:
                    self.r[leaf][i] = self.v[leaf][i] = 0


class VarianceOracle:
    """All workers together. The options are those of `VarianceWorker`."""

    def __init__(self, workers, sizes, capacity, transport="all_gather", **options):
        self.workers = [VarianceWorker(sizes, **options) for _ in range(workers)]
        self.sizes, self.wire = sizes, wire(transport, workers, sizes, capacity, "power_of_two")
        self.entries = [(leaf, i) for leaf, n in enumerate(sizes) for i in range(n)]
        self.place = {entry: place for place, entry in enumerate(self.entries)}

    def step(self, gradients, squares):
        """One list of leaves per worker -> the mean (a list of leaves) and each worker's counts."""
        messages, counts = [], []
        for w, worker in enumerate(self.workers):

            def fit(entries, w=w):
                r = np.concatenate(self.workers[w].r)
                return [self.entries[i] for i in self.wire.fit(w, [self.place[entry] for entry in entries], r)]

            values, passed, under, over = worker.step(gradients[w], squares[w], fit)
            messages.append({self.place[entry]: y for entry, y in values.items()})
            counts.append((passed, len(values), under, over))
        return split(self.wire.deliver(messages), self.sizes), counts
