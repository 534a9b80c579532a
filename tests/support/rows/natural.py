"""natural_compress: its rows, the oracle and the recommended chain."""

import jax
import numpy as np
import optax
from codec_oracle import CodecOracle
from oracle import F, floor_log2, hash_bits, nearest_power

import gcjax
from rows import Row

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
    def make(axis_name=None, **more):
        return gcjax.contrib.natural_compress(key=KEY, transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return CodecOracle(workers, sizes, code, key=KEY, transport=transport, code_mean=code_mean)

    return Row(name, "natural_compress", make, make_oracle, rare=rare)


ROWS = [row("natural", "all_gather"), row("natural-owners", "two_phase", rare=True)]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.natural_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"natural_compress": chain}
