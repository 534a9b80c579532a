"""The warning of a compressor that reads squares of per-sample gradients and gets none."""

import sys
import warnings

LIBRARIES = {"gcjax", "jax", "optax", "flax", "equinox"}  # between the user's code and the compressor


class MissingSquaresWarning(UserWarning):
    """A compressor such as `gcjax.variance_compress` got no `sum_grad_squared`. The message has the lines that pass it.

    The square of the batch's gradient then stands for the squares of its samples' gradients, as if the batch were one
    sample. That is another criterion than the paper's, and trains worse. It is issued while `update` is traced.

    >>> import gcjax, jax.numpy as jnp, warnings
    >>> tx = gcjax.variance_compress(alpha=1.5)
    >>> with warnings.catch_warnings(record=True, action="always") as found:
    ...     updates, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    >>> print(found[0].category.__name__)
    MissingSquaresWarning
    """


_TEXT = """a compressor reads the squares of per-sample gradients, but update got no sum_grad_squared. The square of \
the batch's gradient stands for them, as if the batch were one sample, and training is worse. Take both from one \
backward pass:
    loss, moments = gcjax.value_and_moments(loss_fn)(params, batch)
    updates, state = tx.update(moments.grad, state, params, sum_grad_squared=moments.sum_grad_squared)
gcjax.make_train_step and gcjax.compressed_value_and_grad do that by themselves: leave out moments=None. \
(For a batch of one sample, pass sum_grad_squared=jax.tree.map(jnp.square, grad).)"""


def warn_of_missing_squares() -> None:
    """Warn at the line of the user's code that leads here. Python shows a warning of one line once."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(_TEXT, MissingSquaresWarning, stacklevel=level)
