"""ef_sign_compress: its rows, the oracle and the recommended chain."""

import numpy as np
import optax
from codec_oracle import CodecOracle
from oracle import F

import gcjax
from rows import Row


def code(leaves, places, words):
    del places, words
    scales = [F(np.mean(np.abs(a), dtype=np.float64)) for a in leaves]
    return [np.where(a < 0, -scale, scale) for a, scale in zip(leaves, scales, strict=True)]


def row(name, transport):
    def make(axis_name=None, **more):
        return gcjax.ef_sign_compress(transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return CodecOracle(workers, sizes, code, feedback=True, transport=transport)

    return Row(name, "ef_sign_compress", make, make_oracle, conserves=True, rtol=1e-5)


ROWS = [row("ef_sign", "all_gather"), row("ef_sign-owners", "two_phase")]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.ef_sign_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"ef_sign_compress": chain}
