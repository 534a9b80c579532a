"""sign_vote_compress: its rows, the oracle and the recommended chain."""

import numpy as np
from oracle import F

import gcjax
from rows import Row, before_sgd, made_by


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


VOTE, SIGNUM = gcjax.contrib.sign_vote_compress, gcjax.contrib.signum_compress
ROWS = [
    Row("sign_vote", "sign_vote_compress", made_by(VOTE), lambda *a: VoteOracle(*a, 0.0), bucket_invariant=True),
    Row(  # halves are exact in float32
        "signum-0.5", "signum_compress", made_by(SIGNUM, 0.5), lambda *a: VoteOracle(*a, 0.5), bucket_invariant=True
    ),
]
CHAINS = {"sign_vote_compress": before_sgd(VOTE), "signum_compress": before_sgd(SIGNUM)}
