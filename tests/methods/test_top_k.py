"""top_k_compress: its message by hand. tests/laws and tests/kernels test the selection and the residual."""

import math

import jax.numpy as jnp
import pytest
from compact import entries
from harness import messages

import gcjax


def test_message_by_hand():
    g = {"a": jnp.array([1.0, -8.0, 0.5]), "b": jnp.array([0.0, 2.0])}  # leaf "b" is the second word
    (payload,), info = messages(gcjax.top_k_compress(0.5), g)
    assert len(payload) == 1 + 3 + 32  # the count; positions, 32 slots + 64 places; values
    assert payload[0] == 2
    assert entries(payload[1:], 2, 32, 64, 32) == [(1, 0xC1000000), (33, 0x40000000)]  # -8 and 2
    assert info.payload_bits == 32 + (2 * 5 + 4) + 2 * 32  # in 2 slots: 4 low bits, 63 >> 4 is 3
    assert info.entropy_bits == pytest.approx(32 + math.log2(64 * 63 / 2) + 2 * 32, rel=0.03)
