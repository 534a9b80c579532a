"""The models of the bench: what their training step takes, and their loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WORKERS, BATCH = 8, 64  # samples of each worker
IMAGE, CLASSES = 32, 1000
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # of a ResNet-50: blocks, and channels of their 3 x 3 convolutions


class Model(NamedTuple):
    """Parameters and global batch as `jax.ShapeDtypeStruct`s, and loss(params, batch)."""

    params: Any
    batch: Any
    loss: Callable[[Any, Any], jax.Array]


def tanh_network(layers: int, width: int) -> Model:
    """Square matrices, tanh, and the squared error."""

    def loss(params, batch):
        x, y = batch
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean((x - y) ** 2)

    samples = _floats(WORKERS * BATCH, width)
    return Model({f"layer{i:02}": _floats(width, width) for i in range(layers)}, (samples, samples), loss)


def resnet50() -> Model:
    """The 161 leaves and 25,557,032 parameters of a ResNet-50, on small images.

    Normalisation only scales and shifts, without statistics of the batch, and there is no pooling after the first
    convolution. All the rest is a ResNet-50's.
    """
    params = {"stem": _unit(7, 3, 64), "head": {"kernel": _floats(2048, CLASSES), "bias": _floats(CLASSES)}}
    channels = 64
    for blocks, width in STAGES:
        for block in range(blocks):
            units = {"1": _unit(1, channels, width), "2": _unit(3, width, width), "3": _unit(1, width, 4 * width)}
            if block == 0:
                units["shortcut"] = _unit(1, channels, 4 * width)
            params[f"{width:03} {block}"] = units
            channels = 4 * width

    def loss(params, batch):
        images, labels = batch
        x = jax.nn.relu(_apply(params["stem"], images, 2))
        for blocks, width in STAGES:
            for block in range(blocks):
                units = params[f"{width:03} {block}"]
                stride = 2 if block == 0 and width > 64 else 1
                y = jax.nn.relu(_apply(units["1"], x, 1))
                y = jax.nn.relu(_apply(units["2"], y, stride))
                y = _apply(units["3"], y, 1)
                x = jax.nn.relu(y + (_apply(units["shortcut"], x, stride) if block == 0 else x))
        logits = jnp.mean(x, axis=(1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
        return jnp.mean((logits - labels) ** 2)

    batch = (_floats(WORKERS * BATCH, IMAGE, IMAGE, 3), _floats(WORKERS * BATCH, CLASSES))
    return Model(params, batch, loss)


def _unit(size: int, channels: int, width: int) -> dict:
    return {"kernel": _floats(size, size, channels, width), "scale": _floats(width), "bias": _floats(width)}


def _apply(unit: dict, x: jax.Array, stride: int) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        x, unit["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return x * unit["scale"] + unit["bias"]


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MODELS: dict[str, Callable[[], Model]] = {
    "4M in 4": lambda: tanh_network(4, 1024),
    "4M in 24": lambda: tanh_network(24, 418),
    "25M in 4": lambda: tanh_network(4, 2500),
    "25M in 24": lambda: tanh_network(24, 1024),
    "ResNet-50": resnet50,
}
