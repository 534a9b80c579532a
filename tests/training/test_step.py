"""The training step: against hand-written loops, and the bytes that its compiled program moves."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from rows import methods
from selection import cases

import gcjax
from gcjax._hlo import collectives, totals
from gcjax.flax import sync_batchnorm


class Net(nn.Module):
    """A small network with optional dropout and BatchNorm."""

    batch_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(64)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 16)).astype(np.float32), rng.integers(0, 10, size)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def variance_step(mesh, loss=None, **options):
    """A step with variance compression. One capacity compiles faster than the default's several."""
    tx = optax.chain(gcjax.variance_compress(axis_name="data", capacity=256), optax.adam(1e-2))
    return gcjax.make_train_step(loss or loss_fn, tx, mesh, **options)


PARAMS = Net().init(jax.random.key(0), jnp.zeros((1, 16)))["params"]


def loss_fn(params, batch):
    return cross_entropy(Net().apply({"params": params}, batch[0]), batch[1])


def test_dense_step_equals_plain_training():
    step = gcjax.make_train_step(
        loss_fn, optax.chain(gcjax.dense_compress(axis_name="data"), optax.adam(1e-2)), mesh_of(8), moments=None
    )
    state = step.init(PARAMS)
    plain, opt = PARAMS, optax.adam(1e-2)
    opt_state = opt.init(plain)
    for i in range(3):
        batch = batch_of(32, i)
        state, metrics = step(state, batch)
        loss, grad = jax.value_and_grad(loss_fn)(plain, batch)
        updates, opt_state = opt.update(grad, opt_state)
        plain = optax.apply_updates(plain, updates)
        assert float(metrics.loss.mean()) == pytest.approx(float(loss), rel=1e-5)
    # Adam divides by tiny numbers where the gradient is 0, so the tolerance is absolute.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state.params, plain)


def test_each_worker_passes_its_own_moments():
    workers, alpha, tau = 4, 1.3, 0.01  # at 1.0, entries that only one sample moves lie on the criterion's edge
    tx = gcjax.variance_compress(alpha, threshold=tau, axis_name="data", capacity=2048, transport="all_gather")
    step = gcjax.make_train_step(loss_fn, optax.chain(tx, optax.sgd(0.1)), mesh_of(workers))
    state = step.init(PARAMS)
    batch = batch_of(32)
    state, _ = step(state, batch)
    expected = []
    for w in range(workers):
        own = jax.tree.map(lambda x, w=w: x[w * 8 : (w + 1) * 8], batch)
        grads = jax.vmap(lambda x, y: jax.grad(loss_fn)(PARAMS, (x[None], y[None])))(*own)
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        squares = jax.tree.map(lambda g: ((g / 8) ** 2).sum(0), grads)
        passes = jax.tree.map(lambda g, s: (g * g > alpha * s) & (jnp.abs(g) > tau), mean, squares)
        assert any(leaf.any() for leaf in jax.tree.leaves(passes))
        expected.append(jax.tree.map(lambda g, sent: jnp.where(sent, tau * jnp.sign(g), 0), mean, passes))
    mean = jax.tree.map(lambda *g: sum(g) / workers, *expected)
    for got, before, want in zip(*map(jax.tree.leaves, (state.params, PARAMS, mean)), strict=True):
        differs = ~np.isclose(got - before, -0.1 * want, atol=1e-5)
        assert differs.mean() < 0.005  # rounding may decide either way for an entry on the criterion's edge


