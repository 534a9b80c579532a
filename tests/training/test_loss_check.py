"""The check of the loss at the first step: what it finds, and what it must not find."""

import functools
import inspect
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax
from gcjax.flax import sync_batchnorm

MOMENTS = gcjax.value_and_moments
SYNCED = functools.partial(gcjax.value_and_moments, sample_axis="sample")
SUM = functools.partial(gcjax.value_and_moments, reduction="sum")
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 6)).astype(np.float32),
    "y": RNG.integers(0, 3, 16),
    "weight": RNG.uniform(0.1, 3.0, 16).astype(np.float32),
}


class Net(nn.Module):
    norm: bool = False
    dropout: float = 0.0
    zero_head: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(self.dropout, deterministic=False)(nn.relu(x))
        init = nn.initializers.zeros if self.zero_head else nn.initializers.lecun_normal()
        return nn.Dense(3, kernel_init=init)(x)


def losses_of(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def norm_loss(params, batch, *, model_state, net=None, reduce=jnp.mean):
    net = net or Net(norm=True)
    out, new = net.apply({"params": params, "batch_stats": model_state}, batch["x"], mutable="batch_stats")
    return reduce(losses_of(out, batch)), new["batch_stats"]


def synced_norm_loss(params, batch, *, model_state, **options):
    with sync_batchnorm("sample"):
        return norm_loss(params, batch, model_state=model_state, **options)


def dropout_loss(params, batch, *, key, reduce=jnp.mean):
    return reduce(losses_of(Net(dropout=0.5).apply({"params": params}, batch["x"], rngs={"dropout": key}), batch))


def key_per_sample_loss(params, batch, *, key, reduce=jnp.mean):
    keys = jax.random.split(key, len(batch["y"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
    folded = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(len(noise)))
    noisy = batch["x"] + noise + folded[:, None]
    return reduce(losses_of(Net().apply({"params": params}, noisy), batch))


def plain_loss(params, batch, *, reduce=jnp.mean):
    return reduce(losses_of(Net().apply({"params": params}, batch["x"]), batch))


def weighted_loss(params, batch):
    return plain_loss(params, batch, reduce=lambda losses: jnp.average(losses, weights=batch["weight"]))


def contrastive_loss(params, batch):
    out = Net().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(out @ out.T, jnp.arange(len(out))).mean()


def whole_batch_loss(params, batch):
    return plain_loss(params, batch, reduce=lambda losses: losses.reshape(2, 2).sum())


def zero_loss(params, batch):
    return plain_loss(params, batch, reduce=lambda losses: 0.0 * losses.sum())


def language_model(scale, dtype=jnp.float32, masks=None):
    """A mean over unmasked tokens. All losses are about log(vocabulary) where the parameters are small."""
    rng = np.random.default_rng(1)
    params = {"e": scale * rng.normal(size=(32, 8)), "o": scale * rng.normal(size=(8, 32))}
    lengths = rng.integers(1, 12, 16) if masks is None else np.asarray(masks)
    batch = {
        "x": rng.integers(0, 32, (16, 12)),
        "y": rng.integers(0, 32, (16, 12)),
        "mask": (np.arange(12) < lengths[:, None]).astype(np.float32),
    }

    def loss(p, batch):
        p = jax.tree.map(lambda x: x.astype(dtype), p)
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(p["e"][batch["x"]]) @ p["o"], batch["y"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    return loss, jax.tree.map(jnp.float32, params), batch


EQUAL_ENDS = [3, 3, 12, 3] * 4  # the first two samples of each worker, and its first and last, have as many tokens
MASKED = {
    "0.02": language_model(0.02),
    "0.1": language_model(0.1),
    "0.3": language_model(0.3),
    "equal ends": language_model(0.1, masks=EQUAL_ENDS),
    "bfloat16": language_model(0.1, jnp.bfloat16),
    "float16": language_model(0.1, jnp.float16),
}
SUMMED = functools.partial(plain_loss, reduce=jnp.sum)
ZERO_HEAD = functools.partial(norm_loss, net=Net(norm=True, zero_head=True))
FOUND = {  # the loss, moments, what the message says
    "divided by a constant": (functools.partial(plain_loss, reduce=lambda x: x.sum() / 16), MOMENTS, "by a constant"),
    "mean for a sum": (plain_loss, SUM, "not a mean over independent samples"),
    "weighted": (weighted_loss, MOMENTS, "Weighted or masked mean: divide"),
    "contrastive": (contrastive_loss, MOMENTS, "not a mean over independent samples"),
    "norm": (norm_loss, MOMENTS, "BatchNorm: set sample_axis"),
    "norm, not synced": (norm_loss, SYNCED, "BatchNorm: set sample_axis"),
    "norm, zero head": (ZERO_HEAD, MOMENTS, "BatchNorm: set sample_axis"),
}
MEANS = {  # the loss, moments
    "mean": (plain_loss, MOMENTS),
    "mean without moments": (plain_loss, None),
    "norm without moments": (norm_loss, None),
    "synced norm": (synced_norm_loss, SYNCED),
    "dropout": (dropout_loss, MOMENTS),
    "dropout without moments": (dropout_loss, None),
    "key per sample": (key_per_sample_loss, MOMENTS),
    "key per sample without moments": (key_per_sample_loss, None),
}
OTHERS = {
    "sum, said so": (SUMMED, SUM),
    "contrastive without moments": (contrastive_loss, None),
    "coupled groups": (contrastive_loss, functools.partial(MOMENTS, microbatches=2)),
    "whole batches only": (whole_batch_loss, None),
    "zero": (zero_loss, None),
    "zero sum": (zero_loss, SUM),
}


def first_step(loss, moments, *, workers=4, batch=BATCH, **options):
    arguments = inspect.signature(loss).parameters
    keywords = getattr(loss, "keywords", {})
    net = keywords.get("net", Net(norm="model_state" in arguments))
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((2, 6)))
    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(loss, tx, mesh_of(workers), moments=moments, **options)
    key = jax.random.key(2) if "key" in arguments else None
    state = step.init(variables["params"], model_state=variables.get("batch_stats"), key=key)
    try:
        return step(state, batch)
    except ValueError:
        assert not jax.tree.leaves(state.params)[0].is_deleted()  # not donated
        raise


@cases("case", FOUND, default=3)
def test_a_loss_that_is_no_mean_raises_with_the_cure(case):
    loss, moments, says = FOUND[case]
    with pytest.raises(ValueError, match=rf"the gradient of some samples .* by \d.* %: .*{says}.*checks=False"):
        first_step(loss, moments)


def first_step_of(loss, params, batch, moments=MOMENTS, workers=4):
    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(loss, tx, mesh_of(workers), moments=moments)
    return step(step.init(params), batch)


@cases("case", MASKED, default=3)
def test_a_masked_mean_raises_where_all_losses_are_about_equal(case):
    with pytest.raises(ValueError, match="Weighted or masked mean: divide"):
        first_step_of(*MASKED[case])


def test_a_masked_mean_with_equal_masks_passes():
    first_step_of(*language_model(0.1, masks=[5] * 16))


@cases("case", MEANS, default=3)
def test_a_mean_passes_and_its_sum_raises(case):
    loss, moments = MEANS[case]
    _, metrics = first_step(loss, moments)
    assert np.isfinite(metrics.loss).all()
    with pytest.raises(ValueError, match=r"the gradient of .* sums over its samples.*checks=False"):
        first_step(functools.partial(loss, reduce=jnp.sum), moments)


@pytest.mark.parametrize("case", OTHERS)
def test_a_loss_of_which_nothing_wrong_is_known_passes(case):
    loss, moments = OTHERS[case]
    _, metrics = first_step(loss, moments)
    assert np.isfinite(metrics.loss).all()


def test_saturated_units_whose_gradients_are_rounding_errors_pass():
    def loss(params, x):
        return optax.l2_loss(jnp.tanh(x @ params["w"]).sum(axis=1)).mean()

    first_step_of(loss, {"w": jnp.ones((8, 16))}, jnp.ones((64, 8)))


def test_the_check_can_be_turned_off():
    _, metrics = first_step(SUMMED, MOMENTS, checks=False)
    assert np.isfinite(metrics.loss).all()


def test_a_bad_first_batch_is_no_alarm():
    x = BATCH["x"].copy()
    x[::4] = np.nan
    _, metrics = first_step(plain_loss, MOMENTS, batch=BATCH | {"x": x})
    assert int(metrics.skipped) == 1


def test_one_sample_per_worker_is_not_compared():
    small = jax.tree.map(lambda x: x[:4], BATCH)
    _, metrics = first_step(weighted_loss, MOMENTS, batch=small)
    assert np.isfinite(metrics.loss).all()


@pytest.mark.parametrize("layout", ["gathered", "model"])
@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum])
def test_losses_over_sharded_parameters_are_checked(layout, reduce):
    mesh = jax.make_mesh((2, 2), ("slow", "fast"))
    axes = ("slow", "fast") if layout == "gathered" else "slow"

    def loss(params, batch):
        out = batch @ params["w"]
        return reduce((out if layout == "gathered" else jax.lax.psum(out, "fast")) ** 2)

    batch = np.random.default_rng(1).normal(size=(16, 6)).astype(np.float32)
    if layout == "model":  # each shard has rows of w, and takes the same columns of the batch
        batch = batch[:, :3]
    step = gcjax.make_train_step(
        loss,
        optax.chain(gcjax.dense_compress(axis_name="slow"), optax.sgd(0.01)),
        mesh,
        axis_name=axes,
        moments=MOMENTS if layout == "gathered" else None,
        param_specs=P("fast"),
    )
    state = step.init({"w": jnp.ones(6)})
    if reduce is jnp.mean:
        assert np.isfinite(step(state, batch)[1].loss).all()
    else:
        with pytest.raises(ValueError, match="sums over its samples"):
            step(state, batch)


class Block(nn.Module):
    """Embedding, attention behind a normalisation, and a mixture of experts whose router's choice may be a tie."""

    dtype: jnp.dtype
    router: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        options = {"dtype": self.dtype}
        x = nn.Embed(32, 16, **options)(x)
        x = x + nn.MultiHeadDotProductAttention(2, **options)(nn.LayerNorm(**options)(x))
        scores = nn.Dense(4, use_bias=False, kernel_init=self.router, **options)(x)
        outs = nn.Dense(64, **options)(x).reshape(*x.shape[:-1], 4, 16)
        chosen = jnp.take_along_axis(outs, jnp.argmax(scores, axis=-1)[..., None, None], axis=-2)[..., 0, :]
        return nn.Dense(32, **options)(x + chosen * jax.nn.softmax(scores).max(-1, keepdims=True))


def block(dtype, param_dtype=jnp.float32, **options):
    rng = np.random.default_rng(2)
    batch = {name: rng.integers(0, 32, (32, 24)) for name in "xy"}
    net = Block(dtype, **options)
    params = net.init(jax.random.key(0), batch["x"][:1])["params"]

    def loss(p, batch):
        logits = net.apply({"params": p}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss, jax.tree.map(lambda x: x.astype(param_dtype), params), batch


@jax.custom_vjp
def reversible_only(x):
    return jnp.sin(x)


reversible_only.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def of_features(fn, params=None, x=None, weight=None):
    """A mean over samples of `fn(p, x)`, weighted if there are weights."""
    rng = np.random.default_rng(3)
    params = {"w": 0.5 * rng.normal(size=(6, 6)), "v": 0.5 * rng.normal(size=6)} if params is None else params
    batch = (rng.normal(size=(32, 6)) if x is None else x, np.ones(32) if weight is None else weight)
    loss = lambda p, b: jnp.mean(b[1] * jax.vmap(lambda x: fn(p, x))(b[0]))  # noqa: E731
    return loss, jax.tree.map(jnp.float32, params), jax.tree.map(np.float32, batch)


def chaotic():
    """A recurrent network in which rounding errors grow until they are all that counts."""
    _, params, batch = of_features(None)

    def recurrent(p, batch):
        state = jax.lax.fori_loop(0, 30, lambda _, h: jnp.sin(4 * (h @ p["w"])), batch[0])
        return jnp.mean(state @ p["v"])

    return recurrent, params, batch


def half(dtype):
    def fn(p, x):
        p, x = jax.tree.map(lambda x: x.astype(dtype), (p, x))
        return jnp.sum(jnp.tanh(x @ p["w"]) * p["v"]).astype(jnp.float32) ** 2

    return fn


def few_tokens():
    """`jax.grad` adds up the rows of the table in bfloat16, hundreds of numbers for each, and is 40 % off."""
    rng = np.random.default_rng(4)
    params = {"t": rng.normal(size=(4, 8)), "w": rng.normal(size=(8, 4)), "b": np.zeros(4)}

    def loss(p, x):
        table, weight = p["t"].astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16)
        logits = (table[x] @ weight).astype(jnp.float32) + p["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, (x + 1) % 4).mean()

    return loss, jax.tree.map(jnp.float32, params), rng.integers(0, 4, (16, 512))


SIGNS = np.where(np.arange(32) % 2, 1.0, -1.0)
SAME = np.ones((32, 6))
SOUND = {
    "bfloat16": lambda: (*block(jnp.bfloat16), MOMENTS),
    "all bfloat16": lambda: (*block(jnp.bfloat16, jnp.bfloat16), MOMENTS),
    "all float16": lambda: (*block(jnp.float16, jnp.float16), MOMENTS),
    "equal scores": lambda: (*block(jnp.float32, router=nn.initializers.ones), MOMENTS),
    "equal scores in bfloat16": lambda: (*block(jnp.bfloat16, router=nn.initializers.ones), MOMENTS),
    "zero scores": lambda: (*block(jnp.float32, router=nn.initializers.zeros), MOMENTS),
    "no jvp": lambda: (*of_features(lambda p, x: jnp.sum(reversible_only(x @ p["w"]) * p["v"])), MOMENTS),
    "chaos": lambda: (*chaotic(), MOMENTS),
    "cancel": lambda: (
        *of_features(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) * p["v"]), x=SAME, weight=SIGNS),
        MOMENTS,
    ),
    "cancel in bfloat16": lambda: (*of_features(half(jnp.bfloat16), x=SAME, weight=SIGNS), MOMENTS),
    "samples without gradient": lambda: (*of_features(half(jnp.float32), weight=SIGNS > 0), MOMENTS),
    "tiny in float16": lambda: (*of_features(half(jnp.float16), weight=np.full(32, 1e-6)), MOMENTS),
    "few tokens": lambda: (*few_tokens(), MOMENTS),
    "unused": lambda: (*of_features(lambda p, x: x @ p["v"]), MOMENTS),
    "without moments": lambda: (*block(jnp.bfloat16), None),
    "one by one": lambda: (*block(jnp.bfloat16), functools.partial(MOMENTS, method="scan")),
}


