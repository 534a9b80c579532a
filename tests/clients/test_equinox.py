"""Models in the manner of Equinox: a dataclass is the pytree, functions and all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from loops import by_gradient, by_step

import gcjax

TX = gcjax.variance_compress(1.0, capacity=64, axis_name="data")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MLP:
    first: Any
    second: Any
    activation: Callable = jax.nn.relu

    def __call__(self, x):
        return self.activation(x @ self.first) @ self.second


def model_and_batch():
    rng = np.random.default_rng(0)
    first, second, x, y = (
        rng.normal(size=shape).astype(np.float32) / 2 for shape in ((6, 8), (8, 1), (32, 6), (32, 1))
    )
    return MLP(jnp.asarray(first), jnp.asarray(second)), (x, y)


def partition(model):
    """Arrays, and the rest, with None in place of the others: `equinox.partition(model, equinox.is_array)`."""
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, model)
    return arrays, jax.tree.map(lambda x: None if isinstance(x, jax.Array) else x, model)


def combine(arrays, static):
    return jax.tree.map(lambda x, y: y if x is None else x, arrays, static, is_leaf=lambda x: x is None)


def test_the_arrays_of_a_model_are_trained():
    model, batch = model_and_batch()
    arrays, static = partition(model)

    def loss_fn(arrays, batch):
        return jnp.mean((combine(arrays, static)(batch[0]) - batch[1]) ** 2)

    mesh, batches = mesh_of(4), [batch] * 10
    trained, losses, _ = by_gradient(loss_fn, TX, optax.adam(1e-2), arrays, batches, mesh)
    state, _ = by_step(loss_fn, optax.chain(TX, optax.adam(1e-2)), arrays, batches, mesh)
    assert losses[-1] < 0.9 * losses[0]
    assert trained.activation is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained, state.params)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, loss, batch: TX.init(model),
        lambda model, loss, batch: gcjax.value_and_moments(loss)(model, batch),
        lambda model, loss, batch: gcjax.make_train_step(loss, TX, mesh_of(4)).init(model),
        lambda model, loss, batch: gcjax.compressed_value_and_grad(loss, TX, mesh_of(4)).init(model),
    ],
)
def test_a_whole_model_is_refused(use):
    model, batch = model_and_batch()
    with pytest.raises(TypeError, match=r"leaf \.activation is <.*>, not an array.*equinox\.partition"):
        use(model, lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2), batch)
