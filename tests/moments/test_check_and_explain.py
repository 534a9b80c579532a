import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moments_cases import CASES, draw, net, net_data, weighted_net
from selection import cases

from gcjax import check_moments, explain_moments
from gcjax._moments.rules.dense import Dense


def test_check_moments_names_leaf_size_and_cure():
    params, batch = net_data()

    def coupled(params, batch):
        hidden = batch["x"] @ params["w"]
        return jnp.mean((hidden - jnp.mean(hidden, axis=0)) ** 2)

    def masked_mean(params, batch):
        return weighted_net(params, batch) / jnp.sum(batch["weight"])

    check_moments(net)(params, batch)
    check_moments(net, method="vmap", microbatches=3)(params, batch)
    with pytest.raises(ValueError, match=r"gradient of params\['w'\] differs .* by .* BatchNorm: set sample_axis"):
        check_moments(coupled)(params, batch)
    with pytest.raises(ValueError, match="divide the weights by their sum"):
        check_moments(masked_mean)(params, {**batch, "weight": jnp.arange(6.0)})
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(check_moments(net))(params, batch)


@pytest.mark.parametrize("planted", [lambda s: 1.5 * s, lambda s: s.astype(jnp.complex64)])
def test_check_moments_compares_squares_and_dtypes(planted, monkeypatch):
    right = Dense.moments

    def wrong(*args):
        total, squares = right(*args)
        return total, planted(squares)

    monkeypatch.setattr(Dense, "moments", wrong)
    loss, params, batch = CASES["dense"]()
    with pytest.raises(ValueError, match=r"sum_grad_squared of params\['v'\] differs .* use method='vmap'"):
        check_moments(loss)(params, batch)
    check_moments(loss, method="vmap")(params, batch)


def computing_in(dtype, loss, params=(), batch=(), param_dtype=jnp.float32):
    """The loss with everything computed in another dtype, and parameters of `param_dtype`."""

    def cast(tree, dtype):
        return jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, tree)

    def narrow(params, batch):
        return loss(*cast((params, batch), dtype)).astype(jnp.float32)

    return narrow, cast(params, param_dtype), batch


NARROW = {
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "all bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float16": (jnp.float16, jnp.float32),
    "all float16": (jnp.float16, jnp.float16),
}


@cases(
    ("dtypes", "name"),
    itertools.product(NARROW, sorted(CASES.keys() - {"fourier layers", "complex conv"})),  # these need 32 bits
    default=12,
)
def test_rounding_errors_of_16_bits_are_no_alarm(name, dtypes):
    dtype, param_dtype = NARROW[dtypes]
    loss, params, batch = computing_in(dtype, *CASES[name](), param_dtype=param_dtype)
    check_moments(loss)(params, batch)


class Tokens(nn.Module):
    """Embedding, attention with a normalisation, and a scanned layer, with parameters in float32."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(16, 16, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(nn.Dense(16, dtype=self.dtype)(x))
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(x)
        return nn.Dense(16, dtype=self.dtype)(nn.RNN(nn.GRUCell(16, dtype=self.dtype))(x))


def tokens(dtype, size=32):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (2, size, 40))
    net = Tokens(dtype)

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch[0]), batch[1]).mean()

    return loss, jax.jit(net.init)(jax.random.key(0), x[:1]), (x, y)


def images(dtype, size=32):
    """The layers of Flax with `dtype`, as its examples use them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(size, 8, 8, 3)).astype(np.float32), rng.integers(0, 10, size)
    layers = [nn.Conv(8, (3, 3), dtype=dtype), nn.GroupNorm(2, dtype=dtype), nn.relu, lambda x: x.reshape(len(x), -1)]
    net = nn.Sequential([*layers, nn.Dense(64, dtype=dtype), nn.relu, nn.Dense(10, dtype=dtype)])

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch[0]), batch[1]).mean()

    return loss, jax.jit(net.init)(jax.random.key(0), x), (x, y)


def few_tokens(dtype):
    """`jax.grad` adds thousands of numbers to a row of the table, each addition rounded to `dtype`."""
    rng = np.random.default_rng(0)
    params, x = {"t": draw(1, 4, 8), "w": draw(2, 8, 64)}, rng.integers(0, 4, (16, 512))

    def loss(params, x):
        logits = params["t"].astype(dtype)[x] @ params["w"].astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), (x + 1) % 4).mean()

    return loss, jax.tree.map(jnp.float32, params), x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("model", [tokens, images, few_tokens])
def test_models_that_compute_in_16_bits_pass(model, dtype):
    loss, params, batch = model(dtype)
    check_moments(loss)(params, batch)


@pytest.mark.parametrize("planted", [(1.02, 1.0), (0.98, 1.0), (1.0, 1.02)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_two_percent_are_found_in_16_bits_too(planted, dtype, monkeypatch):
    right = Dense.moments
    monkeypatch.setattr(
        Dense, "moments", lambda *args: tuple(f * x for f, x in zip(planted, right(*args), strict=True))
    )
    loss, params, batch = images(dtype)
    name = "gradient" if planted[0] != 1 else "sum_grad_squared"
    with pytest.raises(ValueError, match=rf"{name} of params\['params'\].* differs .* use method='vmap'"):
        check_moments(loss)(params, batch)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_coupled_samples_are_found_in_16_bits_too(dtype):
    loss, params, batch = images(dtype)

    def masked(params, batch):
        weight = jnp.arange(1.0, 1 + len(batch[1]))
        one = jax.vmap(lambda x, y: loss(params, (x[None], y[None])))
        return jnp.sum(weight * one(*batch)) / weight.sum()

    with pytest.raises(ValueError, match=r"jax\.grad of the batch loss"):
        check_moments(masked)(params, batch)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_and_losses_that_cancel_are_no_alarm(dtype):
    """As those of a policy whose advantages have mean zero."""
    params, batch = {"w": draw(3, 5, 7), "v": draw(4, 7)}, draw(1, 1, 5) * jnp.ones((32, 1))
    advantage = jnp.asarray(np.random.default_rng(0).normal(size=32))

    def policy(params, batch):
        x, advantage = batch
        return jnp.mean(advantage * (3 + jnp.tanh(x @ params["w"]) @ params["v"]))

    check_moments(computing_in(dtype, policy)[0])(params, (batch, advantage - advantage.mean()))


def test_explain_moments_names_rules_and_chunks():
    loss, params, batch = CASES["conv grouped"]()
    text = str(explain_moments(loss)(params, batch))
    assert "grouped conv" in text
    assert "6 samples by sinks, 6 at a time" in text
    loss, params, batch = CASES["embedding of columns"]()
    explanation = explain_moments(loss, max_bytes=1000)(params, batch)
    assert [(row.rule, row.fallback) for row in explanation.rows] == [("vmap", True), ("dense", False)]
    assert explanation.chunk < 6
    assert all(row.fallback for row in explain_moments(loss, method="vmap")(params, batch).rows)
    assert [row[2:] for row in explain_moments(loss, method="scan")(params, batch).rows] == [
        ("scan", 1, 1, 4 * leaf.size, False) for leaf in jax.tree.leaves(params)
    ]


def test_explain_moments_counts_bytes_in_nested_scans():
    loss, params, batch = CASES["rnn of shared layers"]()
    (row,) = explain_moments(loss)(params, batch).rows
    # 5 outer and 3 inner steps, each with an activation and a cotangent of 4 float32, in 6 samples.
    assert (row.rule, row.positions, row.bytes) == ("dense over time over time", 15, 15 * 2 * 4 * 4 * 6)
