"""sparse_loco_compress: its rows, the oracle and the recommended chain."""

import functools

import numpy as np
from chunk_oracle import ChunkedLeaf

import gcjax
from rows import SHAPES, Row, before_sgd, made_by


def rounded(values, bits):
    """What the receivers see of these values of one leaf: each bin's mean."""
    bins = 2**bits
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    width = 6 * deviation / bins or 1.0
    codes = np.clip(np.round((values - values.mean()) / width) + bins // 2, 0, bins - 1)
    return np.array([values[codes == code].mean() for code in codes])


class LeafOracle(ChunkedLeaf):
    """One leaf of one worker."""

    def __init__(self, shape, top_k, chunk, decay, bits):
        super().__init__(shape, chunk)
        self.k, self.decay, self.bits = min(top_k, self.height * self.width), decay, bits
        self.left = np.zeros(self.size)

    def step(self, g):
        """What the receivers see of the gradient g, and the number of entries sent."""
        self.left = self.decay * self.left + g
        x, magnitudes = self.matrix(self.left), self.matrix(np.abs(self.left), fill=-1)
        chosen = np.zeros(x.shape, bool)
        for part in self.chunks:
            kept = np.argsort(-magnitudes[part], axis=None, kind="stable")[: self.k]
            mask = np.zeros(magnitudes[part].size, bool)
            mask[kept] = True
            chosen[part] = mask.reshape(magnitudes[part].shape) & (magnitudes[part] >= 0)
        sent = np.zeros_like(x)
        sent[chosen] = rounded(x[chosen], self.bits)
        self.left = self.left - self.flat(sent)
        return self.flat(sent), self.flat(chosen)


class SparseLocoOracle:
    def __init__(self, workers, sizes, average="senders", **options):
        del sizes
        self.average = average
        self.workers = [[LeafOracle(shape, **options) for shape in SHAPES.values()] for _ in range(workers)]

    def step(self, gradients, squares):
        del squares
        seen = [
            [leaf.step(g) for leaf, g in zip(leaves, own, strict=True)]
            for leaves, own in zip(self.workers, gradients, strict=True)
        ]
        mean = []
        for leaf in zip(*seen, strict=True):
            total, senders = np.sum([x for x, _ in leaf], axis=0), np.sum([n for _, n in leaf], axis=0)
            by = len(leaf) if self.average == "workers" else np.maximum(senders, 1)
            mean.append((total / by).astype(np.float32))
        return mean, [(n, n, 0, 0) for n in (sum(chosen.sum() for _, chosen in own) for own in seen)]


def row(name, rare=False, **options):
    return Row(
        f"sparse_loco-{name}",
        "sparse_loco_compress",
        made_by(gcjax.sparse_loco_compress, **options),
        functools.partial(SparseLocoOracle, **options),
        conserves=options["decay"] == 1 and options.get("average") == "workers",
        rtol=1e-5,
        rare=rare,
    )


# As many entries as chunks have runs, so that of equal magnitudes the first are sent, as in the oracle.
ROWS = [
    row("2-bits", top_k=7, chunk=7, decay=1.0, bits=2, average="workers"),
    row("senders", top_k=7, chunk=7, decay=0.5, bits=2),
    row("whole", rare=True, top_k=4096, chunk=64, decay=0.9, bits=4),
]
CHAINS = {"sparse_loco_compress": before_sgd(gcjax.sparse_loco_compress, decay=1.0, average="workers")}