@cases(("workers", "case"), itertools.product((1, 4), SOUND), default=8)
def test_means_with_large_rounding_errors_pass(case, workers):
    loss, params, batch, moments = SOUND[case]()
    first_step_of(loss, params, batch, moments, workers)


@cases("case", ["bfloat16", "all float16", "without moments"], default=2)
def test_sums_with_large_rounding_errors_raise(case):
    loss, params, batch, moments = SOUND[case]()
    with pytest.raises(ValueError, match="sums over its samples"):
        first_step_of(lambda p, b: loss(p, b) * len(b["x"]), params, batch, moments)


def test_the_check_needs_no_more_memory_than_a_step(monkeypatch):
    compiled = []
    compile = jax.stages.Lowered.compile

    def noted(lowered, *args, **keywords):
        compiled.append(compile(lowered, *args, **keywords))
        return compiled[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    params = [jnp.eye(128) for _ in range(4)]
    batch = np.ones((256, 128), np.float32)
    tx = optax.chain(gcjax.variance_compress(axis_name="data"), optax.sgd(0.1))

    def loss(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step = gcjax.make_train_step(loss, tx, mesh_of(1))
    state = step.init(params)
    step.lower(state, batch).compile()
    step(state, batch)
    of_step, of_check = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert of_check <= of_step
