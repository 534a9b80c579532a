"""dryden_compress: its rows, the oracle and the recommended chain."""

import functools
import math

import numpy as np
from oracle import TINY, F, split, wire

import gcjax
from rows import Row, before_sgd, made_by


def select(leaf, density):
    """{position: mean of its class} of the entries of one leaf that are sent."""
    means = {}
    for sign in (1, -1):
        in_class = [i for i in range(len(leaf)) if sign * leaf[i] > 0]
        if not in_class:
            continue
        k = max(1, math.ceil(F(len(in_class)) * F(density)))
        threshold = max(sorted((abs(leaf[i]) for i in in_class), reverse=True)[k - 1], TINY)
        chosen = [i for i in in_class if abs(leaf[i]) >= threshold]
        mean = F(F(np.sum([leaf[i] for i in chosen], dtype=np.float64)) / F(max(len(chosen), 1)))
        means |= dict.fromkeys(chosen, mean)
    return means


class DrydenOracle:
    def __init__(self, workers, sizes, density, capacity, transport):
        self.sizes, self.density, self.wire = sizes, density, wire(transport, workers, sizes, capacity, "power_of_two")
        self.errors = [np.zeros(sum(sizes), F) for _ in range(workers)]

    def step(self, gradients, squares):
        del squares
        messages, counts = [], []
        for w, leaves in enumerate(gradients):
            a = self.errors[w] + np.concatenate([np.ravel(leaf) for leaf in leaves])
            means, begin = {}, 0
            for leaf in split(a, self.sizes):
                means |= {begin + i: y for i, y in select(leaf, self.density).items()}
                begin += len(leaf)
            sent = self.wire.fit(w, sorted(means), a)
            messages.append({i: means[i] for i in sent})
            for i in sent:
                a[i] -= means[i]
            self.errors[w] = a
            counts.append((len(means), len(sent), 0, len(means) - len(sent)))
        mean = self.wire.deliver(messages)
        return split(mean, self.sizes), counts


def row(name, density, capacity, transport="all_gather", rare=False):
    return Row(
        f"dryden-{name}",
        "dryden_compress",
        made_by(gcjax.contrib.dryden_compress, density, capacity=capacity, transport=transport),
        functools.partial(DrydenOracle, density=density, capacity=capacity, transport=transport),
        conserves=True,
        rtol=1e-6,
        capacities=capacity,
        transport=transport,
        rare=rare,
    )


ROWS = [
    row("capacities", 0.05, (64, 96, 128, 416)),
    row("overflow", 0.1, (32,), rare=True),
    row("owners", 0.4, (64,), "two_phase", rare=True),
]
CHAINS = {"dryden_compress": before_sgd(gcjax.contrib.dryden_compress, 0.1)}
