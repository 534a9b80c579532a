"""strom_compress: the sign code and its words by hand. test_variance.py also tests it with a changing threshold."""

import jax.numpy as jnp
from compact import entries
from harness import messages

import gcjax
from gcjax._sparse import value_codes


def test_sign_code_by_hand():
    code = value_codes.sign_code(0.25)
    signs = code.encode(jnp.array([3.0, -0.3, -9.0]), None)
    assert signs.tolist() == [0, 1, 1]
    assert code.decode(signs, None).tolist() == [0.25, -0.25, -0.25]


def test_a_message_by_hand():
    g = {"a": jnp.array([0.5, 2.0, -1.5]), "b": jnp.array([0.0, -3.0])}  # leaf "b" is the second word
    (payload,), info = messages(gcjax.contrib.strom_compress(1.0, capacity=32), g)
    assert payload[0] == 3
    assert entries(payload[1:], 3, 32, 64, 1) == [(1, 0), (2, 1), (33, 1)]
    assert info.payload_bits == 32 + (3 * 5 + 4) + 3  # 4 low bits, 63 >> 4 is 3
