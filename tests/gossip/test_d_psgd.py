"""`d_psgd` against a product with the mixing matrix, and what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gossip_workers import BUCKET, Workers, assert_same, normal, totals
from graph_cases import STAR, edges
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax import gossip
from gcjax.gossip._graphs import mixing_matrix
from gcjax.gossip._matchings import rounds


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
    if isinstance(graph, str) and graph == "complete":
        assert [(c.kind, (c.dtype, c.elements)) for c in moved] == [("all-reduce", ("f32", BUCKET))]
        np.testing.assert_array_equal(info.bits, 3 * 32 * np.full(3, -(-4 * BUCKET // 3)))
        return
    assert {(c.kind, (c.dtype, c.elements)) for c in moved} == {("collective-permute", ("f32", BUCKET))}
    assert len(moved) == len(rounds(graph, workers))
    degree = ((weights > 0).sum(0) - 1) * 3
    np.testing.assert_array_equal(info.bits, 32 * BUCKET * degree)


def mixed_once(graph, models, mesh, axes):
    """The models after an exchange, one after the other along axis 0."""
    tx = gossip.d_psgd(graph, axis_name=axes)
    state = gcjax.distribute(tx.init(models), mesh)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(axes), gcjax.state_specs(state)), out_specs=P(axes))
    def step(model, state):
        return model + tx.update(jnp.zeros_like(model), state, model)[0]

    return np.asarray(step(jax.device_put(models, jax.NamedSharding(mesh, P(axes))), state))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_axes_in_any_order_number_the_workers(axes):
    mesh, graph = jax.make_mesh((2, 3), ("x", "y"), devices=jax.devices()[:6]), edges(*[(0, i) for i in range(1, 6)])
    models = np.arange(1.0, 7, dtype=np.float32)
    mixed = mixed_once(graph, models, mesh, axes)
    np.testing.assert_allclose(mixed, mixing_matrix(graph, 6) @ models, rtol=1e-6)


def test_an_infinite_float16_model_stays_visible():
    mixed = mixed_once("ring", np.float16([np.inf, 1, 2, 3]), mesh_of(2), "data")
    assert not np.isfinite(mixed[[0, 2]]).any()
    np.testing.assert_array_equal(mixed[[1, 3]], 2)


def test_more_entries_than_are_counted_raise():
    tx, model = (
        gossip.d_psgd(edges((0, 1), (0, 2), (0, 3)), axis_name="data"),
        [jax.ShapeDtypeStruct((1 << 28,), "f4")] * 6,
    )
    state = jax.eval_shape(tx.init, model)
    update = jax.shard_map(
        lambda model, state: tx.update(model, state, model)[0],
        mesh=mesh_of(4),
        in_specs=(P("data"), gcjax.state_specs(state)),
        out_specs=P("data"),
    )
    models = [jax.ShapeDtypeStruct((1 << 30,), "f4")] * 6
    state = jax.eval_shape(lambda: gcjax.distribute(tx.init([jnp.zeros(1)] * 6), mesh_of(4)))
    with pytest.raises(
        ValueError, match=r"sends 4,831,838,208 entries .* counts to 4,294,967,295; give a graph of fewer"
    ):
        jax.eval_shape(update, models, state)
