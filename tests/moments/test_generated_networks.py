"""The sinks against plain vmap of grad on small random networks."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moments_cases import SIZE, assert_close, draw

from gcjax import value_and_moments

WIDTH = 4


def dense(p, x):
    return x @ p["w"] + p["b"]


def tied(p, x):
    return jnp.tanh(x @ p["w"]) @ p["w"].T


def masked(p, x):
    return x @ jnp.where(draw(1, WIDTH, WIDTH) > 0, 2.0 * p["w"], 0.0)


def low_rank(p, x):
    return x @ (p["w"][:, :2] @ p["w"][:2])


def conv(p, x):
    kernel = p["w"].reshape(2, 2, WIDTH)
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
    )


def recurrent(p, x):
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x + p["b"])
        return h, h

    return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1], 0, 1)


def norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 0.1) * (1 + p["b"])


def attention(p, x):
    q, k = x @ p["w"], x * (1 + p["b"])
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ x


def mix_positions(p, x):
    return jnp.einsum("btd,de,t->bte", x, p["w"], jnp.arange(x.shape[1]) - 1.0)


def from_table(p, x):
    return p["w"][jnp.argmax(x, axis=-1)] + x


LAYERS = [dense, tied, masked, low_rank, conv, recurrent, norm, attention, mix_positions, from_table]
WRAPPERS = {"none": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}

layer_lists = st.lists(
    st.tuples(st.sampled_from(LAYERS), st.sampled_from(list(WRAPPERS)), st.booleans()), min_size=1, max_size=4
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layers=layer_lists, share=st.booleans(), length=st.integers(1, 3), method=st.sampled_from(["sinks", "auto"]))
def test_sinks_equal_vmap_of_grad_on_random_networks(layers, share, length, method):
    with jax.enable_x64(True):
        count = 1 if share else len(layers)
        params = [{"w": draw(3 + i, WIDTH, WIDTH), "b": draw(30 + i, WIDTH)} for i in range(count)]
        batch = {"x": draw(1, SIZE, length, WIDTH), "s": draw(2, SIZE)}

        def loss(params, batch):
            x = batch["x"]
            for i, (layer, wrapper, residual) in enumerate(layers):
                y = WRAPPERS[wrapper](layer)(params[i % count], x)
                x = x + y if residual else jnp.sin(y)
            return jnp.mean(batch["s"] * jnp.sum(jnp.square(x), axis=(1, 2)))

        @jax.jit
        def both(params, batch):
            _, moments = value_and_moments(loss, method=method, max_bytes=2000)(params, batch)
            grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))
            return moments, jax.tree.map(lambda g: ((g / SIZE).sum(0), ((g / SIZE) ** 2).sum(0)), grads)

        moments, pairs = both(params, batch)
        leaves = [pair for layer in pairs for pair in (layer["w"], layer["b"])]
        grads, squares = zip(*leaves, strict=True)
        got_grads = [leaf for layer in moments.grad for leaf in (layer["w"], layer["b"])]
        got_squares = [leaf for layer in moments.sum_grad_squared for leaf in (layer["w"], layer["b"])]
        assert_close(got_grads, list(grads))
        assert_close(got_squares, list(squares))
        assert all(np.all(np.asarray(s) >= 0) for s in got_squares)
