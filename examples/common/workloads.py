"""What the gossip example trains: a network, its data, and how the mean model is tested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from common.images import CIFAR_MEAN, CIFAR_STD, ImageData, normalise
from common.networks import Cnn, Transformer
from common.text import load_text, windows

PyTree = Any
CONTEXT = 64  # characters of a sequence


class Workload(NamedTuple):
    """A network and its data.

    Attributes:
      samples: training data, arrays with a row for each sample.
      init: init(key) -> parameters.
      loss: loss(params, batch) -> the mean loss of some rows of `samples`.
      test: test(params) -> of the held-out data the figure that `figure` names.
      figure: "accuracy", in per cent, or "validation_loss", in nats per character.
    """

    samples: tuple[np.ndarray, ...]
    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, tuple[jax.Array, ...]], jax.Array]
    test: Callable[[PyTree], float]
    figure: str


def image_workload(data: ImageData) -> Workload:
    """A small convolutional network; the images are float32, or uint8 as CIFAR-10 has them."""
    images, labels, test_images, test_labels = data

    def logits(params, images):
        images = images if images.dtype == jnp.float32 else normalise(images, CIFAR_MEAN, CIFAR_STD)
        return Cnn().apply({"params": params}, images, train=True)

    def init(key):
        return Cnn().init(key, jnp.zeros((1, *images.shape[1:])), train=True)["params"]

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]).mean()

    @jax.jit
    def count_correct(params, images, labels):
        return jnp.sum(jnp.argmax(logits(params, images), axis=-1) == labels)

    def test(params):
        parts = [slice(i, i + 1000) for i in range(0, len(test_images), 1000)]
        return 100 * sum(int(count_correct(params, test_images[p], test_labels[p])) for p in parts) / len(test_images)

    return Workload((images, labels), init, loss, test, "accuracy")


def text_workload(path: Path) -> Workload:
    """The transformer of char_lm.py, on a text file."""
    numbers, validation, alphabet = load_text(path, CONTEXT)
    model = Transformer(len(alphabet), CONTEXT)
    held_out = windows(validation, CONTEXT)

    def loss(params, batch):
        (sequences,) = batch
        logits = model.apply({"params": params}, sequences[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()

    compiled_loss = jax.jit(loss)

    def test(params):
        parts = [held_out[i : i + 256] for i in range(0, len(held_out), 256)]
        losses = [float(compiled_loss(params, (part,))) for part in parts]
        return float(np.average(losses, weights=[len(part) for part in parts]))

    def init(key):
        return model.init(key, jnp.zeros((1, CONTEXT), jnp.int32))["params"]

    return Workload((windows(numbers, CONTEXT),), init, loss, test, "validation_loss")
