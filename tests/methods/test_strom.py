"""strom_compress: the words of the sign code by hand. test_variance.py also tests it with a changing threshold."""

import jax.numpy as jnp
import optax
from rows import Row
from variance_oracle import VarianceOracle

import gcjax
from gcjax._sparse import value_codes


def row(name, capacity, transport="all_gather", bucket_invariant=False, rare=False):
    threshold = 0.5

    def make(axis_name=None, **more):
        settings = {"capacity": capacity, "transport": transport, "axis_name": axis_name}
        return gcjax.strom_compress(threshold, **(settings | more))

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
    row("owners", (64,), transport="reduce_scatter", rare=True),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.strom_compress(8.0, capacity=288, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"strom_compress": chain}


def test_sign_words_by_hand():
    code = value_codes.sign_code(0.25)
    words = code.encode(jnp.array([3.0, -0.3, -9.0]), jnp.array([5, 2**31 - 1, 0]), None, None)
    assert [hex(w) for w in words.tolist()] == ["0x5", "0xffffffff", "0x80000000"]
    index, y = code.decode(words, None)
    assert index.tolist() == [5, 2**31 - 1, 0]
    assert y.tolist() == [0.25, -0.25, -0.25]
