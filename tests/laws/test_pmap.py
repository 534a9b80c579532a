"""States that `pmap` made: they go on in shard_map from a checkpoint; and gradients that a wrapper hides from it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of, sample_gradients
from jax.sharding import PartitionSpec as P
from row_steps import STEPS, inputs, runner_of
from rows import SIZES, group_of, methods, name_of
from selection import cases

import gcjax

WORKERS = 8
KINDS = ("variance-paper", "top_k-0.05", "power_sgd-rank2")
TOP_K = gcjax.top_k_compress(0.2, axis_name="data")
PARAMS = {"first": np.ones((6, 20), np.float32), "second": np.ones((20, 5), np.float32)}


def stacked(tree):
    return jax.tree.map(lambda x: np.stack([x] * WORKERS), tree)


def out_of_pmap(state):
    """As docs/ways-in.md shows it."""
    specs = gcjax.state_specs(state)
    joined = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: jnp.concatenate(x) if spec else x[0], part), specs, state
    )
    return jax.device_put(joined, jax.tree.map(lambda spec: jax.NamedSharding(mesh_of(WORKERS), spec), specs))


@cases("row", [row for row in methods() if row.name in KINDS], default=1, ids=name_of, marks=group_of)
def test_a_checkpoint_of_pmap_goes_on_in_shard_map_to_the_same_bits(row):
    in_pmap, in_shard_map, afresh = runner_of(row, WORKERS, "pmap"), runner_of(row), runner_of(row)
    steps = [(inputs(g), inputs(s)) for g, s in zip(*sample_gradients(WORKERS, SIZES, STEPS), strict=True)]
    for step in steps[:3]:
        in_pmap.step(*step)
    in_shard_map.state = out_of_pmap(jax.device_get(in_pmap.state))
    for step in steps[3:]:
        expected = in_pmap.step(*step)
        jax.tree.map(np.testing.assert_array_equal, in_shard_map.step(*step), expected)
        others = afresh.step(*step)
    assert any((others[name] != expected[name]).any() for name in expected)  # the state does matter
    assert in_shard_map.times_compiled() == 1
    jax.tree.map(np.testing.assert_array_equal, out_of_pmap(in_pmap.state), in_shard_map.state)
    ours, theirs = gcjax.info(in_shard_map.state), gcjax.info(in_pmap.state)
    np.testing.assert_array_equal(ours.residual_norm, theirs.residual_norm)
    assert ours.wire_bytes == theirs.wire_bytes > 0


def test_stacked_states_outside_pmap_raise():
    with pytest.raises(ValueError, match="update got the state of 8 workers at once"):
        TOP_K.update(PARAMS, jax.pmap(TOP_K.init, axis_name="data")(stacked(PARAMS)))


FIRST = {"first": True, "second": False}
HIDING = {
    "masked": lambda compress: optax.masked(compress, FIRST),
    "partition": lambda compress: optax.partition(
        {True: compress, False: gcjax.dense_compress(axis_name="data")}, FIRST
    ),
}


def update_on(workers, tx, mode):
    """Trace an update with the gradient of every worker its own."""
    over = {"axis_name": "data", "devices": jax.devices()[:workers]}

    def update(worker, params):
        gradient = jax.tree.map(lambda x: x * (1 + worker), params)
        return tx.update(gradient, tx.init(params))[0]

    if mode == "pmap":
        return jax.pmap(lambda worker: update(worker, PARAMS), **over)(jnp.arange(workers))
    run = jax.shard_map(
        lambda workers: update(workers[0], PARAMS),
        mesh=mesh_of(workers),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=mode == "shard_map",
    )
    return jax.eval_shape(run, jax.device_put(jnp.arange(workers), jax.NamedSharding(mesh_of(workers), P("data"))))


@pytest.mark.parametrize("mode", ["pmap", "shard_map without types"])
@pytest.mark.parametrize("hiding", HIDING)
def test_hidden_leaves_are_refused_where_jax_has_no_types_for_them(hiding, mode):
    tx = HIDING[hiding](TOP_K)
    message = (
        r"hides the gradient at \['second'\] from the compressor, on the devices of \{'data': 4\}.*check_vma=True or"
    )
    with pytest.raises(ValueError, match=message):
        update_on(4, tx, mode)
    update_on(4, TOP_K, mode)
    update_on(1, tx, mode)


def test_jax_sees_leaves_that_nothing_averages():
    update_on(4, HIDING["partition"](TOP_K), "shard_map")
    with pytest.raises(ValueError, match="could not infer replication"):
        update_on(4, HIDING["masked"](TOP_K), "shard_map")


def test_leaves_that_have_no_gradient_are_not_hidden():
    """A tree with None in place of frozen parameters, as `make_train_step(trainable=...)` makes it."""

    def update(gradient):
        gradient = {"first": gradient["first"], "second": None}
        return TOP_K.update(gradient, TOP_K.init(gradient))[0]

    updates = jax.pmap(update, axis_name="data")(stacked(PARAMS))
    assert updates["second"] is None
