"""Everything of optax behind a compressor, in front of it and around it."""

import contextlib
import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from selection import cases

import gcjax

DOCS = pathlib.Path(__file__).parents[2] / "docs"
WORKERS = 4
COMPRESS = functools.partial(gcjax.variance_compress, 0.5, capacity=64)
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
# Everything that makes a transform in optax and optax.contrib, by what it takes. A release may lack a name.
BY_RATE = """adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion
nadam nadamw novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd
sign_sgd signum sm3 yogi acprop ademamix adopt cocob dadapt_adamw dog dowg galore madgrad momo momo_adam muon
prodigy schedule_free_adamw schedule_free_sgd simplified_ademamix adaptive_grad_clip add_decayed_weights clip
clip_by_block_rms clip_by_global_norm ema scale scale_by_learning_rate scale_by_madgrad scale_by_rprop trace"""
BY_NOTHING = """apply_every centralize identity keep_params_nonnegative normalize_by_update_norm polyak_sgd
scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief
scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_lion scale_by_novograd
scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms scale_by_polyak scale_by_radam
scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio scale_by_yogi
set_to_zero zero_nans normalize reduce_on_plateau scale_by_acprop scale_by_ademamix scale_by_adopt
scale_by_cocob scale_by_galore scale_by_simplified_ademamix"""
BY_TRANSFORM = "chain flatten mechanize split_real_and_imaginary with_extra_args_support"
IS_MATRIX = {"w": True, "b": False}


def has_norm(updates, *args, **more):
    return optax.tree.norm(updates) > 0


def all_dimensions(updates):
    return jax.tree.map(lambda x: contrib.MuonDimensionNumbers(), updates)


def of_optax(name):
    return vars(optax).get(name) or vars(contrib).get(name)  # without deprecated names


def made(name, *args, **more):
    return lambda: of_optax(name)(*args, **more)


SGD = optax.sgd(0.1)
SAM = contrib.sam(optax.sgd(0.5), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)
TRANSFORMS = {
    **{name: made(name, 0.1) for name in BY_RATE.split()},
    **{name: made(name) for name in BY_NOTHING.split()},
    **{name: made(name, SGD) for name in BY_TRANSFORM.split()},
    "add_noise": made("add_noise", 0.1, 0.5, key=jax.random.key(0)),
    "apply_if_finite": made("apply_if_finite", SGD, 3),
    "conditionally_mask": made("conditionally_mask", SGD, lambda step: step > 0),
    "conditionally_transform": made("conditionally_transform", SGD, lambda step: step > 0),
    "freeze": made("freeze", IS_MATRIX),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(0.1),
    "inject_stateful_hyperparams": lambda: of_optax("inject_stateful_hyperparams")(optax.sgd)(0.1),
    "lbfgs": made("lbfgs", 0.1, linesearch=None),
    "masked": made("masked", SGD, IS_MATRIX),
    "multi_transform": made("multi_transform", {True: SGD, False: optax.adam(0.1)}, IS_MATRIX),
    "named_chain": made("named_chain", ("sgd", SGD)),
    "noisy_sgd": made("noisy_sgd", 0.1, key=jax.random.key(0)),
    "partition": made("partition", {True: SGD, False: optax.adam(0.1)}, IS_MATRIX),
    "sam": lambda: optax.GradientTransformation(*SAM),
    "scale_by_muon": lambda: optax.masked(contrib.scale_by_muon(weight_dimension_numbers=all_dimensions), IS_MATRIX),
    "scale_by_schedule": made("scale_by_schedule", optax.linear_schedule(0.0, 1.0, 10)),
    "schedule_free": made("schedule_free", SGD, 0.1),
    "selective_transform": made("selective_transform", SGD, freeze_mask=IS_MATRIX),
    "snapshot": made("snapshot", "norm", has_norm),
    "stateless": made("stateless", lambda updates, params: updates),
    "stateless_with_tree_map": made("stateless_with_tree_map", lambda update, param: update),
}
# What optax exports and cannot work behind a compressor, as docs/traps.md says: it asks for more than an update gets.
EXCEPTIONS = [
    "lbfgs",
    "scale_by_backtracking_linesearch",
    "scale_by_zoom_linesearch",
    "sophia",
    "hutchinson_estimator_diag_hessian",
    "dpsgd",
    "differentially_private_aggregate",
    "monitor",
]
PAIRS = "lookahead"  # takes pairs of parameters: a test of its own below
MEASUREMENT = "measure_with_ema"  # for `monitor`, returns no updates
HERE = [name for name in TRANSFORMS if name == "sam" or of_optax(name)]


