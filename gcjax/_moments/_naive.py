"""The plain way: per-sample gradients by vmap, in chunks that fit a byte budget, under a scan.

Exact for every loss, and the reference for the sinks; slow on CPU, where XLA turns per-sample weight gradients into
batched products and convolutions inside a loop.
"""

import jax
import jax.numpy as jnp

from gcjax._moments import _compat


def accumulator_dtype(dtype):
    """The dtype in which squares are summed: float32, or the gradient's own when that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def square_sum(stacked):
    """Sum over axis 0 and sum of squares over axis 0, both in float32 or wider."""
    wide = stacked.astype(accumulator_dtype(stacked.dtype))
    return jnp.sum(wide, axis=0), jnp.sum(wide * wide, axis=0)


def chunked_moments(problem, chunk):
    """Moments from `vmap(grad)` over `chunk` groups at a time.

    Returns:
        `((grad, squares), outputs)`: two pytrees like params, in the accumulators' dtype, and the stacked
        `(value, aux)` of all groups.
    """
    batched = jax.vmap(problem.gradient, in_axes=(None, 0, None), axis_name=problem.sample_axis)

    def part(mapped):
        grads, outputs = batched(problem.params, mapped, problem.shared)
        pairs = jax.tree.map(square_sum, grads)
        return jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0)), pairs), outputs

    whole, rest = divmod(problem.groups, chunk)
    if whole == 1 and not rest:
        return part(problem.mapped)
    head = [a[: whole * chunk].reshape(whole, chunk, *a.shape[1:]) for a in problem.mapped]

    def step(total, mapped):
        sums, outputs = part(mapped)
        return jax.tree.map(jnp.add, total, sums), outputs

    def start(leaf):
        return _compat.zeros(leaf.shape, accumulator_dtype(leaf.dtype), leaf)

    zeros = jax.tree.map(start, problem.params)
    total, outputs = jax.lax.scan(step, (zeros, zeros), head)
    outputs = jax.tree.map(lambda a: a.reshape(whole * chunk, *a.shape[2:]), outputs)
    if rest:
        sums, last = part([a[whole * chunk :] for a in problem.mapped])
        total = jax.tree.map(jnp.add, total, sums)
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, last)
    return total, outputs


def chunk_size(problem) -> int:
    """How many groups' gradients fit into max_bytes; with a sample axis all of them, for they must see each other."""
    if problem.sample_axis is not None:
        return problem.groups
    per_group = sum(leaf.size * accumulator_dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(problem.params))
    return max(1, min(problem.groups, problem.options.max_bytes // max(1, per_group)))
