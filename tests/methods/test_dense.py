"""dense_compress: rounding and overflow of 16-bit values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner

import gcjax


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
