"""The check of the loss at the first step: what it finds, and what it must not find."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P

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


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.sample(3)
def test_a_loss_that_is_no_mean_raises_with_the_cure(case):
    loss, moments, says = FOUND[case]
    with pytest.raises(ValueError, match=rf"the loss of two samples is .*{says}.*checks=False"):
        first_step(loss, moments)


@pytest.mark.parametrize("case", MEANS)
@pytest.mark.sample(3)
def test_a_mean_passes_and_its_sum_raises(case):
    loss, moments = MEANS[case]
    _, metrics = first_step(loss, moments)
    assert np.isfinite(metrics.loss).all()
    with pytest.raises(ValueError, match=r"the loss of two samples is .* sums over its samples.*checks=False"):
        first_step(functools.partial(loss, reduce=jnp.sum), moments)


@pytest.mark.parametrize("case", OTHERS)
def test_a_loss_of_which_nothing_wrong_is_known_passes(case):
    loss, moments = OTHERS[case]
    _, metrics = first_step(loss, moments)
    assert np.isfinite(metrics.loss).all()


def test_the_check_can_be_turned_off():
    _, metrics = first_step(SUMMED, MOMENTS, checks=False)
    assert np.isfinite(metrics.loss).all()
    with pytest.raises(TypeError, match="checks must be True or False, got 1"):
        first_step(SUMMED, MOMENTS, checks=1)


def test_a_bad_first_batch_is_no_alarm():
    x = BATCH["x"].copy()
    x[::4] = np.nan
    _, metrics = first_step(plain_loss, MOMENTS, batch=BATCH | {"x": x})
    assert int(metrics.skipped) == 1


def test_one_sample_per_worker_is_not_compared():
    small = jax.tree.map(lambda x: x[:4], BATCH)
    _, metrics = first_step(weighted_loss, MOMENTS, batch=small)
    assert np.isfinite(metrics.loss).all()


def test_only_the_first_step_is_checked():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return plain_loss(params, batch)

    params = Net().init(jax.random.key(0), jnp.zeros((2, 6)))["params"]
    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(counted, tx, mesh_of(4), moments=None)
    state, _ = step(step.init(params), BATCH)
    first = len(traces)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert len(traces) == first


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
