"""The models of moments.py, in plain JAX. Each function returns (loss_fn, params, batch, sample_axis)."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._types import Array, PyTree

Model = tuple[Callable[..., Array], PyTree, dict[str, Array], str | None]


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    fan_in = int(np.prod(shape[:-1])) or 1
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(fan_in), jnp.float32)


def _cross_entropy(logits: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(picked)


def _labelled(rng: np.random.Generator, size: int, *shape: int, classes: int = 10) -> dict[str, Array]:
    x = jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32)
    return {"x": x, "y": jnp.asarray(rng.integers(0, classes, size), jnp.int32)}


def mlp(size: int) -> Model:
    rng = np.random.default_rng(0)
    widths = [784, 512, 512, 10]
    params = [{"w": _normal(rng, a, b), "b": jnp.zeros(b)} for a, b in itertools.pairwise(widths)]

    def loss(params, batch):
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return _cross_entropy(x @ params[-1]["w"] + params[-1]["b"], batch["y"])

    return loss, params, _labelled(rng, size, 784), None


def _conv(x: Array, kernel: Array, stride: int = 1) -> Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _pool(x: Array) -> Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def plain_cnn(channels: Sequence[int | Literal["M"]], dense: Sequence[int], size: int = 64) -> Model:
    """3x3 convolutions, with "M" for max pooling, then dense layers, on 32x32 images."""
    rng = np.random.default_rng(0)
    kernels, space, width = [], 32, 3
    for item in channels:
        if item == "M":
            space //= 2
        else:
            kernels.append({"w": _normal(rng, 3, 3, width, item), "b": jnp.zeros(item)})
            width = item
    widths = [space * space * width, *dense]
    head = [{"w": _normal(rng, a, b), "b": jnp.zeros(b)} for a, b in itertools.pairwise(widths)]

    def loss(params, batch):
        x, convs = batch["x"], iter(params["convs"])
        for item in channels:
            if item == "M":
                x = _pool(x)
            else:
                layer = next(convs)
                x = jax.nn.relu(_conv(x, layer["w"]) + layer["b"])
        x = x.reshape(x.shape[0], -1)
        for layer in params["head"][:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return _cross_entropy(x @ params["head"][-1]["w"] + params["head"][-1]["b"], batch["y"])

    return loss, {"convs": kernels, "head": head}, _labelled(rng, size, 32, 32, 3), None


def cnn() -> Model:
    return plain_cnn([32, 32, "M", 64, 64, "M", 128, 128, "M"], [256, 10])


def vgg16() -> Model:
    blocks = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]
    return plain_cnn(blocks, [512, 10])


def _group_norm(x: Array, p: dict[str, Array], groups: int = 8) -> Array:
    shape = x.shape
    x = x.reshape(*shape[:3], groups, shape[3] // groups)
    mean = x.mean((1, 2, 4), keepdims=True)
    var = jnp.square(x - mean).mean((1, 2, 4), keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(shape) * p["scale"] + p["bias"]


def _batch_norm(x: Array, p: dict[str, Array], axis: str | None) -> Array:
    mean, square = x.mean((0, 1, 2)), jnp.square(x).mean((0, 1, 2))
    if axis is not None:
        mean, square = jax.lax.pmean((mean, square), axis)
    return (x - mean) * jax.lax.rsqrt(square - jnp.square(mean) + 1e-5) * p["scale"] + p["bias"]


def resnet20(norm: Literal["group", "batch"], size: int = 64) -> Model:
    rng = np.random.default_rng(0)
    plan = [(width, 2 if width > 16 and i == 0 else 1) for width in (16, 32, 64) for i in range(3)]

    def unit(a, b, kernel=3):
        return {"w": _normal(rng, kernel, kernel, a, b), "scale": jnp.ones(b), "bias": jnp.zeros(b)}

    params, width = {"stem": unit(3, 16), "blocks": [], "head": _normal(rng, 64, 10)}, 16
    for out, stride in plan:
        block = {"a": unit(width, out), "b": unit(out, out)}
        if stride == 2:
            block["skip"] = unit(width, out, 1)
        params["blocks"].append(block)
        width = out

    def loss(params, batch, axis="batch"):
        def layer(x, p, stride=1):
            x = _conv(x, p["w"], stride)
            return _group_norm(x, p) if norm == "group" else _batch_norm(x, p, axis)

        x = jax.nn.relu(layer(batch["x"], params["stem"]))
        for (_, stride), block in zip(plan, params["blocks"], strict=True):
            y = layer(jax.nn.relu(layer(x, block["a"], stride)), block["b"])
            x = jax.nn.relu(y + (layer(x, block["skip"], stride) if "skip" in block else x))
        return _cross_entropy(x.mean((1, 2)) @ params["head"], batch["y"])

    return loss, params, _labelled(rng, size, 32, 32, 3), "batch" if norm == "batch" else None


def transformer(
    tied: bool = False, layers: int = 4, width: int = 256, length: int = 128, vocabulary: int = 1000, size: int = 16
) -> Model:
    rng = np.random.default_rng(0)
    if tied:
        vocabulary = 4000

    def norm():
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    params = {"embed": _normal(rng, vocabulary, width), "position": _normal(rng, length, width), "norm": norm()}
    params["blocks"] = [
        {
            "norm1": norm(),
            "qkv": _normal(rng, width, 3 * width),
            "out": _normal(rng, width, width),
            "norm2": norm(),
            "up": _normal(rng, width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": _normal(rng, 4 * width, width),
        }
        for _ in range(layers)
    ]
    if not tied:
        params["head"] = _normal(rng, width, vocabulary)

    def layer_norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def attend(x, p, heads=4):
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in jnp.split(x @ p["qkv"], 3, axis=-1))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width / heads)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]

    def loss(params, batch):
        x = params["embed"][batch["x"]] + params["position"]
        for block in params["blocks"]:
            x = x + attend(layer_norm(x, block["norm1"]), block)
            x = x + jax.nn.gelu(layer_norm(x, block["norm2"]) @ block["up"] + block["up_bias"]) @ block["down"]
        head = params["embed"].T if tied else params["head"]
        return _cross_entropy(layer_norm(x, params["norm"]) @ head, batch["y"])

    tokens = jnp.asarray(rng.integers(0, vocabulary, (2, size, length)), jnp.int32)
    return loss, params, {"x": tokens[0], "y": tokens[1]}, None


def scanned_blocks(layers: int = 8, width: int = 256, length: int = 64, size: int = 16) -> Model:
    rng = np.random.default_rng(0)
    params = {
        "up": jnp.stack([_normal(rng, width, 4 * width) for _ in range(layers)]),
        "down": jnp.stack([_normal(rng, 4 * width, width) for _ in range(layers)]),
        "bias": jnp.zeros((layers, width)),
    }

    def loss(params, batch):
        def block(x, p):
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"] + p["bias"], None

        return jnp.mean(jnp.square(jax.lax.scan(block, batch["x"], params)[0]))

    return loss, params, {"x": jnp.asarray(rng.normal(size=(size, length, width)), jnp.float32)}, None


def rnn(width: int = 256, length: int = 64, size: int = 16) -> Model:
    rng = np.random.default_rng(0)
    params = {"w": _normal(rng, width, width), "u": _normal(rng, width, width), "b": jnp.zeros(width)}

    def loss(params, batch):
        def step(h, x):
            h = jnp.tanh(h @ params["w"] + x @ params["u"] + params["b"])
            return h, h

        start = jnp.zeros((batch["x"].shape[0], width))
        return jnp.mean(jnp.square(jax.lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1))[1]))

    return loss, params, {"x": jnp.asarray(rng.normal(size=(size, length, width)), jnp.float32)}, None


MODELS: dict[str, Callable[[], Model]] = {
    "MLP, batch 16": functools.partial(mlp, 16),
    "MLP, batch 64": functools.partial(mlp, 64),
    "MLP, batch 256": functools.partial(mlp, 256),
    "CNN": cnn,
    "ResNet-20 GroupNorm": functools.partial(resnet20, "group"),
    "ResNet-20 BatchNorm": functools.partial(resnet20, "batch"),
    "VGG16": vgg16,
    "transformer": transformer,
    "transformer, tied": functools.partial(transformer, True),
    "scanned blocks": scanned_blocks,
    "RNN": rnn,
}
