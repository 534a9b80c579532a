"""strom_compress: the sign code and its words by hand. test_variance.py also tests it with a changing threshold."""

import jax.numpy as jnp
from harness import messages

import gcjax
from gcjax._sparse import value_codes


def test_sign_code_by_hand():
    code = value_codes.sign_code(0.25)
    signs = code.encode(jnp.array([3.0, -0.3, -9.0]), None)
    assert signs.tolist() == [0, 1, 1]
    assert code.decode(signs, None).tolist() == [0.25, -0.25, -0.25]


def test_words_by_hand():
    g = {"a": jnp.array([0.5, 2.0, -1.5]), "b": jnp.array([0.0, -3.0])}  # leaf "b" is the second word
    (payload,), info = messages(gcjax.contrib.strom_compress(1.0, capacity=32, wire="word"), g)
    assert [hex(w) for w in payload[:4]] == ["0x3", "0x1", "0x80000002", "0x80000021"]
    assert len(payload) == 1 + 32
    assert info.payload_bits == 32 * 4
