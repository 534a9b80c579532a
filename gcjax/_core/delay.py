"""Stale updates, for experiments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gcjax._types import Array, PyTree
from gcjax._validation import check_integer


class DelayState(NamedTuple):
    """State of `delay`.

    Attributes:
      held: the last updates, a pytree like the parameters with leaves (steps, *shape).
      position: int32, where the oldest of them is.
    """

    held: PyTree
    position: Array


def delay(steps: int) -> optax.GradientTransformation:
    """Pass every update on `steps` steps later. The first `steps` updates are zero.

    A model of stale gradients with a fixed delay: what error feedback and asynchronous training do to single entries,
    done to all of them alike. Put it after a compressor or in a plain chain:
    `optax.chain(gcjax.delay(4), optax.sgd(0.1))`. Before a compressor, wrap it in `gcjax.local_transform`. It holds
    `steps` copies of the updates. An update that is not finite is delayed too, so put `optax.apply_if_finite` after it.

    Source: Wei Dai, Yi Zhou, Nanqing Dong, Hao Zhang, Eric Xing, "Toward Understanding the Impact of Staleness in
    Distributed Machine Learning", 2018, arXiv 1810.03264.

    Args:
      steps: updates to wait, 0 or more.

    Returns:
      A transform with state `DelayState`; `optax.identity()` for 0 steps.

    Raises:
      TypeError: `steps` is not an int.
      ValueError: `steps` is negative.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.delay(1)
    >>> first, state = tx.update(jnp.array([1.0]), tx.init(jnp.zeros(1)))
    >>> second, state = tx.update(jnp.array([2.0]), state)
    >>> print(first, second)
    [0.] [1.]
    """
    check_integer("steps", steps, 0)
    if steps == 0:
        return optax.identity()

    def init(params: PyTree) -> DelayState:
        held = jax.tree.map(lambda x: jnp.zeros((steps, *jnp.shape(x)), jnp.result_type(x)), params)
        return DelayState(held, jnp.int32(0))

    def update(updates: PyTree, state: DelayState, params: PyTree = None) -> tuple[PyTree, DelayState]:
        del params
        position = state.position
        late = jax.tree.map(lambda held, new: held[position].astype(new.dtype), state.held, updates)
        held = jax.tree.map(lambda held, new: held.at[position].set(new.astype(held.dtype)), state.held, updates)
        return late, DelayState(held, (position + 1) % steps)

    return optax.GradientTransformation(init, update)