@cases(
    "row",
    {row.public: row for row in methods()}.values(),
    default=lambda row: row.public == "power_sgd_compress",
    ids=lambda row: row.public,
)
def test_info_reads_a_state_with_explicit_mesh_axes(row):
    def loss(w, batch):
        return jnp.mean((batch[0] @ w) ** 2)

    moments = gcjax.value_and_moments if row.uses_squares else None
    found = []
    for mesh in (jax.make_mesh((8,), ("data",)), mesh_of(8)):
        step = gcjax.make_train_step(loss, optax.chain(row.make("data"), optax.sgd(1e-2)), mesh, moments=moments)
        state, _ = step(step.init(jnp.ones((16, 40))), batch_of(16))
        found.append(gcjax.info(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_training_converges_and_never_retraces():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss_fn(params, batch)

    tx = optax.chain(gcjax.variance_compress(axis_name="data"), optax.adam(1e-2))
    step = gcjax.make_train_step(counted, tx, mesh_of(8))
    params = jax.tree.map(jnp.copy, PARAMS)
    state, batch = step.init(params), batch_of(64)
    losses, traced = [], []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss.mean()))
        traced.append(len(traces))
    assert losses[-1] < 0.3 * losses[0]
    assert len(set(traced)) == 1
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)  # not donated


def test_compiled_step_moves_the_bytes_that_info_reports():
    step = variance_step(mesh_of(8))
    state = step.init(PARAMS)
    text = step.lower(state, batch_of(64)).compile().as_text()
    found = collectives(text)
    parameters = sum(x.size for x in jax.tree.leaves(PARAMS))
    assert all(c.elements < parameters / 2 for c in found if c.kind == "all-reduce")
    assert all(c.dtype != "f32" for c in found)
    state, _ = step(state, batch_of(64))
    assert gcjax.info(state.opt_state).wire_bytes in totals(found)


def share_of_sum(params, batch):
    """Of a worker's 16 samples. Its sum over them is their mean."""
    return loss_fn(params, batch) * len(batch[1]) / 16


@pytest.mark.parametrize(
    ("loss", "moments"),
    [(loss_fn, gcjax.value_and_moments), (share_of_sum, functools.partial(gcjax.value_and_moments, reduction="sum"))],
    ids=["mean", "sum"],
)
def test_accumulated_update_equals_the_whole_batch(loss, moments):
    updates = []
    for parts in (1, 4):
        tx = optax.chain(gcjax.variance_compress(axis_name="data", capacity=2048), optax.sgd(1.0))
        step = gcjax.make_train_step(loss, tx, mesh_of(2), accumulate=parts, moments=moments)
        state, metrics = step(step.init(PARAMS), batch_of(32))
        updates.append((state.params, metrics.loss))
    (whole, whole_loss), (parts, parts_loss) = updates
    np.testing.assert_allclose(whole_loss, parts_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert (~np.isclose(a, b, atol=1e-6)).mean() < 0.005


@cases("accumulate", [1, 2], default=1)
def test_workers_have_own_batch_statistics_and_dropout(accumulate):
    model = Net(batch_norm=True, dropout=0.5)
    variables = Net(dropout=0.5, batch_norm=True).init(jax.random.key(0), jnp.zeros((2, 16)), train=False)

    def loss(params, batch, *, model_state, key):
        variables = {"params": params, "batch_stats": model_state}
        with sync_batchnorm("sample"):
            logits, changed = model.apply(variables, batch[0], mutable=["batch_stats"], rngs={"dropout": key})
        return cross_entropy(logits, batch[1]), changed["batch_stats"]

    moments = functools.partial(gcjax.value_and_moments, sample_axis="sample")
    step = variance_step(mesh_of(4), loss, moments=moments, accumulate=accumulate)
    state = step.init(variables["params"], model_state=variables["batch_stats"], key=jax.random.key(1))
    batch = batch_of(32)
    state, first = step(state, batch)
    mean = np.asarray(jax.tree.leaves(state.model_state.stacked())[0])
    assert mean.shape[0] == 4
    assert len(np.unique(mean[:, 0])) == 4  # each worker's own statistics
    own = batch[0].reshape(4, accumulate, -1, 16)
    hidden = own @ np.asarray(variables["params"]["Dense_0"]["kernel"])
    running = np.zeros((4, 64))
    for part in range(accumulate):
        running = 0.99 * running + 0.01 * hidden[:, part].mean(axis=1)
    np.testing.assert_allclose(mean, running, atol=1e-5)
    _, second = step(state, batch)
    assert not np.array_equal(first.loss, second.loss)


@pytest.mark.parametrize(("moments", "draws"), [(None, 2), (gcjax.value_and_moments, 8)])
def test_workers_steps_parts_and_samples_have_keys_of_their_own(moments, draws):
    """`draws` of a worker's 8 samples in a step of two parts."""

    def loss(params, batch, *, key):
        return loss_fn(params, batch), jnp.full(len(batch[1]), jax.random.uniform(key))

    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(loss, tx, mesh_of(4), accumulate=2, moments=moments, has_aux=True)
    state, seen = step.init(PARAMS, key=jax.random.key(0)), []
    for _ in range(2):
        state, metrics = step(state, batch_of(32))
        seen.append(metrics.aux)
    assert len(np.unique(seen)) == 2 * 4 * draws


def partitioned(compress):
    return optax.partition(
        {"big": compress, "small": gcjax.dense_compress(axis_name="data")},
        lambda params: jax.tree.map(lambda x: "big" if x.ndim > 1 else "small", params),
    )


TWO = "two compressors in one chain, and the gradient at .* passes through both.*Keep one of the two.*optax.partition"


@pytest.mark.parametrize(
    "chain",
    [
        lambda compress: optax.chain(compress, gcjax.dense_compress(axis_name="data"), optax.sgd(0.1)),
        lambda compress: optax.chain(partitioned(compress), compress),
        lambda compress: optax.MultiSteps(optax.chain(compress, optax.sgd(0.1), compress), 2),
    ],
    ids=["chain", "around partition", "inside MultiSteps"],
)
@pytest.mark.parametrize("trainable", [None, {"w": True, "b": False}])
def test_two_compressors_in_one_chain_are_refused(chain, trainable):
    tx = chain(gcjax.variance_compress(axis_name="data", capacity=256))
    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=TWO):
        gcjax.make_train_step(loss_fn, tx, mesh_of(2), trainable=trainable).init(params)


