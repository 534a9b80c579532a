"""dense_compress: rounding and overflow of 16-bit values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import F
from rows import Row

import gcjax


class DenseOracle:
    """The plain mean. Sums over three or more workers may round in another order, so compare with a tolerance."""

    def __init__(self, workers, sizes, dtype="float32"):
        self.sizes, self.workers = sizes, workers
        self.round = (lambda x: x) if dtype == "float32" else lambda x: x.astype(dtype).astype(F)

    def step(self, gradients, squares):
        del squares
        entries = sum(self.sizes)
        mean = [np.mean([self.round(g[leaf]) for g in gradients], axis=0) for leaf in range(len(self.sizes))]
        return mean, [(entries, entries, 0, 0)] * self.workers


def row(dtype):
    def make(axis_name=None, **more):
        return gcjax.dense_compress(dtype, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return DenseOracle(workers, sizes, dtype)

    exact = dtype == "float32"
    return Row(
        f"dense-{dtype}",
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


ROWS = [row("float32"), row("bfloat16"), row("float16")]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.dense_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"dense_compress": chain}


@pytest.mark.parametrize(("dtype", "at_1e5"), [("float16", np.inf), (jnp.bfloat16, 99840.0)])
def test_16_bit_values_are_rounded_to_nearest(dtype, at_1e5):
    g = jnp.array([1 + 2.0**-12, -0.1, 1e5])
    tx = gcjax.dense_compress(dtype)
    update, _ = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_array_equal(update, g.astype(dtype).astype(jnp.float32))
    assert update[2] == at_1e5
