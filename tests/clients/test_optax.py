"""Everything of optax behind a compressor, in front of it and around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import gcjax

WORKERS = 4
COMPRESS = functools.partial(gcjax.variance_compress, 0.5, capacity=64, values="float32")
PARAMS = {"w": np.full((6, 4), 0.1, np.float32), "b": np.zeros(4, np.float32)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["w"] + params["b"]) - batch[1]) ** 2)


def batch_of():
    rng = np.random.default_rng(0)
    x, mix = rng.normal(size=(32, 6)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)
    return x, np.tanh(x @ mix)


def step_of(tx, extras=("value", "sum_grad_squared"), read=lambda params: params):
    """params -> (step by hand in shard_map, first state). `read`: from what the optimiser trains to the parameters."""
    tx, mesh = optax.with_extra_args_support(tx), mesh_of(WORKERS)

    def local(params, state, batch):
        loss, moments = gcjax.value_and_moments(loss_fn)(read(params), batch)
        extra = {"value": jax.lax.pmean(loss, "data"), "sum_grad_squared": moments.sum_grad_squared}
        updates, state = tx.update(moments.grad, state, params, **{name: extra[name] for name in extras})
        return optax.apply_updates(params, updates), state, extra["value"]

    def start(params):
        state = gcjax.distribute(tx.init(params), mesh)
        specs = gcjax.state_specs(state)
        in_specs, out_specs = (P(), specs, P("data")), (P(), specs, P())
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs), state

    return start


def trained(tx, params=PARAMS, steps=6, **options):
    run, state = step_of(tx, **options)(params)
    run, losses = jax.jit(run), []
    for _ in range(steps):
        params, state, loss = jax.block_until_ready(run(params, state, batch_of()))
        losses.append(float(loss))
    return losses, params, state


COMPRESSOR = COMPRESS(axis_name="data")
NAMES = """adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam
nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi"""
OF_CONTRIB = """acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy
schedule_free_adamw schedule_free_sgd simplified_ademamix"""
OPTIMIZERS = {
    **{name: getattr(optax, name) for name in NAMES.split()},
    **{name: getattr(contrib, name) for name in OF_CONTRIB.split()},
    "lbfgs": lambda rate: optax.lbfgs(rate, linesearch=None),
    "polyak_sgd": optax.polyak_sgd,
    "noisy_sgd": lambda rate: optax.noisy_sgd(rate, key=jax.random.key(0)),
    "schedule_free": lambda rate: contrib.schedule_free(optax.sgd(rate), rate),
    "mechanize": lambda rate: contrib.mechanize(optax.sgd(rate)),
}


BFLOAT16 = [pytest.param(n, "bfloat16", marks=() if n in ("adam", "muon") else pytest.mark.full) for n in OPTIMIZERS]


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32") for name in OPTIMIZERS] + BFLOAT16)
@pytest.mark.sample(12)
def test_every_optimizer_takes_the_compressed_gradient(name, dtype):
    """Traced only: a step gives parameters and state of the types that it took, equal on all workers."""
    tx = optax.chain(COMPRESSOR, OPTIMIZERS[name](0.1))
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    run, state = step_of(tx)(params)
    after, after_state, _ = jax.eval_shape(run, params, state, batch_of())
    for before, now in ((params, after), (state, after_state)):
        assert jax.tree.structure(before) == jax.tree.structure(now)
        same = jax.tree.map(lambda x, y: x.shape == y.shape and x.dtype == y.dtype, before, now)
        assert all(jax.tree.leaves(same)), same


CHAINS = {
    "MultiSteps behind": lambda c: optax.chain(c, optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "inject_hyperparams around": lambda c: optax.inject_hyperparams(lambda rate: optax.chain(c, optax.adam(rate)))(0.1),
    "inject_hyperparams of the compressor": lambda c: optax.chain(
        optax.inject_hyperparams(COMPRESS, static_args=("axis_name", "capacity", "values"))(axis_name="data"),
        optax.adam(0.1),
    ),
    "schedule_free around": lambda c: contrib.schedule_free(optax.chain(c, optax.sgd(0.5)), 0.5),
    "muon": lambda c: optax.chain(c, contrib.muon(0.1)),
    "reduce_on_plateau": lambda c: optax.chain(c, optax.adam(0.1), contrib.reduce_on_plateau()),
}


RARE = ("inject_hyperparams around", "schedule_free around", "muon", "reduce_on_plateau")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in RARE)) for n in CHAINS])
def test_a_chain_trains(name):
    losses, params, state = trained(CHAINS[name](COMPRESSOR))
    assert losses[-1] < 0.9 * losses[0], losses
    assert (gcjax.info(state).sent > 0).all()
    for leaf in jax.tree.leaves(params):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], shard) for shard in shards)


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_lookahead_around_the_compressor_trains():
    tx = optax.lookahead(optax.chain(COMPRESSOR, optax.adam(0.1)), 2, 0.5)
    losses, params, _ = trained(tx, optax.LookaheadParams.init_synced(PARAMS), read=lambda params: params.fast)
    assert losses[-1] < 0.9 * losses[0], losses
    assert float(loss_fn(params.slow, batch_of())) < losses[0]


SQUARES = ("sum_grad_squared",)
SAM = contrib.sam(optax.sgd(0.5), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)


@pytest.mark.parametrize(
    ("tx", "extras", "error", "message"),
    [
        (optax.flatten(COMPRESSOR), SQUARES, ValueError, r"Inside optax\.flatten: put the compressor before it"),
        (optax.apply_if_finite(COMPRESSOR, 3), SQUARES, TypeError, "cond branches must have equal output types"),
        (optax.MultiSteps(COMPRESSOR, 2).gradient_transformation(), SQUARES, ValueError, "Inside optax.MultiSteps"),
        (optax.chain(COMPRESSOR, SAM), SQUARES, TypeError, "unexpected keyword argument 'sum_grad_squared'"),
        (contrib.sam(COMPRESSOR, optax.sgd(0.05)), (), ValueError, "could not infer replication"),
    ],
    ids=["flatten around", "apply_if_finite around", "MultiSteps around", "sam behind, with squares", "sam around"],
)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_what_cannot_work_raises(tx, extras, error, message):
    run, state = step_of(tx, extras)(PARAMS)
    with pytest.raises(error, match=message):
        jax.eval_shape(run, PARAMS, state, batch_of())


@pytest.mark.parametrize(
    "optimizer",
    [
        SAM,
        optax.MultiSteps(optax.adam(0.1), 2),
        pytest.param(optax.apply_if_finite(optax.adam(0.1), 3), marks=pytest.mark.full),
        pytest.param(optax.flatten(optax.adam(0.1)), marks=pytest.mark.full),
        pytest.param(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(2.0)), marks=pytest.mark.full),
    ],
    ids=["sam", "MultiSteps", "apply_if_finite", "flatten", "clip"],
)
def test_optimizers_outside_of_the_compression_train(optimizer):
    value_and_grad = gcjax.compressed_value_and_grad(loss_fn, COMPRESSOR, mesh_of(WORKERS))

    @jax.jit
    def step(params, state, compression, batch):
        loss, grads, compression = value_and_grad(params, compression, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, compression, loss

    params = jax.tree.map(jnp.asarray, PARAMS)
    state, compression, losses = optimizer.init(params), value_and_grad.init(params), []
    batch = jax.device_put(batch_of(), NamedSharding(mesh_of(WORKERS), P("data")))
    for _ in range(6):
        params, state, compression, loss = jax.block_until_ready(step(params, state, compression, batch))
        losses.append(float(loss))
    assert min(losses) < 0.9 * losses[0], losses


def test_tree_map_params_finds_the_parameters_of_the_optimizer():
    tx = optax.chain(gcjax.local_transform(optax.trace(0.9), "data"), COMPRESSOR, optax.adam(0.1))
    state = tx.init(PARAMS)
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, doubled[:2], state[:2])
    np.testing.assert_array_equal(doubled[2][0].mu["b"], np.ones(4))
    specs = optax.tree.map_params(tx, lambda _: P("model"), state, transform_non_params=gcjax.state_specs)
    assert specs[0] == specs[1].buckets == P("data")
    assert specs[2][0].mu == {"w": P("model"), "b": P("model")}
    assert specs[2][0].count == P()
