"""The compressed gradient of global arrays: steps under plain jax.jit, with axes of every type."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loops import by_gradient, by_step
from rows import methods
from selection import cases
from wire import along

import gcjax
from gcjax._hlo import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPES = {"a": (6, 8), "b": (8, 4), "c": (4,)}
SPECS = {"a": P(None, "model"), "b": P("model"), "c": P()}
TX = {"capacity": 128}


def params_of():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in SHAPES.items()}


def batch_of(size, seed=1):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 6)).astype(np.float32), "y": rng.normal(size=(size, 4)).astype(np.float32)}


def loss_fn(params, batch, out_sharding=None):
    hidden = jnp.tanh(batch["x"] @ params["a"])
    out = jnp.einsum("bh,ho->bo", hidden, params["b"], out_sharding=out_sharding) + params["c"]
    return jnp.mean(jnp.sum(jnp.square(out - batch["y"]), axis=-1))


def on(mesh, tree, spec):
    return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))


def trained(loss, tx, mesh, params, inside=False, **options):
    """The parameters and the loss after three steps under `jax.jit`; and what the compressor counted."""
    batches = [batch_of(16, seed) for seed in range(3)]
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        params, losses, state = by_gradient(loss, tx, optax.adam(1e-2), params, batches, mesh, **options)
        return jax.tree.map(np.asarray, (params, losses[-1])), gcjax.info(state)


@functools.cache
def expected(compress):
    """The same steps by `make_train_step`, on four workers."""
    tx = optax.chain(compress("data"), optax.adam(1e-2))
    state, metrics = by_step(loss_fn, tx, params_of(), [batch_of(16, seed) for seed in range(3)], mesh_of(4))
    return jax.tree.map(np.asarray, state.params), np.mean(metrics[-1].loss), gcjax.info(state.opt_state)


def variance(axis):
    return gcjax.variance_compress(1.0, axis_name=axis, **TX)


@cases(("kind", "inside"), itertools.product((AUTO, EXPLICIT), (True, False)), default=1)
def test_a_jitted_loop_takes_the_steps_of_make_train_step(kind, inside):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    (params, loss), info = trained(loss_fn, variance("data"), mesh, on(mesh, params_of(), P()), inside)
    want, want_loss, want_info = expected(variance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, want)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    np.testing.assert_array_equal(info.sent, want_info.sent)
    assert 0 < info.sent.sum() < 4 * 84


@cases(("kinds", "inside"), itertools.product(itertools.product((AUTO, EXPLICIT), repeat=2), (True, False)), default=1)
def test_axes_that_shard_parameters_are_left_to_jax(kinds, inside):
    mesh = jax.make_mesh((4, 2), ("data", "model"), kinds)
    loss = functools.partial(loss_fn, out_sharding=P() if kinds[1] == EXPLICIT else None)
    tx = gcjax.dense_compress(axis_name="data")
    (params, _), info = trained(loss, tx, mesh, on(mesh, params_of(), SPECS), inside, param_specs=SPECS)
    want, _, _ = expected(lambda axis: gcjax.dense_compress(axis_name=axis))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, want)
    assert len(info.sent) == 8  # each shard of each worker for itself
    assert info.sent[0] == 6 * 4 + 4 * 4 + 4


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_workers_may_have_a_fast_axis(kind):
    mesh = jax.make_mesh((2, 4), ("host", "chip"), (kind, kind))
    axes = ("host", "chip")
    tx = gcjax.ef_sign_compress(axis_name="host", inner_axis_name="chip")
    fn = gcjax.compressed_value_and_grad(loss_fn, tx, mesh, axis_name=axes, moments=None)
    step = gcjax.make_train_step(loss_fn, optax.chain(tx, optax.sgd(1.0)), mesh, axis_name=axes, moments=None)
    params, batch = on(mesh, params_of(), P()), on(mesh, batch_of(16), P(axes))
    _, grads, _ = jax.jit(fn)(params, fn.init(params), batch)
    state, _ = step(step.init(params_of()), batch)
    moved = jax.tree.map(lambda before, after: before - np.asarray(after), params_of(), state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, moved)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_batch_may_be_sharded_over_further_axes(kind):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (kind, kind))

    def loss(w, x):
        w = jax.reshard(w, P()) if kind == EXPLICIT else w
        return jnp.mean(jnp.sum(jnp.tanh(x @ w), -1) ** 2)

    fn = gcjax.compressed_value_and_grad(loss, gcjax.dense_compress(axis_name="data"), mesh, param_specs=P("fsdp"))
    w, x = params_of()["a"], batch_of(16)["x"]
    placed = on(mesh, w, P("fsdp")), on(mesh, x, P(("data", "fsdp")))
    value, grad, _ = jax.jit(fn)(placed[0], fn.init(placed[0]), placed[1])
    expected = jax.value_and_grad(lambda w: jnp.mean(jnp.sum(jnp.tanh(x @ w), -1) ** 2))(w)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-4, atol=1e-6)
    assert grad.addressable_shards[0].data.shape == (3, 8)


def test_only_compressed_messages_cross_the_workers_axis():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AUTO, AUTO))
    tx = gcjax.top_k_compress(0.05, axis_name="data")
    fn = gcjax.compressed_value_and_grad(loss_fn, tx, mesh, moments=None, param_specs=SPECS)
    params, batch = on(mesh, params_of(), SPECS), on(mesh, batch_of(16), P("data"))
    state = fn.init(params)
    compiled = jax.jit(fn).lower(params, state, batch).compile()
    _, grads, state = compiled(params, state, batch)
    assert grads["a"].sharding.spec == P(None, "model")
    moved = along(collectives(compiled.as_text()), mesh, ("data",))
    assert sum(c.ring_bytes for c in moved) == gcjax.info(state).wire_bytes + 6  # 2 * 3/4 * 4 bytes: the mean loss


def aux_loss(params, batch, key=None):
    loss = loss_fn(params, batch)
    noise = 0.0 if key is None else jax.random.normal(key)
    aux = {
        "logits": batch["x"] @ params["a"],  # of the batch's size
        "mean": jnp.mean(batch["x"], axis=0),  # as BatchNorm's statistics
        "noise": jnp.broadcast_to(noise, batch["x"].shape[:1]),
        "steps": jnp.int32(7),
    }
    return loss, aux


@pytest.mark.parametrize("moments", [None, gcjax.value_and_moments])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_aux_comes_back_whole_or_averaged(kind, moments):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    tx = gcjax.dense_compress(axis_name="data")
    fn = gcjax.compressed_value_and_grad(aux_loss, tx, mesh, has_aux=True, moments=moments)
    params, batch = on(mesh, params_of(), P()), on(mesh, batch_of(6 * 4), P("data"))  # 6: also a length of "mean"
    (loss, aux), grads, _ = jax.jit(fn)(params, fn.init(params), batch, key=jax.random.key(0))
    (want_loss, want), want_grads = jax.value_and_grad(aux_loss, has_aux=True)(params_of(), batch_of(6 * 4))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for name in ("logits", "mean", "steps"):
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-4, atol=1e-6)
    assert aux["logits"].sharding.spec[0] == "data"
    assert len(np.unique(aux["noise"])) == (4 if moments is None else 24)  # keys of workers, or of samples
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want_grads)


def test_bfloat16_parameters_and_aux_work():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AUTO, AUTO))

    def loss(params, batch):
        value = loss_fn(params, batch).astype(jnp.bfloat16)
        return value, value

    fn = gcjax.compressed_value_and_grad(loss, variance("data"), mesh, has_aux=True, param_specs=SPECS)
    params = on(mesh, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params_of()), SPECS)
    (value, aux), grads, _ = jax.jit(fn)(params, fn.init(params), on(mesh, batch_of(16), P("data")))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert (value.dtype, aux.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(value, aux.astype(jnp.float32), rtol=0.01)


def counting_loss(params, batch):
    return loss_fn(params, batch), {"right": jnp.sum(batch["x"] > 0)}


def call(loss=loss_fn, batch=16, compressor_axis="data", **options):
    """Trace the function, for the errors that it raises."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AUTO, EXPLICIT))
    tx = gcjax.dense_compress(axis_name=compressor_axis)
    fn = gcjax.compressed_value_and_grad(loss, tx, mesh, moments=None, **options)
    jax.eval_shape(fn, params_of(), fn.init(params_of()), batch_of(batch))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": counting_loss, "has_aux": True}, TypeError, r"aux leaf \['right'\] is int32\[\] and differs between"),
        ({"batch": 18}, ValueError, r"batch leaf \['x'\] has shape \(18, 6\).*multiple of 4 = 4 workers"),
        ({"axis_name": "other"}, ValueError, "must name axes of the mesh"),
        ({"param_specs": {"a": P("data")}}, ValueError, r"shards over \['data'\], an axis of the workers"),
        (
            {"compressor_axis": None},
            ValueError,
            r"would differ between workers along \['data'\].*averages over the axes in its axis_name",
        ),
        ({"param_specs": P("row")}, ValueError, r"the mesh has no axis \['row'\]"),
    ],
)
def test_likely_mistakes_raise(options, error, message):
    with pytest.raises(error, match=message):
        call(**options)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_shards_that_param_specs_does_not_say_raise(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AUTO, kind))
    fn = gcjax.compressed_value_and_grad(loss_fn, gcjax.dense_compress(axis_name="data"), mesh)
    message = (
        r"parameter \['a'\] is sharded as P\(None, 'model'\), but param_specs says P\(\) for it: pass param_specs="
    )
    with pytest.raises(ValueError, match=message):
        fn.init(on(mesh, params_of(), SPECS))
    if kind == EXPLICIT:  # seen in jit, too
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(fn, on(mesh, params_of(), SPECS), fn.init(params_of()), batch_of(16))
    other = jax.make_mesh((8, 1), ("data", "model"), (AUTO, kind))  # an axis of one device shards nothing
    fn = gcjax.compressed_value_and_grad(loss_fn, gcjax.dense_compress(axis_name="data"), other)
    fn.init(on(other, params_of(), SPECS))


