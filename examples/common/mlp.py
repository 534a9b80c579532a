"""A network with one hidden layer and 9,610 parameters, for 8x8 images of 10 digits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

Params = dict[str, dict[str, jax.Array]]


def init_params(key: jax.Array) -> Params:
    """The initial parameters."""
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 128)) * math.sqrt(2 / 64), "b": jnp.zeros(128)},
        "out": {"w": jax.random.normal(second, (128, 10)) * math.sqrt(1 / 128), "b": jnp.zeros(10)},
    }


def logits(params: Params, images: np.ndarray | jax.Array) -> jax.Array:
    """float32[batch, 10] of images float32[batch, 64]."""
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy of images and their labels."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


class FlatNetwork(NamedTuple):
    """The network with its parameters in one vector, trained by SGD with momentum 0.9.

    Attributes:
      start: float32[9610], the initial parameters.
      opt_state: the initial state of the optimiser.
      step: `step(x, opt_state, images, labels) -> (x, opt_state, loss)`.
      accuracy: `accuracy(x, images, labels)`, the share of correct answers.
    """

    start: np.ndarray
    opt_state: optax.OptState
    step: Callable[..., tuple[jax.Array, optax.OptState, jax.Array]]
    accuracy: Callable[..., Any]


def flat_network(seed: int, learning_rate: float) -> FlatNetwork:
    """Make the network and its training step."""
    start, unravel = ravel_pytree(init_params(jax.random.key(seed)))
    tx = optax.sgd(learning_rate, momentum=0.9)

    @jax.jit
    def step(x, opt_state, images, labels):
        loss, grad = jax.value_and_grad(lambda x: loss_fn(unravel(x), (images, labels)))(x)
        updates, opt_state = tx.update(grad, opt_state)
        return optax.apply_updates(x, updates), opt_state, loss

    @jax.jit
    def accuracy(x, images, labels):
        return jnp.mean(jnp.argmax(logits(unravel(x), images), axis=-1) == labels)

    return FlatNetwork(np.asarray(start), tx.init(start), step, accuracy)
