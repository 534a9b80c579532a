"""Methods from outside, as rows for the laws: the one that docs/extend.md writes, and some of `leaf_codec`."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from rows import Row

import gcjax.extend as gx

TEXT = (pathlib.Path(__file__).parents[2] / "docs/extend.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SOURCE = next(block for block in BLOCKS if "def scaled_sign_compress" in block)
NAMES: dict = {}
exec(compile(SOURCE, "extend.md", "exec"), NAMES)


def make(axis_name=None, **more):
    return NAMES["scaled_sign_compress"](axis_name=axis_name, **more)


def largest(x, key):
    """The largest tenth of a leaf: values in float32, and their places."""
    flat = x.reshape(-1)
    places = jax.lax.top_k(jnp.abs(flat), -(-flat.size // 10))[1].astype(jnp.int32)
    return {"values": flat[places], "places": places}


def from_largest(arrays, shape):
    flat = jnp.zeros(int(np.prod(shape))).at[arrays["places"]].set(arrays["values"])
    return flat.reshape(shape)


class LargestOracle:
    def __init__(self, workers, sizes):
        self.left = [[np.zeros(size, np.float32) for size in sizes] for _ in range(workers)]

    def step(self, gradients, squares):
        sent = []
        for left, leaves in zip(self.left, gradients, strict=True):
            sent.append([])
            for i, g in enumerate(leaves):
                x = left[i] + g
                kept = np.argsort(-np.abs(x), kind="stable")[: -(-x.size // 10)]
                y = np.zeros_like(x)
                y[kept] = x[kept]
                left[i] = x - y
                sent[-1].append(y)
        mean = [sum((x / np.float32(len(sent)) for x in leaf), np.float32(0)) for leaf in zip(*sent, strict=True)]
        entries = sum(map(len, mean))
        return mean, np.array([[entries, entries, 0, 0]] * len(sent))


def signs(x, key):
    """A bool for each entry, a bfloat16 for the leaf, and an int8 beside it: all widths in one message."""
    return x < 0, jnp.mean(jnp.abs(x)).astype(jnp.bfloat16), jnp.full(3, 1, jnp.int8)


def from_signs(arrays, shape):
    negative, scale, one = arrays
    return jnp.where(negative, -1.0, 1.0) * scale.astype(jnp.float32) * one[0]


def rounded(x, key):
    """Each entry to one of the neighbouring multiples of a fixed step, at random: unbiased."""
    unit = 2.0**-6
    return jnp.floor(x / unit + jax.random.uniform(key, x.shape)).astype(jnp.int16)


def leaf_row(name, compress, decompress, **options):
    row = {key: options.pop(key) for key in ("conserves", "oracle") if key in options}

    def make(axis_name=None, **more):
        return gx.compress(gx.leaf_codec(compress, decompress, **options), axis_name=axis_name, **more)

    return Row(f"leaf-{name}", f"leaf_{name}", make, row.pop("oracle", None), **row)


ROWS = [
    Row("scaled_sign", "scaled_sign_compress", make, None, conserves=True),
    leaf_row("largest", largest, from_largest, conserves=True, oracle=LargestOracle),
    leaf_row("signs", signs, from_signs, conserves=True),
    leaf_row(
        "rounded", rounded, lambda codes, shape: codes.astype(jnp.float32) / 64, feedback=False, key=jax.random.key(3)
    ),
]
