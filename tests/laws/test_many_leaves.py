"""A model of many leaves costs no more than they are worth."""

import jax
import jax.numpy as jnp

import gcjax


def instructions_of_update(leaves):
    tx = gcjax.variance_compress()
    tree = [jax.ShapeDtypeStruct((4096,), jnp.float32)] * leaves
    update = jax.jit(lambda g, s, state: tx.update(g, state, sum_grad_squared=s))
    return update.lower(tree, tree, jax.eval_shape(tx.init, tree)).compile().as_text().count(" = ")


def test_the_program_grows_in_proportion():
    """XLA once computed the flags and samples of all leaves again in the kernels of every leaf."""
    few, more, many = map(instructions_of_update, (4, 8, 16))
    assert many - more <= 2.2 * (more - few)