def test_two_compressors_of_different_axes_are_two_levels():
    mesh = jax.make_mesh((2, 2), ("slow", "fast"))
    tx = optax.chain(*(gcjax.dense_compress(axis_name=axis) for axis in ("fast", "slow")), optax.sgd(0.1))
    gcjax.make_train_step(loss_fn, tx, mesh, axis_name=("slow", "fast")).init(PARAMS)


@pytest.mark.parametrize("row", ["dense", "top_k"])
def test_the_norm_is_that_of_the_gradient_that_the_optimiser_sees(row):
    seen = optax.GradientTransformation(
        lambda params: jnp.float32(0), lambda updates, state, params=None: (updates, optax.tree.norm(updates))
    )
    compress = {"dense": gcjax.dense_compress, "top_k": functools.partial(gcjax.top_k_compress, 0.1)}[row]
    halves = optax.partition(
        {"a": compress(axis_name="data"), "b": gcjax.dense_compress(axis_name="data")}, {"w": "a", "v": "b"}
    )
    params = {"w": jnp.ones((8, 3)), "v": jnp.ones(3)}
    step = gcjax.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"] - p["v"]) ** 2), optax.chain(halves, seen, optax.sgd(0.1)), mesh_of(4)
    )
    batch = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    state, metrics = step(step.init(params), batch)
    assert metrics.grad_norm.shape == ()
    assert float(metrics.grad_norm) == pytest.approx(float(state.opt_state[1]), rel=1e-6)
    batch[3, 1] = np.nan
    _, metrics = step(state, batch)
    assert np.isnan(metrics.grad_norm)


def test_the_norm_moves_nothing_and_is_not_a_number_without_a_compressor():
    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh_of(4))
    state, x = step.init(jnp.ones(64)), np.ones((8, 64), np.float32)
    assert [c.elements for c in collectives(step.lower(state, x).compile().as_text()) if c.dtype == "f32"] == [64]
    mean = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "data"))
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.chain(mean, optax.sgd(0.1)), mesh_of(4))
    assert np.isnan(step(step.init(jnp.ones(64)), x)[1].grad_norm)
