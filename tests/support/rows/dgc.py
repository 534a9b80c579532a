"""dgc_compress: its rows, the oracle and the recommended chain."""

import math

import numpy as np
import optax
from oracle import F, largest, split, wire

import gcjax
from gcjax.methods.dgc import compressor
from rows import Row


class DGCOracle:
    """densities(step) -> the density of that step."""

    def __init__(
        self,
        workers,
        sizes,
        densities,
        momentum,
        dense_below=0,
        capacity=None,
        transport="all_gather",
    ):
        self.sizes, self.densities, self.m = sizes, densities, F(momentum)
        self.wire = wire(transport, workers, sizes, capacity, "float32")
        self.small = np.concatenate([np.full(n, n < dense_below) for n in sizes])
        self.u = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.v = [np.zeros(sum(sizes), F) for _ in range(workers)]
        self.dense_momentum = np.zeros(sum(sizes), F)  # of the mean gradient, as in the authors' code
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        flat = [np.concatenate([np.ravel(leaf) for leaf in leaves]) for leaves in gradients]
        messages, counts = [], []
        dense = int(self.small.sum())
        k = max(1, int(self.densities(self.steps) * (sum(self.sizes) - dense)))
        for w, g in enumerate(flat):
            u, v = self.u[w], self.v[w]
            for i in np.flatnonzero(~self.small):
                u[i] = self.m * u[i] + g[i]
                v[i] = v[i] + u[i]
            chosen = largest(np.abs(v), k)
            sent = self.wire.fit(w, chosen, v)
            messages.append({i: v[i] for i in sent})
            v[sent] = u[sent] = 0
            counts.append((len(chosen) + dense, len(sent) + dense, 0, len(chosen) - len(sent)))
        self.steps += 1
        mean = self.wire.deliver(messages)
        for i in np.flatnonzero(self.small):
            g = F(np.mean([worker[i] for worker in flat], dtype=np.float64))
            self.dense_momentum[i] = self.m * self.dense_momentum[i] + g
            mean[i] = self.dense_momentum[i]
        return split(mean, self.sizes), counts


def dgc(density, *, momentum=0.9, warmup_steps=0, transport="auto", dense_below=0, axis_name=None, **inner):
    """`gcjax.dgc_compress` with another size of the leaves that are sent whole."""
    method = compressor(density, momentum, warmup_steps, transport, dense_below)
    return gcjax.extend.compress(method, axis_name=axis_name, **inner)


def row(name, density, momentum, *, transport="all_gather", dense_below=0, warmup_steps=0, rare=False, **more_of_row):
    densities = more_of_row.pop("densities", lambda step: density)

    def make(axis_name=None, capacity=None, **more):
        del capacity  # some laws give one to every row with capacities
        options = {"momentum": momentum, "warmup_steps": warmup_steps, "dense_below": dense_below}
        return dgc(density, axis_name=axis_name, **options, **({"transport": transport} | more))

    def make_oracle(workers, sizes):
        entries = sum(n for n in sizes if n >= dense_below)
        slots = max(math.ceil(densities(step) * entries) for step in range(6))
        return DGCOracle(workers, sizes, densities, momentum, dense_below, slots, transport)

    return Row(
        f"dgc-{name}",
        "dgc_compress",
        make,
        make_oracle,
        conserves=momentum == 0,
        transport=transport,
        wire=frozenset({"u32", "s32", "f32"}) if dense_below else frozenset({"u32", "s32"}),
        rare=rare,
        **more_of_row,
    )


ROWS = [
    row("small-leaves", 0.05, 0.5, dense_below=100),
    # Two stages of two steps: 213 and 53 of the 854 entries, then 17.
    row(
        "warm-up",
        0.02,
        0.5,
        rare=True,
        densities=lambda step: (0.25, 0.25, 0.0625, 0.0625, 0.02, 0.02)[step],
        capacities=(32, 64, 224),
        warmup_steps=4,
    ),
    row("without-momentum", 0.1, 0.0, rare=True),
    row("owners", 0.1, 0.5, dense_below=32, transport="two_phase", rare=True),
]


def chain(axis_name, learning_rate):
    tx = dgc(0.1, dense_below=40, axis_name=axis_name)
    return optax.chain(tx, optax.sgd(learning_rate))


CHAINS = {"dgc_compress": chain}
