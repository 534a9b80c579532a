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


class VarianceWorker:
    """One worker of the variance method: `select` says what it sends, `settle` resets it afterwards."""

    def __init__(self, sizes, alpha, decay, threshold=None, feedback=False, underflow="keep", values="power_of_two"):
        self.alpha, self.decay, self.threshold = F(alpha), F(decay), threshold
        self.feedback, self.underflow, self.values = feedback, underflow, values
        self.r = [np.zeros(n, F) for n in sizes]
        self.v = [np.zeros(n, F) for n in sizes]
        self.first_word = 0

    def step(self, gradient, squares, capacity):
        """Take in one gradient. Returns ({(leaf, entry): value as received}, passed, underflowed, overflowed)."""
        passed, sendable = [], []
        for leaf, (g, s) in enumerate(zip(gradient, squares, strict=True)):
            for i in range(len(g)):
                self.r[leaf][i] += F(g[i])
                self.v[leaf][i] = min(F(self.v[leaf][i] + F(s[i])), FLOAT_MAX)
                if self._clear(self.r[leaf][i], self.v[leaf][i]):
                    passed.append((leaf, i))
        top = self._tops(passed)
        for leaf, i in passed:
            if self._encodable(self.r[leaf][i], top[leaf]):
                sendable.append((leaf, i))
        sent = self._cut(sendable, capacity)
        values = {at: self._rounded(self.r[at[0]][at[1]], top[at[0]]) for at in sent}
        dropped = set(passed) - set(sendable) if self.underflow == "drop" else set()
        self._settle(values, dropped)
        return values, len(passed), len(passed) - len(sendable), len(sendable) - len(sent)

    def _clear(self, r, v):
        clear = F(r * r) > min(F(self.alpha * v), FLOAT_MAX)
        return clear and (self.threshold is None or abs(r) > F(self.threshold))

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
        if self.threshold is not None or self.values == "float32":
            return True
        if self.values == "float16":
            return abs(float(x)) >= 2.0 ** (top - 14)
        return nearest_power(x) >= top - 7

    def _rounded(self, x, top):
        if self.threshold is not None:
            return F(math.copysign(self.threshold, x))
        if self.values == "float32":
            return x
        if self.values == "float16":
            return F(as_float16(x / F(2.0**top)) * F(2.0**top))
        return F(math.copysign(2.0 ** min(nearest_power(x), top), x))

    def _cut(self, sendable, capacity):
        """What fits, in whole words of 32 entries of the flat model, from the word on where the last step stopped."""
        starts, offset = [], 0
        for r in self.r:
            starts.append(offset)
            offset += -(-len(r) // 32) * 32
        words = {}
        for leaf, i in sendable:
            words.setdefault((starts[leaf] + i) // 32, []).append((leaf, i))
        if len(sendable) <= capacity:
            self.first_word = 0
            return sendable
        order = sorted(words, key=lambda w: (w < self.first_word, w))
        sent = []
        for word in order:
            if len(sent) + len(words[word]) > capacity:
                self.first_word = word  # the next queue begins at the first word that did not fit
                break
            sent += words[word]
        return sent

    def _settle(self, values, dropped):
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
                    self.r[leaf][i] = r - values[leaf, i] if self.feedback else 0
                    self.v[leaf][i] = 0


class VarianceOracle:
    """All workers together."""

    def __init__(self, workers, sizes, capacity, **options):
        self.workers = [VarianceWorker(sizes, **options) for _ in range(workers)]
        self.sizes, self.capacity = sizes, capacity

    def step(self, gradients, squares):
        """gradients, squares: one list of leaves per worker. Returns the mean (a list of leaves) and counts."""
        mean = [np.zeros(n, F) for n in self.sizes]
        counts = []
        for worker, g, s in zip(self.workers, gradients, squares, strict=True):
            values, passed, under, over = worker.step(g, s, self.capacity)
            for (leaf, i), y in sorted(values.items()):
                mean[leaf][i] += F(y / F(len(self.workers)))
            counts.append((passed, len(values), under, over))
        return mean, counts

    def residuals(self):
        return [worker.r for worker in self.workers]


class DenseOracle:
    """The plain mean. Sums of three and more workers may round in another order: compare with a tolerance."""

    def __init__(self, workers, sizes, dtype="float32"):
        self.sizes, self.workers = sizes, workers
        self.round = (lambda x: x) if dtype == "float32" else lambda x: x.astype(dtype).astype(F)

    def step(self, gradients, squares):
        del squares
        entries = sum(self.sizes)
        mean = [np.mean([self.round(g[leaf]) for g in gradients], axis=0) for leaf in range(len(self.sizes))]
        return mean, [(entries, entries, 0, 0)] * self.workers
