"""dense_compress: rounding and overflow of 16-bit values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gcjax


@pytest.mark.parametrize(("dtype", "at_1e5"), [("float16", np.inf), (jnp.bfloat16, 99840.0)])
def test_16_bit_values_are_rounded_to_nearest(dtype, at_1e5):
    g = jnp.array([1 + 2.0**-12, -0.1, 1e5])
    tx = gcjax.dense_compress(dtype)
    update, _ = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_array_equal(update, g.astype(dtype).astype(jnp.float32))
    assert update[2] == at_1e5
