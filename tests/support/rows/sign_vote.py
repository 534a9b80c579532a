"""sign_vote_compress: its rows, the oracle and the recommended chain."""

import numpy as np
import optax
from oracle import F

import gcjax
from rows import Row


class VoteOracle:
    def __init__(self, workers, sizes, momentum):
        self.m = [[np.zeros(n, F) for n in sizes] for _ in range(workers)]
        self.momentum, self.sizes = F(momentum), sizes

    def step(self, gradients, squares):
        del squares
        update = []
        for leaf, size in enumerate(self.sizes):
            against = np.zeros(size, int)
            for m, leaves in zip(self.m, gradients, strict=True):
                m[leaf] = self.momentum * m[leaf] + (F(1) - self.momentum) * leaves[leaf]
                against += m[leaf] < 0
            update.append(np.where(against > len(self.m) - against, F(-1), F(1)))
        entries = sum(self.sizes)
        return update, [(entries, entries, 0, 0)] * len(self.m)


def make_vote(axis_name=None, **more):
    return gcjax.contrib.sign_vote_compress(axis_name=axis_name, **more)


def make_signum(axis_name=None, **more):
    return gcjax.contrib.signum_compress(0.5, axis_name=axis_name, **more)  # halves are exact in float32


ROWS = [
    Row("sign_vote", "sign_vote_compress", make_vote, lambda *a: VoteOracle(*a, 0.0), bucket_invariant=True),
    Row("signum-0.5", "signum_compress", make_signum, lambda *a: VoteOracle(*a, 0.5), bucket_invariant=True),
]


def vote_chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.sign_vote_compress(axis_name=axis_name), optax.sgd(learning_rate))


def signum_chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.signum_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"sign_vote_compress": vote_chain, "signum_compress": signum_chain}
