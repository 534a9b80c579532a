"""From a sink's operands to its two sums, at the place where the operands live.

The backward pass of one sample is run under `jax.vmap`. A sink's equation is replaced there by a function whose
batching rule does not batch: it receives the operands of all samples and returns the sum and the sum of squares of the
gradient over samples, as unbatched values. So the sums are made inside scan bodies too, next to their operands.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from gcjax import _jax_compat
from gcjax._moments.per_sample import accumulator_dtype


def reduced(node, read, token):
    """(G, S) of a node: sums over all samples, though written inside the program of one sample.

    Args:
        node: has `operands`, `summed` and `moments`, see `_nodes`.
        read: operand -> its value for one sample.
        token: any value that differs between samples, so that the batching rule is called even if no operand does.

    Returns:
        G in the dtype of the gradient, S in the accumulator's dtype.
    """

    @custom_vmap
    def sink(token, values):
        del token
        table = {key: value[None] for key, value in zip(node.operands, values, strict=True)}
        gradient = node.summed(table.__getitem__)
        wide = gradient.astype(accumulator_dtype(gradient.dtype))
        return gradient, wide * wide

    @sink.def_vmap
    def sink_over_samples(size, is_batched, token, values):
        del token
        table = dict(zip(node.operands, zip(values, is_batched[1], strict=True), strict=True))
        return node.moments(table, size), (False, False)

    return sink(token, [read(key) for key in node.operands])


def stacked_reader(table, size):
    """Reader of operands as `[size, ...]`, those equal for all samples broadcast."""

    def read(key):
        value, is_batched = table[key]
        return value if is_batched else jnp.broadcast_to(value[None], (size, *value.shape))

    return read


def loop_moments(summed, table, size):
    """(G, S) by a loop over samples, one gradient alive at a time.

    Args:
        summed: `read -> gradient`, summed over the leading axis of what `read` gives.
        table: operand -> (value, whether it is stacked over samples).
        size: number of samples.
    """
    batched = {key: value for key, (value, is_batched) in table.items() if is_batched}
    keys = list(batched)

    def gradient(values):
        here = dict(zip(keys, values, strict=True))
        return summed(lambda key: (here[key] if key in here else table[key][0])[None])

    def step(total, values):
        g = gradient(values)
        wide = g.astype(accumulator_dtype(g.dtype))
        return (total[0] + wide, total[1] + wide * wide), None

    like = jax.eval_shape(gradient, [batched[key][0] for key in keys])
    dtype = accumulator_dtype(like.dtype)
    zeros = _jax_compat.zeros(like.shape, dtype, [value for value, _ in table.values()])
    (total, squares), _ = jax.lax.scan(step, (zeros, zeros), [batched[key] for key in keys], length=size)
    return total.astype(like.dtype), squares
