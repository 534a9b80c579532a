"""`d_psgd` against a product with the mixing matrix, and what moves."""

import numpy as np
import pytest
from gossip_workers import BUCKET, Workers, assert_same, normal, totals

from gcjax import gossip
from gcjax.gossip._graphs import mixing_matrix
from gcjax.gossip._matchings import rounds

STAR = [(0, 1), (0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize(("graph", "workers"), [("ring", 5), (STAR, 5), ("complete", 3), ("exponential", 6)])
def test_update_is_mixing_matrix_product_plus_local_update(graph, workers):
    run = Workers(gossip.d_psgd(graph, axis_name="data"), workers)
    weights, params = mixing_matrix(graph, workers), normal(workers, 1)
    for step in range(3):
        updates = normal(workers, 2 + step)
        expected = {k: np.tensordot(weights, x.astype(np.float64), 1) + updates[k] for k, x in params.items()}
        total = totals({k: x + updates[k].astype(np.float64) for k, x in params.items()})
        params = run.step(params, updates)
        assert_same(params, expected, atol=2e-6)
        assert_same(totals(params), total, atol=1e-5)
    moved, info = run.collectives(), run.info()
    if graph == "complete":
        assert [(c.kind, c.what) for c in moved] == [("all-reduce", ("f32", BUCKET))]
        np.testing.assert_array_equal(info.bits, 3 * 32 * np.full(3, -(-4 * BUCKET // 3)))
        return
    assert {(c.kind, c.what) for c in moved} == {("collective-permute", ("f32", BUCKET))}
    assert len(moved) == len(rounds(graph, workers))
    degree = ((weights > 0).sum(0) - 1) * 3
    np.testing.assert_array_equal(info.bits, 32 * BUCKET * degree)
