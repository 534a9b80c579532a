"""qsgd_compress: its rows, the oracle and the recommended chain."""

import jax
import numpy as np
import optax
from codec_oracle import CodecOracle
from oracle import F, uniform

import gcjax
from rows import Row

KEY = jax.random.key(11)


def quantised(block, draws, levels):
    scale = F(np.abs(block).max())
    sent = np.zeros(len(block), F)
    for i, x in enumerate(block):
        if x != 0:
            position = F(levels) * (abs(x) / scale)
            level = np.floor(position)
            level += draws[i] < position - level
            sent[i] = np.copysign(scale * (level / F(levels)), x)
    return sent


def code_of(bits, bucket_size, nearest=False):
    def code(leaves, places, words):
        sent = [np.zeros(len(x), F) for x in leaves]
        for leaf, x in enumerate(leaves):
            block_of = np.arange(len(x)) % places.columns[leaf] // (bucket_size // 32)
            for k in range(block_of.max() + 1):
                block = np.flatnonzero(block_of == k)
                draws = uniform(words, places.positions[leaf][block])
                draws = np.full(len(block), 0.5) if nearest else draws
                sent[leaf][block] = quantised(x[block], draws, 2 ** (bits - 1) - 1)
        return sent

    return code


def row(name, bits, bucket_size, transport="all_gather", rare=False, **options):
    def make(axis_name=None, **more):
        return gcjax.qsgd_compress(
            bits, bucket_size, key=KEY, transport=transport, axis_name=axis_name, **options, **more
        )

    def make_oracle(workers, sizes):
        code, code_mean = code_of(bits, bucket_size), code_of(bits, bucket_size, nearest=True)
        return CodecOracle(workers, sizes, code, key=KEY, transport=transport, code_mean=code_mean)

    return Row(
        name, "qsgd_compress", make, make_oracle, rtol=1e-6, rare=rare, rounds_to_nearest=transport == "two_phase"
    )


ROWS = [
    row("qsgd-4", 4, 512),
    row("qsgd-3", 3, 64, rare=True),
    row("qsgd-3-owners", 3, 64, transport="two_phase", rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.qsgd_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"qsgd_compress": chain}
