"""ef_sign_compress: its rows, the oracle and the recommended chain."""

import functools

import numpy as np
from codec_oracle import CodecOracle
from oracle import F

import gcjax
from rows import Row, before_sgd, made_by


def code(leaves, places, words):
    del places, words
    scales = [F(np.mean(np.abs(a), dtype=np.float64)) for a in leaves]
    return [np.where(a < 0, -scale, scale) for a, scale in zip(leaves, scales, strict=True)]


def row(name, transport):
    oracle = functools.partial(CodecOracle, code=code, feedback=True, transport=transport)
    make = made_by(gcjax.ef_sign_compress, transport=transport)
    return Row(name, "ef_sign_compress", make, oracle, conserves=True, rtol=1e-5)


ROWS = [row("ef_sign", "all_gather"), row("ef_sign-owners", "two_phase")]
CHAINS = {"ef_sign_compress": before_sgd(gcjax.ef_sign_compress)}
