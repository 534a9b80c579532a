"""dense_compress: rounding and overflow of 16-bit values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from codec_oracle import CodecOracle
from harness import Runner
from oracle import F
from rows import Row

import gcjax


def row(dtype, transport="all_gather"):
    exact = dtype == "float32"
    options = {} if exact else {"transport": transport}

    def make(axis_name=None, **more):
        return gcjax.dense_compress(dtype, **options, axis_name=axis_name, **more)

    def code(leaves, places, words):
        del places, words
        return [x.astype(dtype).astype(F) for x in leaves]

    def make_oracle(workers, sizes):
        """Sums over three or more workers may round in another order, so float32 is compared with a tolerance."""
        return CodecOracle(workers, sizes, code, transport=transport, owners_keep=False)

    return Row(
        f"dense-{dtype}{'-owners' * (transport == 'two_phase')}",
        "dense_compress",
        make,
        make_oracle,
        conserves=exact,
        rtol=1e-6,
        bucket_invariant=True,
        wire=frozenset({"s32", "f32"} if exact else {"s32", "u16"}),
        dense_wire=exact,
        infinite_at=65504.0 if dtype == "float16" else float("inf"),
        rare=not exact,
    )


ROWS = [
    row("float32"),
    row("bfloat16", "all_gather"),
    row("float16", "all_gather"),
    row("float16", "two_phase"),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.dense_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"dense_compress": chain}


def test_float32_has_no_choice_of_transport():
    with pytest.raises(ValueError, match="transport='two_phase' needs a dtype of 16 bits"):
        gcjax.dense_compress(transport="two_phase")


@pytest.mark.parametrize("workers", [2, 8])
def test_16_bits_move_half_of_the_bytes_by_default(workers):
    runner = Runner(gcjax.dense_compress("bfloat16", axis_name="data"), {"w": np.zeros(1024, np.float32)}, workers)
    runner.step({"w": np.ones((workers, 1024), np.float32)})
    assert gcjax.info(runner.state).wire_ratio == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(("dtype", "at_1e5"), [("float16", np.inf), (jnp.bfloat16, 99840.0)])
def test_16_bit_values_are_rounded_to_nearest(dtype, at_1e5):
    g = jnp.array([1 + 2.0**-12, -0.1, 1e5])
    tx = gcjax.dense_compress(dtype)
    update, _ = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_array_equal(update, g.astype(dtype).astype(jnp.float32))
    assert update[2] == at_1e5
