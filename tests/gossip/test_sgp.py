"""`sgp` against push-sum in NumPy, and what moves."""

import numpy as np
import pytest
from gossip_workers import BUCKET, Workers, assert_same, dyadic, mean_of_all, normal

from gcjax import gossip
from gcjax.gossip._matchings import rounds

ONE_WAY = np.roll(np.eye(5, dtype=bool), 1, axis=1)
ONE_WAY[0, 2] = ONE_WAY[1, 4] = True  # a directed ring with shortcuts


def test_push_sum_finds_the_mean_on_an_irregular_graph():
    run = Workers(gossip.sgp(ONE_WAY, axis_name="data"), 5)
    plan = rounds(ONE_WAY, 5)
    z = normal(5, 3)
    x, w = {k: v.astype(np.float64) for k, v in z.items()}, np.ones(5)
    for step in range(2 * len(plan)):
        updates = normal(5, 10 + step)
        to = plan[step % len(plan)]
        x = {k: v + updates[k] for k, v in x.items()}
        pushed, weights = {k: np.zeros_like(v) for k, v in x.items()}, np.zeros(5)
        for i in range(5):
            share = 1.0 if to[i] == i else 0.5
            for j in {i, int(to[i])}:
                weights[j] += share * w[i]
                for k in x:
                    pushed[k][j] += share * x[k][i]
        x, w = pushed, weights
        z = run.step(z, updates)
        assert_same(z, {k: v / w.reshape(-1, *[1] * (v.ndim - 1)) for k, v in x.items()}, atol=1e-5)
        info = run.info()
        np.testing.assert_allclose(info.weights, w, rtol=1e-6)
        assert info.weights.sum() == pytest.approx(5, rel=1e-6)
        np.testing.assert_array_equal(info.bits_last, 32 * (BUCKET + 1) * (to != np.arange(5)))
    assert np.ptp(w) > 0.3
    mean = {k: np.tensordot(w, v.astype(np.float64), 1) / 5 for k, v in z.items()}
    assert_same(gossip.mean_params(z, info.weights), mean, atol=1e-6)
    for _ in range(80):
        z = run.step(z)
    assert_same(z, {k: np.broadcast_to(v, z[k].shape) for k, v in mean.items()}, atol=1e-5)


def test_three_exponential_pushes_average_eight_exactly():
    run = Workers(gossip.sgp(axis_name="data"), 8)
    start = params = dyadic(8)
    for _ in range(3):
        params = run.step(params)
    assert_same(params, mean_of_all(start))
    np.testing.assert_array_equal(run.info().weights, 1)
    moved = run.collectives()
    assert {(c.kind, (c.dtype, c.elements)) for c in moved} == {("collective-permute", ("f32", BUCKET + 1))}
    assert len({c.computation for c in moved} - {""}) == 3