def exported():
    """The names of functions of optax and optax.contrib that make transforms, as their types or a call say."""
    for module in (optax, contrib):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_") and makes_transforms(function):
                yield name


def makes_transforms(function):
    returned = inspect.signature(function).return_annotation
    if returned is not inspect.Signature.empty:
        return "GradientTransformation" in str(returned)
    for args in ((), (0.1,), ({},)):
        with contextlib.suppress(Exception):
            return isinstance(function(*args), optax.GradientTransformation)
    return False


def test_every_transform_that_optax_exports_is_known():
    new = set(exported()) - TRANSFORMS.keys() - {*EXCEPTIONS, PAIRS, MEASUREMENT}
    assert not new, (
        f"optax {optax.__version__} exports {sorted(new)}: add each to TRANSFORMS, or to EXCEPTIONS, the README and "
        "docs/traps.md if it cannot work behind a compressor"
    )
    assert {"adam", "muon", "dog", "partition", "inject_hyperparams"} <= set(exported())


def test_the_pages_name_exactly_the_exceptions():
    text = (DOCS / "traps.md").read_text().partition("## Which transforms of optax do not work")[2]
    rows = re.findall(r"^\| (.*?`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    named = re.findall(r"`optax\.(?:contrib\.)?(\w+)", " ".join(rows))
    assert sorted(named) == sorted([*EXCEPTIONS, PAIRS])
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    number = {5: "five"}[len(rows)]
    assert f"All transforms of optax behind the compressor, except [{number}](docs/traps.md)" in readme


OWN_STATE_IN_16_BITS = "scale_by_distance_over_gradients"  # changes its dtype without gcjax, too
BFLOAT16 = [(name, "bfloat16") for name in HERE if name != OWN_STATE_IN_16_BITS]


@cases(
    ("name", "dtype"),
    [(name, "float32") for name in HERE] + BFLOAT16,
    default=(lambda name, dtype: dtype == "float32" or name in ("adam", "muon"), 12),
)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_every_transform_takes_the_compressed_gradient(name, dtype):
    """Traced only: a step gives parameters and state of the types that it took, equal on all workers."""
    tx = optax.chain(COMPRESSOR, TRANSFORMS[name]())
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
        optax.inject_hyperparams(COMPRESS, static_args=("axis_name", "capacity"))(axis_name="data"),
        optax.adam(0.1),
    ),
    "schedule_free around": lambda c: contrib.schedule_free(optax.chain(c, optax.sgd(0.5)), 0.5),
}


RARE = ("inject_hyperparams around", "schedule_free around")


@cases("name", CHAINS, default=lambda name: name not in RARE)
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


@pytest.mark.parametrize(
    ("tx", "wrapper"),
    [
        (optax.flatten(COMPRESSOR), "flatten: put the compressor before it"),
        (optax.MultiSteps(COMPRESSOR, 2).gradient_transformation(), "MultiSteps"),
    ],
    ids=["flatten", "MultiSteps"],
)
def test_a_wrapper_around_the_compressor_that_cannot_work_is_named(tx, wrapper):
    run, state = step_of(tx, ("sum_grad_squared",))(PARAMS)
    with pytest.raises(ValueError, match=rf"Inside optax\.{wrapper}"):
        jax.eval_shape(run, PARAMS, state, batch_of())


def of_objective(loss, grads, objective):
    return {"obj_fn": objective}


def of_line_search(loss, grads, objective):
    return {"value": loss, "grad": grads, "value_fn": objective}


OUTSIDE = {
    "sam": (SAM, None),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 2), None),
    "lbfgs": (optax.lbfgs(), of_line_search),
    "sophia": (contrib.sophia(0.1), of_objective),
}
if of_optax("monitor"):
    OUTSIDE["monitor"] = (optax.chain(optax.monitor({"norm": has_norm}), optax.adam(0.1)), None)


@pytest.mark.parametrize("name", OUTSIDE)
def test_optimizers_outside_of_the_compression_train(name):
    optimizer, extras = OUTSIDE[name]
    value_and_grad = gcjax.compressed_value_and_grad(loss_fn, COMPRESSOR, mesh_of(WORKERS))

    @jax.jit
    def step(params, state, compression, batch):
        loss, grads, compression = value_and_grad(params, compression, batch)
        more = {} if extras is None else extras(loss, grads, lambda params: loss_fn(params, batch))
        updates, state = optimizer.update(grads, state, params, **more)
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
