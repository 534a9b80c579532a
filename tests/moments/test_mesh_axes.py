"""Moments of a batch that is sharded over mesh axes, in plain jax.jit."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import cases

import gcjax

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def loss_fn(w, x):
    return jnp.mean(jnp.sum(jnp.tanh(x @ w), axis=-1) ** 2), x @ w


KINDS = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)]


@cases(
    ("kinds", "spec", "method"),
    itertools.product(KINDS, (P(), P(None, "model")), ("auto", "scan", "groups")),
    default=8,
)
def test_a_sharded_batch_has_the_moments_of_the_whole_batch(kinds, spec, method):
    mesh = jax.make_mesh((4, 2), ("data", "model"), kinds)
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) / 4 for shape in ((8, 4), (16, 3, 8)))
    options = {"groups": 4} if method == "groups" else {}
    expected = gcjax.value_and_moments(loss_fn, has_aux=True, **options)(w, x)
    options = options or {"method": method}
    arrays = jax.device_put(w, NamedSharding(mesh, spec)), jax.device_put(x, NamedSharding(mesh, P("data")))
    for context in (contextlib.nullcontext, functools.partial(jax.set_mesh, mesh)):
        with context():
            found = jax.jit(gcjax.value_and_moments(loss_fn, has_aux=True, **options))(*arrays)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
            for moment in found[1] if kinds[1] == EXPLICIT or method != "groups" else ():  # else XLA's choice
                assert moment.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_checks_take_a_sharded_batch_outside_of_jit(kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    w = jax.device_put(np.ones((8, 4), np.float32) / 4, NamedSharding(mesh, P()))
    x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("data")))
    gcjax.check_moments(loss_fn, has_aux=True)(w, x)
    whole = gcjax.explain_moments(loss_fn, has_aux=True)(np.asarray(w), np.asarray(x))
    assert gcjax.explain_moments(loss_fn, has_aux=True)(w, x) == whole
    (loss, _), _ = gcjax.value_and_moments(loss_fn, has_aux=True)(w, x)
    np.testing.assert_allclose(loss, loss_fn(np.asarray(w), np.asarray(x))[0], rtol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_weights_that_are_gathered_first_keep_their_rule(kind):
    """Fully sharded parameters: a constraint stands between the weight and its use."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), (kind, kind), devices=jax.devices()[:2])
    place = jax.reshard if kind == EXPLICIT else jax.lax.with_sharding_constraint

    def gathered(w, x):
        return loss_fn(place(w, P()), x)[0]

    w, x = np.ones((8, 4), np.float32) / 4, np.ones((16, 8), np.float32)
    expected = gcjax.value_and_moments(loss_fn, has_aux=True)(w, x)[1]
    arrays = jax.device_put(w, NamedSharding(mesh, P(None, "model"))), jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        (row,) = gcjax.explain_moments(gathered)(*arrays).rows
        _, found = jax.jit(gcjax.value_and_moments(gathered))(*arrays)
    assert (row.rule, row.fallback) == ("dense", False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