def test_a_state_that_is_not_of_the_mesh_raises():
    tx = gcjax.dense_compress(axis_name="data")
    fn = gcjax.compressed_value_and_grad(loss_fn, tx, mesh_of(4), moments=None)
    for workers, state in ((1, tx.init(params_of())), (8, gcjax.distribute(tx.init(params_of()), mesh_of(8)))):
        with pytest.raises(ValueError, match=rf"the state holds {workers} workers, but the mesh has 4.*gcjax\.resize"):
            jax.eval_shape(fn, params_of(), state, batch_of(16))


def test_aux_whose_samples_are_not_in_front_raises():
    mesh = mesh_of(2)
    tx = gcjax.dense_compress(axis_name="data")

    def loss(w, x):
        return jnp.mean((x @ w) ** 2), x.T

    fn = gcjax.compressed_value_and_grad(loss, tx, mesh, has_aux=True, moments=None)
    with pytest.raises(ValueError, match=r"aux of shape \(3, 2\) for a part of the batch, and \(3, 4\).*transpose"):
        jax.jit(fn)(jnp.ones(3), fn.init(jnp.ones(3)), jnp.ones((4, 3)))


def warmed_up(rate=0.1):
    return optax.linear_schedule(0.0, rate, 1000)


def by_name(one, other):
    return optax.partition(
        {"a": one, "rest": other},
        lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "a" if path[0].key == "a" else "rest", params),
    )


