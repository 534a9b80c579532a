"""Rows and oracle of variance_compress."""

import math

import jax
import numpy as np
import optax
from oracle import FLOAT_MAX, TINY, F, as_float16, floor_log2, nearest_power

import gcjax
from rows import CAPACITY, Row


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


def variance(name, *, capacity=CAPACITY, key=None, has_oracle=True, alpha=1.5, conserves=False, joins=False, **options):
    def make(axis_name=None, **more):
        extra = {} if key is None else {"key": jax.random.key(key)}
        settings = {"capacity": capacity, "axis_name": axis_name, "decay": 0.5} | options | extra | more
        return gcjax.variance_compress(alpha, **settings)

    def make_oracle(workers, sizes):
        return VarianceOracle(workers, sizes, max(capacity), alpha=alpha, decay=0.5, **options)

    return Row(
        f"variance-{name}",
        "variance_compress",
        make,
        make_oracle if has_oracle else None,
        conserves=conserves,
        ladder=capacity,
        joins=joins,
        uses_squares=True,
    )


ROWS = [
    variance("paper"),
    variance("drop", underflow="drop"),
    variance("feedback", feedback=True, conserves=True),
    variance("float32", values="float32", conserves=True, joins=True),
    variance("float16", values="float16"),
    variance("float16-feedback", values="float16", feedback=True, conserves=True),
    variance("levels", values="levels", key=7, has_oracle=False),
    variance("hybrid", threshold=0.5, conserves=True, joins=True),
    variance("overflow", capacity=(64,), values="float32", conserves=True),
    variance("paper-overflow", capacity=(64,)),
    variance("hybrid-overflow", capacity=(64,), threshold=0.5, conserves=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(
        gcjax.variance_compress(alpha=1.5, feedback=True, axis_name=axis_name), optax.adam(learning_rate)
    )


CHAINS = {"variance_compress": chain}
