"""Networks in Flax: for images, from float32[batch, height, width, 3] to float32 logits[batch, classes]; and for text.

`train` turns on dropout and the batch statistics of BatchNorm.
"""

from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp


class Cnn(nn.Module):
    """Three strided convolutions with GroupNorm and a dense layer: small enough for two CPU cores.

    Attributes:
      classes: number of classes.
      width: features of the first layer; 92,074 parameters at 32.
    """

    classes: int = 10
    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        for features, size in ((self.width, 5), (2 * self.width, 3), (3 * self.width, 3)):
            x = nn.Conv(features, (size, size), strides=2)(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


class Vgg(nn.Module):
    """Thirteen convolutions with BatchNorm and dropout, two dense layers: the paper's kind of network for CIFAR-10.

    The paper does not give its dropout rates; these are usual values. A network narrower than 64 overfits less, so it
    has proportionally less dropout.

    Attributes:
      classes: number of classes.
      width: features of the first layer; 14,987,210 parameters at 64.
    """

    classes: int = 10
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)

        def dropout(rate: float) -> nn.Dropout:
            return nn.Dropout(rate * min(1, self.width / 64), deterministic=not train)

        for blocks, times in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
            for last in [False] * (blocks - 1) + [True]:
                x = nn.relu(norm()(nn.Conv(times * self.width, (3, 3), use_bias=False)(x)))
                x = x if last else dropout(0.3)(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = dropout(0.5)(x.reshape(len(x), -1))
        x = nn.relu(norm()(nn.Dense(8 * self.width, use_bias=False)(x)))
        return nn.Dense(self.classes)(dropout(0.5)(x))


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Attributes:
      features: of the result.
      stride: of the first convolution.
      norm: makes a normalisation layer.
      conv: makes a convolution.
    """

    features: int
    stride: int
    norm: Callable[..., nn.Module]
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), strides=self.stride)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions, and a shortcut; otherwise like `Basic`."""

    features: int
    stride: int
    norm: Callable[..., nn.Module]
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), strides=self.stride)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(4 * self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """He et al. 2016 (arXiv 1512.03385), with BatchNorm.

    Attributes:
      stages: number of blocks in each stage.
      block: `Basic` or `Bottleneck`.
      classes: number of classes.
      width: features of the first stage. Each further stage halves the image and doubles the features.
      stem: "cifar" (3x3) or "imagenet" (7x7 with stride 2, max pooling).
      dtype: of the computation; parameters, statistics and logits stay float32.
    """

    stages: Sequence[int]
    block: type[nn.Module] = Basic
    classes: int = 10
    width: int = 16
    stem: str = "cifar"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        if self.stem == "imagenet":
            x = nn.relu(norm()(conv(self.width, (7, 7), strides=2)(x)))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        else:
            x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for stage, blocks in enumerate(self.stages):
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                x = self.block(self.width * 2**stage, stride, norm, conv)(x)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)).astype(jnp.float32))


class Transformer(nn.Module):
    """A decoder with LayerNorm before each part, learned positions, tied embeddings and no dropout.

    From int32[batch, length] to float32 logits[batch, length, characters] of the next character after each.

    Attributes:
      characters: size of the alphabet.
      context: greatest length.
      width: features.
      layers: of attention and two dense layers each.
      heads: of attention.
    """

    characters: int
    context: int
    width: int = 96
    layers: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, numbers: jax.Array) -> jax.Array:
        embed = nn.Embed(self.characters, self.width, embedding_init=nn.initializers.normal(0.02))
        positions = self.param("positions", nn.initializers.normal(0.02), (self.context, self.width))
        x = embed(numbers) + positions[: numbers.shape[1]]
        for _ in range(self.layers):
            x = x + self.attention(nn.LayerNorm()(x))
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return embed.attend(nn.LayerNorm()(x))

    def attention(self, x: jax.Array) -> jax.Array:
        """Causal self-attention."""
        batch, length, _ = x.shape
        parts = nn.Dense(3 * self.width)(x).reshape(batch, length, 3, self.heads, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
        return nn.Dense(self.width)(mixed.reshape(x.shape))


CIFAR = {
    "cnn": lambda width, classes: Cnn(classes, width or 32),
    "vgg": lambda width, classes: Vgg(classes, width or 64),
    "resnet20": lambda width, classes: ResNet((3, 3, 3), classes=classes, width=width or 16),
    "resnet18": lambda width, classes: ResNet((2, 2, 2, 2), classes=classes, width=width or 64),
}
IMAGENET = {
    "resnet50": partial(ResNet, (3, 4, 6, 3), Bottleneck, width=64, stem="imagenet"),
    "resnet6": partial(ResNet, (1, 1), Basic, width=8, stem="imagenet"),  # to try the script
}
