import jax
import numpy as np
import pytest
from moments_cases import CASES, SIZE, assert_close, quick_jit

from gcjax import value_and_moments


def reference(loss, params, batch):
    """Per-sample gradients by plain vmap of jax.grad: shares nothing with the package."""
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))
    return jax.tree.map(lambda g: ((g / SIZE) ** 2).sum(0), grads)


@pytest.mark.parametrize("name", CASES)
def test_sinks_equal_vmap_of_grad_in_float64(name):
    with jax.enable_x64(True):
        loss, params, batch = CASES[name]()

        @quick_jit
        def all_of(params, batch):
            ours = value_and_moments(loss, method="sinks")(params, batch)
            return ours, jax.value_and_grad(loss)(params, batch), reference(loss, params, batch)

        (value, moments), (expected, grad), squares = all_of(params, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)
