"""What holds for every gossip transform: agreement on the common solution, single workers, counts and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_workers import KEY, Workers, dyadic, least_squares, trace_update
from graph_cases import HYPERCUBE, edges
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax
from gcjax import gossip
from gcjax._core.per_worker import PerWorker

METHODS = {
    "d_psgd ring": lambda: gossip.d_psgd("ring", axis_name="data"),
    "swarm 8 bits": lambda: gossip.swarm_average(2, 8, key=KEY, axis_name="data"),
    "d_psgd hypercube": lambda: gossip.d_psgd(HYPERCUBE, axis_name="data"),
    "d_psgd complete": lambda: gossip.d_psgd("complete", axis_name="data"),
    "swarm": lambda: gossip.swarm_average(2, key=KEY, axis_name="data"),
    "swarm ring": lambda: gossip.swarm_average(1, None, "ring", key=KEY, axis_name="data"),
    "swarm hypercube 4 bits": lambda: gossip.swarm_average(1, 4, HYPERCUBE, key=KEY, axis_name="data"),
    "sgp": lambda: gossip.sgp(axis_name="data"),
    "local_sgd": lambda: gossip.local_sgd(4, axis_name="data"),
}


@cases("name", METHODS, default=1)
def test_workers_agree_on_the_solution_of_all_data(name):
    x, y, solution = least_squares()
    tx = optax.chain(optax.sgd(lambda count: 0.1 / (1 + count / 20)), METHODS[name]())
    state = tx.init(np.zeros(5, np.float32))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_of(8), in_specs=(P("data"), P("data"), gcjax.state_specs(state)), out_specs=P("data")
    )
    def train(x, y, state):
        def step(carry, _):
            params, state = carry
            grad = jax.grad(lambda w: jnp.mean((x[0] @ w - y[0]) ** 2) / 2)(params)
            updates, state = tx.update(grad, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = jax.lax.pcast(jnp.zeros(5), "data", to="varying")
        return jax.lax.scan(step, (start, state), length=2000)[0][0][None]

    params = np.asarray(jax.block_until_ready(train(x, y, gcjax.distribute(state, mesh_of(8)))))
    alone = np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    assert np.linalg.norm(alone - solution, axis=1).min() > 1  # without exchange they would end far apart
    assert np.abs(params - solution).max() < 0.01


EVERY_UPDATE = {
    "swarm": lambda axis: gossip.swarm_average(1, key=KEY, axis_name=axis),
    "swarm 8 bits": lambda axis: gossip.swarm_average(1, 8, key=KEY, axis_name=axis),
    "d_psgd": lambda axis: gossip.d_psgd(axis_name=axis),
    "d_psgd complete": lambda axis: gossip.d_psgd("complete", axis_name=axis),
    "sgp": lambda axis: gossip.sgp(axis_name=axis),
    "local_sgd": lambda axis: gossip.local_sgd(1, axis_name=axis),
}


@pytest.mark.parametrize("name", EVERY_UPDATE)
def test_single_worker_keeps_its_update(name):
    tx = EVERY_UPDATE[name](None)
    params = {"w": jnp.float32([1.0, -2.0]), "s": jnp.float32(3.0)}
    updates = {"w": jnp.float32([0.5, 0.25]), "s": jnp.float32(-1.0)}
    got, state = tx.update(updates, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, got, updates)
    assert gcjax.info(state)[:3] == (1, [0], 0)
    assert gcjax.info(state).bits.tolist() == [0]
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.parametrize("name", EVERY_UPDATE)
def test_models_have_the_same_bits_under_x64(name):
    def two_steps():
        run = Workers(EVERY_UPDATE[name]("data"), 8)
        once = run.step(dyadic(8), dyadic(8, 1))
        return once, run.step(once, dyadic(8, 2))

    usual = two_steps()
    with jax.enable_x64(True):
        jax.tree.map(np.testing.assert_array_equal, two_steps(), usual)


def test_words_are_counted_beyond_32_bits():
    state = gossip.d_psgd().init(jnp.zeros(2))
    traffic = state.traffic.unpack()
    for _ in range(3):
        traffic = traffic.after(np.uint32(3_000_000_000), True, False)
    info = gcjax.info(state._replace(traffic=PerWorker.pack(traffic, ())))
    assert info.bits.tolist() == [32 * 9_000_000_000]
    assert info.bits_last.tolist() == [32 * 3_000_000_000]


def compressed(compressor):
    return gossip.local_sgd(3, compressor=compressor, axis_name="data").init(jnp.zeros(3))


OTHER_AXES = r"axis_name=\('data',\), the compressor %s; give both the same"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gossip.swarm_average(0, key=KEY), ValueError, "local_steps must be at least 1, got 0"),
        (lambda: gossip.swarm_average(2.0, key=KEY), TypeError, "local_steps must be an int"),
        (lambda: gossip.swarm_average(bits=3, key=KEY), ValueError, "bits must be from 4 to 16, got 3"),
        (lambda: gossip.swarm_average(bits=17, key=KEY), ValueError, "bits must be from 4 to 16, got 17"),
        (lambda: gossip.swarm_average(bits=8.0, key=KEY), TypeError, "bits must be an int, got 8.0"),
        (lambda: gossip.swarm_average(key=0), TypeError, "key must be a key made by jax.random.key"),
        (lambda: gossip.swarm_average(), TypeError, "key"),
        (lambda: gossip.swarm_average(graph="mesh", key=KEY), ValueError, "graph must be one of.*'mesh'"),
        (lambda: gossip.swarm_average(graph=edges((0, 1), (2, 3)), key=KEY), ValueError, "not connected"),
        (lambda: gossip.swarm_average(key=KEY, axis_name=3), TypeError, "axis_name must be"),
        (lambda: gossip.d_psgd("mesh"), ValueError, "graph must be one of"),
        (lambda: gossip.sgp(np.eye(3)), TypeError, "graph must be one of"),
        (lambda: gossip.local_sgd(0), ValueError, "local_steps must be at least 1, got 0"),
        (lambda: gossip.local_sgd(3, outer=0.7), TypeError, r"outer must be an optax transform, such as .*, got 0.7"),
        (lambda: compressed(optax.sgd(1.0)), TypeError, "compressor must be a transform of gcjax"),
        (lambda: compressed(gcjax.top_k_compress), TypeError, "compressor must be an optax .* got <function top_k"),
        (lambda: compressed(gcjax.top_k_compress(0.1)), ValueError, OTHER_AXES % "None"),
        (lambda: compressed(gcjax.top_k_compress(0.1, axis_name="model")), ValueError, OTHER_AXES % r"\('model',\)"),
        (lambda: gossip.d_psgd().init(jnp.zeros(2, int)), TypeError, "dtype int32"),
        (lambda: gcjax.info(optax.sgd(1.0).init(jnp.zeros(2))), ValueError, "no state of a gcjax compressor or gossip"),
    ],
)
def test_bad_options_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_arguments_of_update_raise():
    tx = gossip.swarm_average(key=KEY)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="call update\\(updates, state, params\\)"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="they must agree"):
        tx.update(params, state, {"v": jnp.ones(3)})
    with pytest.raises(ValueError, match="not bound"):
        gossip.d_psgd(axis_name="data").update(params, gossip.d_psgd(axis_name="data").init(params), params)
    placed = gcjax.distribute(gossip.d_psgd(axis_name="data").init(params), mesh_of(2))
    with pytest.raises(ValueError, match="state of 2 workers at once"):
        tx.update(params, placed, params)


def test_replicated_params_raise():
    with pytest.raises(ValueError, match=r"\['w'\] is the same for all workers along \['data'\].*make_train_step"):
        trace_update(gossip.d_psgd(axis_name="data"), 4, P())


@pytest.mark.parametrize("name", EVERY_UPDATE)
def test_several_workers_without_an_axis_raise(name):
    for options in ({}, {"check_vma": False}):
        with pytest.raises(ValueError, match=r"no axis_name was given, but .* of \['data'\].* give the .* axis_name"):
            trace_update(EVERY_UPDATE[name](None), 4, P("data"), **options)
    trace_update(EVERY_UPDATE[name](None), 1, P("data"))


def test_an_outer_step_without_an_axis_raises_where_workers_are_not_tracked():
    with pytest.raises(ValueError, match="no axis_name was given"):
        trace_update(gossip.local_sgd(1, outer=optax.sgd(1.0)), 4, P("data"), check_vma=False)


def test_graphs_that_do_not_fit_the_mesh_raise():
    graph = edges((0, 1), (1, 2))
    for tx in (gossip.swarm_average(graph=graph, key=KEY, axis_name="data"), gossip.d_psgd(graph, axis_name="data")):
        with pytest.raises(ValueError, match="has 3 nodes, but there are 5 workers"):
            trace_update(tx, 5, P("data"))


def test_pairs_on_a_directed_graph_raise():
    with pytest.raises(ValueError, match="must be undirected, got 'exponential'"):
        trace_update(gossip.swarm_average(graph="exponential", key=KEY, axis_name="data"), 4, P("data"))
