"""Random keys from which all draws are equal, so that a loss of a batch can be compared with that of its samples."""

import jax
import jax.extend.random
import jax.numpy as jnp

from gcjax._types import Array


def _threefry(data: Array) -> Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _next_data(data: Array) -> Array:
    return jax.random.key_data(jax.random.fold_in(_threefry(data), 0))


def _equal_bits(data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    # Without the first bit, uniform numbers are below 1/2, and dropout of up to a half drops nothing.
    return jnp.broadcast_to(jax.random.bits(_threefry(data), (), f"uint{bit_width}") >> 1, shape)


_equal_draws = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
    split=lambda data, shape: jnp.broadcast_to(_next_data(data), (*shape, 2)),
    random_bits=_equal_bits,
    fold_in=lambda data, number: _next_data(data),
    name="gcjax_equal_draws",
    tag="gcjax_equal",
)


def key_of_equal_draws(key: Array) -> Array:
    """A key from which every draw is one number, repeated: the same for a batch as for each of its samples.

    The keys that it is split into are equal too, and so is whatever is folded into it.
    """
    return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl=_equal_draws)
