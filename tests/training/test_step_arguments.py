"""What a training step says of arguments that do not fit, and what losses and optimisers may return and ask for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import AxisType
from selection import cases

import gcjax
from gcjax._hlo import collectives

WORKERS = 4
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 3)).astype(np.float32), "y": RNG.normal(size=(16, 2)).astype(np.float32)}


def errors_of(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def loss_fn(params, batch):
    return errors_of(params, batch).mean()


def variance():
    return gcjax.variance_compress(axis_name="data", capacity=64)


def adam(*before):
    return optax.chain(*before, variance(), optax.adam(1e-2))


def make_step(loss=loss_fn, tx=None, **options):
    return gcjax.make_train_step(loss, adam() if tx is None else tx, mesh_of(WORKERS), **options)


def first_step(loss=loss_fn, tx=None, batch=BATCH, **options):
    step = make_step(loss, tx, **options)
    return step(step.init(PARAMS), batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda tx: make_step(tx=tx),
        lambda tx: gcjax.make_train_step(loss_fn, tx, mesh_of(2), axis_name="data"),
        lambda tx: gcjax.compressed_value_and_grad(loss_fn, tx, mesh_of(2), axis_name="data"),
        lambda tx: gcjax.local_transform(tx, "data"),
        lambda tx: gcjax.scale_first(tx, variance()),
        lambda tx: gcjax.scale_first(optax.clip(1.0), tx),
    ],
)
def test_an_argument_that_is_not_a_transform_raises(make):
    with pytest.raises(TypeError, match=r"must be an optax transform, such as .* got <function adam"):
        make(optax.adam)


MATRIX = {"w": jnp.ones((3, 2)), "b": jnp.zeros((1, 2))}


def two_axes(tx, specs=None, start=PARAMS, **options):
    """A first step with workers along both axes of a mesh."""
    mesh, axes = jax.make_mesh((2, 2), ("slow", "fast")), ("slow", "fast")
    tx = optax.chain(tx, optax.sgd(0.1))
    step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name=axes, moments=None, param_specs=specs, **options)
    return step(step.init(start), BATCH)


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_a_compressor_that_lacks_an_axis_of_the_step_raises(first):
    other = {"slow": "fast", "fast": "slow"}[first]
    compressor = gcjax.top_k_compress(0.5, axis_name=first)
    says = rf"opt_state\[0\].* would differ between workers along \['{other}'\].*inner_axis_name"
    for tx in (compressor, optax.chain(compressor, gcjax.dense_compress(axis_name=other))):
        with pytest.raises(ValueError, match=says):
            two_axes(tx)


@pytest.mark.parametrize("bias", ["sharded", "whole"])
def test_a_transform_that_mixes_shards_before_the_compressor_raises(bias):
    specs = {"w": jax.P(None, "fast"), "b": jax.P("fast" if bias == "sharded" else None)}
    tx = optax.chain(optax.clip_by_global_norm(0.1), gcjax.dense_compress(axis_name="slow"))
    with pytest.raises(ValueError, match=r"params\['[bw]'\] depends.* on the shards .* \['fast'\].*Put it after"):
        two_axes(tx, specs)
    if bias == "sharded":
        two_axes(tx, specs, checks=False)


def test_a_sharded_parameter_that_passes_through_no_compressor_raises():
    tx = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "slow"))
    with pytest.raises(ValueError, match=r"params\['b'\] passes through no compressor.*gcjax.dense_compress"):
        two_axes(tx, {"w": jax.P(None, "fast"), "b": jax.P()})


def test_transforms_whose_state_has_the_shape_of_no_parameter_take_no_shards():
    adafactor = optax.adafactor(0.1, min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match=r"opt_state.*v_\w+\['[bw]'\] would .* between the shards along"):
        two_axes(optax.chain(gcjax.dense_compress(axis_name="slow"), adafactor), jax.P(None, "fast"), start=MATRIX)


def test_transforms_that_keep_parameters_apart_take_shards():
    momentum = gcjax.local_transform(optax.trace(0.9), "slow")
    tx = optax.chain(momentum, gcjax.dense_compress(axis_name="slow"), optax.clip_by_block_rms(0.1), optax.adamw(0.1))
    two_axes(tx, {"w": jax.P(None, "fast"), "b": jax.P("fast")})


def init(params=PARAMS, tx=None, trainable=None, **more):
    return make_step(tx=tx, trainable=trainable).init(params, **more)


def returning(model_state):
    """A first step with a loss that returns another state of the model than an array of two."""
    step = make_step(lambda params, batch, model_state: (loss_fn(params, batch), {"n": jnp.zeros(2)}))
    return step(step.init(PARAMS, model_state={"n": model_state}), BATCH)


def sam(optimiser):
    return optax.contrib.sam(optimiser, optax.sgd(0.05), sync_period=2)


def lookahead():
    return optax.lookahead(optax.chain(variance(), optax.sgd(1e-3)), 5, 0.5)


RANDOM = {"rng": jax.random.key(0)}
RESEED = r"give step.init\(key=...\).*flax\.reseed\(model"
NO_EXTRA = r"(?s)unexpected keyword.*takes no extra arguments.*wrap it: optax\.Grad"
PAIRS = r"lookahead trains pairs.*slow = optax\.incremental_update"
WRONG = {  # the call, its error, and the message
    "no axis": (
        lambda: first_step(tx=optax.chain(gcjax.top_k_compress(0.1), optax.adam(1e-2))),
        ValueError,
        "has no axis_name, .* give it axis_name='data'",
    ),
    "adam before": (
        lambda: first_step(tx=adam(optax.adam(1e-2))),
        ValueError,
        r"opt_state\[0\]\[0\].mu\['b'\] would differ between workers along \['data'\].*after the comp.*local_transform",
    ),
    "apply_if_finite around": (
        lambda: first_step(tx=optax.apply_if_finite(adam(), 3)),
        ValueError,
        "Leave it out: the training step skips bad",
    ),
    "line search": (
        lambda: first_step(tx=optax.chain(variance(), optax.lbfgs())),
        TypeError,
        "(?s)'grad' and 'value_fn'.*A step gives tx .*value.*such as a line search",
    ),
    "sam behind": (lambda: first_step(tx=optax.chain(variance(), sam(optax.sgd(0.1)))), TypeError, NO_EXTRA),
    "sam around": (lambda: first_step(tx=sam(optax.chain(variance(), optax.sgd(0.1)))), TypeError, NO_EXTRA),
    "lookahead": (lambda: init(tx=lookahead()), TypeError, PAIRS),
    "lookahead of pairs": (lambda: init(optax.LookaheadParams.init_synced(PARAMS), lookahead()), TypeError, PAIRS),
    "moments": (lambda: make_step(moments=True), TypeError, "moments must be 'auto', .*value_and_moments.*, got True"),
    "moments of a loss": (
        lambda: make_step(moments=gcjax.value_and_moments(loss_fn)),
        TypeError,
        "moments must be .*, not called with a loss.*or None, got <f",
    ),
    "specs": (
        lambda: make_step(param_specs={"w": "data", "b": jax.P()}),
        TypeError,
        r"param_specs\['w'\] must be a jax.sharding.PartitionSpec, got",
    ),
    "other axis": (lambda: make_step(axis_name="model"), ValueError, r"axis_name='model'.*\('data',\)"),
    "no parts": (lambda: make_step(accumulate=0), ValueError, "accumulate must be at least 1, got 0"),
    "half a part": (lambda: make_step(accumulate=1.5), TypeError, "accumulate must be an int, got 1.5"),
    "no limit": (lambda: make_step(max_skipped=0), ValueError, "max_skipped must be .*0"),
    "half a limit": (lambda: make_step(max_skipped=1.5), TypeError, "max_skipped must be .*1.5"),
    "checks": (lambda: make_step(checks=1), TypeError, "checks must be True or False, got 1"),
    "raw key": (lambda: init(key=jnp.zeros(2, jnp.uint32)), TypeError, "key must be a key made by jax.random.key"),
    "flag": (lambda: init(trainable={"w": 1, "b": True}), TypeError, r"trainable\['w'\] must be True or False, got 1"),
    "flags": (lambda: init(trainable={"w": False}), ValueError, "is not a prefix of the parameters' tree"),
    "all frozen": (lambda: init(trainable=lambda params: False), ValueError, "freezes all parameters"),
    "random parameter": (
        lambda: init(PARAMS | RANDOM),
        TypeError,
        rf"params\['rng'\] is a random key, which cannot be trained.*{RESEED}",
    ),
    "random model state": (
        lambda: init(model_state=RANDOM),
        TypeError,
        rf"model_state\['rng'\] is a random key.*{RESEED}",
    ),
    "int parameter": (
        lambda: init(PARAMS | {"n": jnp.int32(3)}),
        TypeError,
        r"params\['n'\] has dtype int32, which cannot be trained.*trainable=",
    ),
    "function as a parameter": (
        lambda: init(PARAMS | {"f": jnp.tanh}),
        TypeError,
        r"leaf \['f'\] is <.*tanh.*, not an array.*equinox.partition",
    ),
    "model state of another shape": (
        lambda: returning(jnp.float32(0)),
        ValueError,
        r"model_state of {'n': 'float32\[\]'} and returned one of {'n': 'float32\[2\]'}",
    ),
    "model state of another dtype": (
        lambda: returning(jnp.zeros(2, jnp.bfloat16)),
        ValueError,
        r"model_state of {'n': 'bfloat16\[2\]'} and returned one of {'n': 'float32\[2\]'}",
    ),
    "empty batch": (lambda: first_step(batch={}), ValueError, r"the batch has no array, got \{\}"),
    "float in the batch": (
        lambda: first_step(batch=BATCH | {"t": 1.0}),
        TypeError,
        r"batch leaf \['t'\] is 1.0, but must be an array.*np.full",
    ),
    "scalar in the batch": (
        lambda: first_step(batch=BATCH | {"t": np.float32(1.0)}),
        ValueError,
        r"batch leaf \['t'\] has shape \(\), but must have one entry per sample.*np.full",
    ),
    "key in the batch": (
        lambda: first_step(batch=BATCH | {"t": jax.random.key(0)}),
        ValueError,
        r"batch leaf \['t'\] has shape \(\).*Give a random key to step\.init\(",
    ),
    "15 samples": (
        lambda: first_step(batch=BATCH | {"t": np.ones(15)}, accumulate=2),
        ValueError,
        r"batch leaf \['t'\] has shape \(15,\); .*multiple of 8 = 4 workers \* accumulate=2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_a_wrong_argument_raises_with_the_cure(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("options", [{"moments": True}, {"param_specs": {"a": "data"}}])
def test_the_compressed_gradient_checks_its_arguments_as_a_step_does(options):
    with pytest.raises(TypeError, match=rf"{next(iter(options))}.* must be .*, got"):
        gcjax.compressed_value_and_grad(loss_fn, adam(), mesh_of(WORKERS), **options)


def test_parameters_of_other_devices_are_moved():
    elsewhere = jax.device_put((PARAMS, jax.random.key(0)), jax.devices()[-1])
    step = make_step(lambda params, batch, key: loss_fn(params, batch))
    step(step.init(elsewhere[0], key=elsewhere[1]), BATCH)
    mesh = jax.make_mesh((2, 2), ("slow", "fast"))
    state = gcjax.init_sharded(gcjax.dense_compress(axis_name="slow"), elsewhere[0], mesh, jax.P())
    assert state.report.axes == ("slow",)


@pytest.mark.parametrize("moments", [None, gcjax.value_and_moments])
def test_a_loss_that_returns_something_else_raises(moments):
    def with_aux(params, batch):
        return loss_fn(params, batch), {}

    cases = {
        TypeError: [
            (with_aux, {}, r"must return one scalar, got a tuple of 2\..*has_aux=True"),
            (loss_fn, {"has_aux": True}, r"must return \(loss, aux\), got a"),
            (lambda params, batch: {"loss": loss_fn(params, batch)}, {}, "must return one scalar, got a dict"),
            (lambda params, batch: 1, {}, "must return a real floating scalar, got dtype int32"),
        ],
        ValueError: [
            (lambda params, batch: errors_of(params, batch).mean(1), {}, "must return a scalar, got shape"),
            (lambda params, batch: jax.lax.pmean(loss_fn(params, batch), "data"), {}, r"equal .* along \['data'\]"),
        ],
    }
    for error, losses in cases.items():
        for loss, options, says in losses:
            with pytest.raises(error, match=says):
                first_step(loss, moments=moments, **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("place", [jax.lax.with_sharding_constraint, jax.reshard])
@pytest.mark.parametrize("whole", [True, False], ids=["NamedSharding", "PartitionSpec"])
def test_a_layout_in_the_loss_is_named_and_works_under_plain_jit(kind, place, whole):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind))

    def laid_out(sharding):
        return lambda w, x: jnp.mean(place(jnp.tanh(x @ w), sharding) ** 2)

    tx, w, x = variance(), jnp.ones((3, 4)), BATCH["x"]
    own, cure = (
        jax.P(None, "model"),
        r"lays an array out over the mesh .*compressed_value_and_grad.*as a jax\.P.*JAX says",
    )
    named = jax.NamedSharding(mesh, own) if whole else own
    step = gcjax.make_train_step(laid_out(named), tx, mesh)
    with pytest.raises(ValueError, match=cure):
        step(step.init(w), x)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    right = (place is jax.reshard) == (kind == AxisType.Explicit)  # each is for axes of one kind
    if right:
        fn = gcjax.compressed_value_and_grad(laid_out(own), tx, mesh)
        _, grad, _ = jax.jit(fn)(w, fn.init(w), x)
        plain = gcjax.compressed_value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), tx, mesh)
        np.testing.assert_allclose(grad, jax.jit(plain)(w, plain.init(w), x)[1], rtol=1e-5)
    if whole or not right:
        fn = gcjax.compressed_value_and_grad(laid_out(named), tx, mesh)
        with pytest.raises(ValueError, match=cure):
            jax.jit(fn)(w, fn.init(w), x)


def test_a_state_that_is_not_of_the_mesh_raises():
    step, tx = make_step(), adam()
    unplaced = gcjax.TrainState(jnp.int32(0), PARAMS, tx.init(PARAMS), None, None)
    with pytest.raises(
        ValueError, match=r"the state holds 1 workers, but the mesh has 4 along \('data',\).*step\.init.*gcjax\.resize"
    ):
        step(unplaced, BATCH)
    with pytest.raises(TypeError, match=r"must be the TrainState that init .* got <class 'dict'>"):
        step(PARAMS, BATCH)
    state = gcjax.distribute(unplaced, mesh_of(WORKERS))
    step(state, BATCH)
    with pytest.raises(RuntimeError, match=r"was donated to an earlier step.*Go on with the state that it"):
        step(state, BATCH)


@cases("explicit", [False, True], default=1)
def test_a_step_is_lowered_from_shapes_as_from_arrays(explicit):
    mesh = jax.make_mesh((8,), ("data",)) if explicit else mesh_of(8)
    step = gcjax.make_train_step(loss_fn, adam(), mesh)
    state = step.init(PARAMS)
    shapes = jax.eval_shape(step.init, PARAMS)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    compiled = step.lower(shapes, batch).compile()
    expected, _ = step.lower(state, BATCH).compile()(jax.tree.map(jnp.copy, state), BATCH)
    found, _ = compiled(state, jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data"))))
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@cases(
    ("with_state", "accumulate", "moments"),
    itertools.product((False, True), (1, 2), (None, gcjax.value_and_moments)),
    default=2,
)
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_what_the_loss_returns_beside_itself_comes_back(moments, accumulate, with_state):
    def loss(params, batch, model_state=None):
        errors = errors_of(params, batch)
        aux = {"largest": errors.max(axis=1), "mean": errors.mean(), "constant": 3}
        return (errors.mean(), model_state, aux) if with_state else (errors.mean(), aux)

    step = make_step(loss, moments=moments, accumulate=accumulate, has_aux=True)
    state = step.init(PARAMS, model_state=jnp.ones(2) if with_state else None)
    _, metrics = step(state, BATCH)
    errors = np.asarray(errors_of(PARAMS, BATCH)).reshape(WORKERS, 4, 2)
    np.testing.assert_allclose(metrics.aux["largest"], errors.max(axis=2), rtol=1e-5)
    np.testing.assert_allclose(metrics.aux["mean"], errors.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, errors.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(metrics.aux["constant"], [3] * WORKERS)


def test_a_transform_that_asks_for_a_value_gets_the_mean_loss():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    step = make_step(tx=optax.chain(variance(), optax.sgd(1e-3), plateau))
    state, losses = step.init(PARAMS), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics.loss.mean()))
    assert float(state.opt_state[2].best_value) == pytest.approx(min(losses), rel=1e-6)


def test_only_a_transform_that_asks_for_a_value_costs_a_collective():
    def compiled(*after):
        step = make_step(tx=optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1), *after), moments=None)
        found = collectives(step.lower(step.init(PARAMS), BATCH).compile().as_text())
        return sum(c.elements for c in found if c.dtype == "f32")

    entries = sum(leaf.size for leaf in PARAMS.values())
    assert compiled() == entries
    assert compiled(optax.contrib.reduce_on_plateau()) == entries + 1