TOP = gcjax.top_k_compress(0.5, axis_name="data")
UPHILL = r"tx turns the gradient around at \['.'\], as an optimiser does.*optimizer\.update\(grads, opt_state, params\)"


SGD = optax.chain(TOP, optax.sgd(0.1))
OPTIMISERS = {
    "sgd": SGD,
    "sgd, warmed up": optax.chain(TOP, optax.sgd(warmed_up())),
    "momentum": optax.chain(TOP, optax.sgd(0.1, momentum=0.9)),
    "adam": optax.chain(TOP, optax.adam(0.1)),
    "adamw, warmed up": optax.chain(TOP, optax.adamw(warmed_up())),
    "noisy_sgd": optax.chain(TOP, optax.noisy_sgd(0.1, key=jax.random.key(0))),
    "sign_sgd": optax.chain(TOP, optax.sign_sgd(0.1)),
    "polyak_sgd": optax.chain(TOP, optax.polyak_sgd()),
    "clipping, small steps": optax.chain(TOP, optax.clip_by_global_norm(1e-3), optax.sgd(1e-9)),
    "of some parameters": by_name(SGD, TOP),
    "of others": by_name(TOP, SGD),
    "hyperparameters": optax.inject_hyperparams(lambda rate: optax.chain(TOP, optax.sgd(rate)))(0.1),
    "MultiSteps": optax.chain(TOP, optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()),
    "scale_first": gcjax.scale_first(optax.clip(1.0), optax.chain(TOP, optax.scale(-0.1))),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_chain_with_an_optimiser_is_refused(name):
    fn = gcjax.compressed_value_and_grad(loss_fn, OPTIMISERS[name], mesh_of(2), moments=None)
    for init in (fn.init, lambda params: jax.eval_shape(fn.init, params)):
        with pytest.raises(ValueError, match=UPHILL):
            init(params_of())


QSGD = gcjax.qsgd_compress(4, key=jax.random.key(0), axis_name="data")


@pytest.mark.parametrize("tx", [optax.chain(TOP, optax.clip(1.0), QSGD), optax.chain(TOP, TOP)])
def test_a_chain_of_two_compressors_is_refused(tx):
    fn = gcjax.compressed_value_and_grad(loss_fn, tx, mesh_of(2), moments=None)
    with pytest.raises(
        ValueError, match=r"two compressors in one chain, and the gradient at \['a'\] passes through both"
    ):
        fn.init(params_of())


def only_matrices(updates, state, params=None):
    """A transform that does not take the small arrays of a look at the chain."""
    if updates["a"].shape != SHAPES["a"]:
        raise ValueError("no")
    return jax.tree.map(jnp.negative, updates), state


LEGAL = {
    **{row.name: row.make("data") for row in methods()},
    "clipping after": optax.chain(TOP, optax.clip_by_global_norm(1.0), optax.zero_nans()),
    "unit-wise clipping, noise and a schedule after": optax.chain(
        TOP, optax.adaptive_grad_clip(0.1), optax.add_noise(1e4, 0.0, key=0), optax.scale_by_schedule(warmed_up())
    ),
    "weight decay after": optax.chain(TOP, optax.add_decayed_weights(-100.0)),
    "momentum after": optax.chain(TOP, optax.trace(0.9)),
    "Adam's scaling after": optax.chain(TOP, optax.scale_by_adam()),
    "momentum before": optax.chain(gcjax.local_transform(optax.trace(0.9), "data"), TOP),
    "clipping before": gcjax.scale_first(optax.clip_by_global_norm(1.0), variance("data")),
    "hyperparameters": optax.inject_hyperparams(gcjax.variance_compress, static_args=("axis_name", *TX))(
        alpha=1.0, axis_name="data", **TX
    ),
    "partition": by_name(TOP, gcjax.dense_compress(axis_name="data")),
    "masked": optax.chain(
        optax.masked(TOP, {"a": True, "b": False, "c": False}),
        optax.masked(gcjax.dense_compress(axis_name="data"), {"a": False, "b": True, "c": True}),
    ),
    "centralised": optax.chain(TOP, optax.centralize()),
    "shapes that do not fit": optax.chain(TOP, optax.GradientTransformation(lambda _: (), only_matrices)),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_chain_that_returns_the_gradient_is_not(name):
    gcjax.compressed_value_and_grad(loss_fn, LEGAL[name], mesh_of(2), moments=None).init(params_of())
