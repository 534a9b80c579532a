"""strom_compress: the sign code and its words by hand. test_variance.py also tests it with a changing threshold."""

import jax.numpy as jnp
import optax
from harness import messages
from rows import Row
from variance_oracle import VarianceOracle

import gcjax
from gcjax._sparse import value_codes


def row(name, capacity, transport="all_gather", wire="compact", bucket_invariant=False, rare=False):
    threshold = 0.5

    def make(axis_name=None, **more):
        settings = {"capacity": capacity, "transport": transport, "wire": wire, "axis_name": axis_name}
        return gcjax.contrib.strom_compress(threshold, **(settings | more))

    def make_oracle(workers, sizes):
        # The hybrid with a variance test that everything passes.
        return VarianceOracle(workers, sizes, capacity, transport, alpha=0.0, decay=1.0, threshold=threshold)

    return Row(
        f"strom-{name}",
        "strom_compress",
        make,
        make_oracle,
        conserves=True,
        capacities=capacity,
        transport=transport,
        bucket_invariant=bucket_invariant,
        rare=rare,
    )


ROWS = [
    row("capacities", (64, 160, 320, 416, 864), bucket_invariant=True),
    row("overflow", (64,), rare=True),
    row("owners", (64,), transport="two_phase", rare=True),
    row("words", (64, 864), wire="word", rare=True),
    row("owners-words", (64, 864), transport="two_phase", wire="word", rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.contrib.strom_compress(8.0, capacity=288, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"strom_compress": chain}


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
