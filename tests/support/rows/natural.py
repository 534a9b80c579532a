"""natural_compress: its rows, the oracle and the recommended chain."""

import functools

import jax
import numpy as np
from codec_oracle import CodecOracle
from oracle import F, floor_log2, hash_bits, nearest_power

import gcjax
from rows import Row, before_sgd, made_by

KEY = jax.random.key(13)


def code(leaves, places, words):
    sent = [np.zeros(len(x), F) for x in leaves]
    for leaf, x in enumerate(leaves):
        draws = (hash_bits(words, places.positions[leaf]) >> np.uint32(9)) * 2.0**-23
        for i in np.flatnonzero(x):
            power = 2.0 ** floor_log2(x[i])
            up = draws[i] >= 2 - abs(float(x[i])) / power  # as likely as the mantissa
            sent[leaf][i] = np.copysign(2 * power if up else power, x[i])
    return sent


def code_mean(leaves, places, words):
    """The nearest power of two."""
    del places, words
    return [np.array([np.copysign(2.0 ** nearest_power(t), t) if t else 0 for t in x], F) for x in leaves]


def row(name, transport, rare=False):
    oracle = functools.partial(CodecOracle, code=code, key=KEY, transport=transport, code_mean=code_mean)
    make = made_by(gcjax.contrib.natural_compress, key=KEY, transport=transport)
    return Row(name, "natural_compress", make, oracle, rare=rare)


ROWS = [row("natural", "all_gather"), row("natural-owners", "two_phase", rare=True)]
CHAINS = {"natural_compress": before_sgd(gcjax.contrib.natural_compress, key=KEY)}
