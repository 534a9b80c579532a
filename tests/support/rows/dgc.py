"""dgc_compress: its rows, the oracle and the recommended chain."""

import numpy as np
import optax
from oracle import F, largest, split, wire

import gcjax
from rows import Row


class DGCOracle:
    """densities(step) -> the density of that step."""

    def __init__(
        self,
        workers,
        sizes,
        densities,
        momentum,
        nesterov=False,
        dense_below=0,
        capacity=None,
        transport="all_gather",
        masking=True,
    ):
        self.sizes, self.densities, self.m, self.masking = sizes, densities, F(momentum), masking
        self.nesterov, self.wire = nesterov, wire(transport, workers, sizes, capacity, "float32")
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
                if self.nesterov:
                    u[i] = self.m * (u[i] + g[i])
                    v[i] = v[i] + u[i] + g[i]
                else:
                    u[i] = self.m * u[i] + g[i]
                    v[i] = v[i] + u[i]
            chosen = largest(np.abs(v), k)
            sent = self.wire.fit(w, chosen, v)
            messages.append({i: v[i] for i in sent})
            v[sent] = 0
            if self.masking:
                u[sent] = 0
            counts.append((len(chosen) + dense, len(sent) + dense, 0, len(chosen) - len(sent)))
        self.steps += 1
        mean = self.wire.deliver(messages)
        for i in np.flatnonzero(self.small):
            g = F(np.mean([worker[i] for worker in flat], dtype=np.float64))
            self.dense_momentum[i] = self.m * self.dense_momentum[i] + g
            mean[i] = g + self.m * self.dense_momentum[i] if self.nesterov else self.dense_momentum[i]
        return split(mean, self.sizes), counts


def row(name, density, momentum, *, rare=False, densities=None, capacities=(), capacity=None, wire=(), **options):
    def make(axis_name=None, **more):
        settings = {"momentum": momentum, "capacity": capacity, "axis_name": axis_name, "dense_below": 0}
        settings["transport"] = "all_gather"
        return gcjax.dgc_compress(density, **(settings | options | more))

    def make_oracle(workers, sizes):
        shared = {key: options[key] for key in ("nesterov", "dense_below", "transport", "masking") if key in options}
        return DGCOracle(workers, sizes, densities or (lambda step: density), momentum, capacity=capacity, **shared)

    return Row(
        f"dgc-{name}",
        "dgc_compress",
        make,
        make_oracle,
        conserves=momentum == 0,
        capacities=capacities,
        transport=options.get("transport", "all_gather"),
        wire=frozenset({"u32", "s32", *wire}),
        rare=rare,
    )


ROWS = [
    row("small-leaves", 0.05, 0.5, dense_below=100, wire=("f32",)),
    # Two stages of two steps: 213 and 53 of the 854 entries, then 17.
    row(
        "nesterov-warm-up",
        0.02,
        0.5,
        rare=True,
        densities=lambda step: (0.25, 0.25, 0.0625, 0.0625, 0.02, 0.02)[step],
        capacities=(32, 64, 224),
        nesterov=True,
        warmup_steps=4,
    ),
    row("overflow", 0.1, 0.0, capacity=64, rare=True),
    row(
        "owners",
        0.4,
        0.5,
        capacity=64,
        dense_below=32,
        masking=False,
        transport="two_phase",
        wire=("f32",),
        rare=True,
    ),
]


def chain(axis_name, learning_rate):
    # Without masking, see test_masking_ends_beside_the_common_optimum.
    options = {"momentum": 0.5, "masking": False, "warmup_steps": 20, "dense_below": 40}
    return optax.chain(gcjax.dgc_compress(0.1, axis_name=axis_name, **options), optax.sgd(learning_rate))


CHAINS = {"dgc_compress": chain}
