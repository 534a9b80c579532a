"""Image networks in Flax. Images are float32[batch, height, width, 3]; the result is float32 logits[batch, classes].

`train` switches dropout and the batch statistics of BatchNorm on.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax.numpy as jnp


class Cnn(nn.Module):
    """Three strided convolutions with GroupNorm and a dense layer, for two CPU cores: 92,074 parameters at width 32."""

    classes: int = 10
    width: int = 32

    @nn.compact
    def __call__(self, x, train: bool):
        del train
        for features, size in ((self.width, 5), (2 * self.width, 3), (3 * self.width, 3)):
            x = nn.Conv(features, (size, size), strides=2)(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


class Vgg(nn.Module):
    """Thirteen convolutions with BatchNorm and dropout, two dense layers: the paper's kind of network for CIFAR-10.

    14,986,570 parameters at width 64. How much is dropped where is not in the paper; these are usual values.
    """

    classes: int = 10
    width: int = 64

    @nn.compact
    def __call__(self, x, train: bool):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        for blocks, times in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
            for last in [False] * (blocks - 1) + [True]:
                x = nn.relu(norm()(nn.Conv(times * self.width, (3, 3), use_bias=False)(x)))
                x = x if last else nn.Dropout(0.3, deterministic=not train)(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))
        x = nn.relu(norm()(nn.Dense(8 * self.width, use_bias=False)(x)))
        return nn.Dense(self.classes)(nn.Dropout(0.5, deterministic=not train)(x))


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    features: int
    stride: int
    norm: type
    conv: type

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), strides=self.stride)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions, the last four times as wide, and a shortcut."""

    features: int
    stride: int
    norm: type
    conv: type

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), strides=self.stride)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(4 * self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """He et al. 2016 (arXiv 1512.03385), with BatchNorm.

    stages: number of blocks in each. width: features of the first stage; each further one halves the image and doubles
    them. stem: "cifar" (3x3) or "imagenet" (7x7 with stride 2, max pooling). dtype: of the computation; parameters,
    statistics and logits stay float32.
    """

    stages: Sequence[int]
    block: type = Basic
    classes: int = 10
    width: int = 16
    stem: str = "cifar"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
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


CIFAR = {
    "cnn": lambda width, classes: Cnn(classes, width or 32),
    "vgg": lambda width, classes: Vgg(classes, width or 64),
    "resnet20": lambda width, classes: ResNet((3, 3, 3), classes=classes, width=width or 16),
    "resnet18": lambda width, classes: ResNet((2, 2, 2, 2), classes=classes, width=width or 64),
}
IMAGENET = {
    "resnet50": partial(ResNet, (3, 4, 6, 3), Bottleneck, width=64, stem="imagenet"),
    "resnet6": partial(ResNet, (1, 1), Basic, width=8, stem="imagenet"),  # to see that it runs
}
