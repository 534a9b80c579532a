"""Per-sample gradients by vmap, and the loop over chunks of samples that keeps any method within a byte budget.

`vmap(grad)` is exact for every loss, and slow on CPU, where XLA turns per-sample weight gradients into batched products
and grouped convolutions.
"""

import jax
import jax.numpy as jnp

from gcjax import _jax_compat


def accumulator_dtype(dtype):
    """The dtype in which squares are summed: float32, or the gradient's own when that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def square_sum(stacked):
    """Sum over axis 0 and sum of squares over axis 0, both in float32 or wider."""
    wide = stacked.astype(accumulator_dtype(stacked.dtype))
    return jnp.sum(wide, axis=0), jnp.sum(wide * wide, axis=0)


def vmap_moments(problem, mapped):
    """Moments of the groups in `mapped` from their gradients stacked by vmap.

    Returns:
        `((G, S), outputs)`: two pytrees like params in the accumulators' dtype, and `(value, aux)` of every group,
        stacked.
    """
    batched = jax.vmap(problem.gradient, in_axes=(None, 0, None), axis_name=problem.sample_axis)
    grads, outputs = batched(problem.params, mapped, problem.shared)
    leaves, tree = jax.tree.flatten(grads)
    pairs = [square_sum(leaf) for leaf in leaves]
    return tuple(tree.unflatten([pair[i] for pair in pairs]) for i in (0, 1)), outputs


def chunked(problem, part, chunk):
    """Run `part(mapped) -> (sums, outputs)` on `chunk` groups at a time; adds the sums, joins the outputs."""
    whole, rest = divmod(problem.groups, chunk)
    if whole == 1 and not rest:
        return part(problem.mapped)
    head = [a[: whole * chunk].reshape(whole, chunk, *a.shape[1:]) for a in problem.mapped]

    def step(total, mapped):
        sums, outputs = part(mapped)
        return jax.tree.map(jnp.add, total, sums), outputs

    def start(leaf):
        return _jax_compat.zeros(leaf.shape, accumulator_dtype(leaf.dtype), leaf)

    zeros = jax.tree.map(start, problem.params)
    total, outputs = jax.lax.scan(step, (zeros, zeros), head)
    outputs = jax.tree.map(lambda a: a.reshape(whole * chunk, *a.shape[2:]), outputs)
    if rest:
        sums, last = part([a[whole * chunk :] for a in problem.mapped])
        total = jax.tree.map(jnp.add, total, sums)
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, last)
    return total, outputs


def chunk_for(problem, bytes_per_group) -> int:
    """How many groups fit into max_bytes; with a sample axis all of them, for they must see each other."""
    if problem.sample_axis is not None:
        return problem.groups
    return max(1, min(problem.groups, problem.options.max_bytes // max(1, bytes_per_group)))


def gradient_bytes(problem) -> int:
    """Bytes of one group's gradient, in the accumulators' dtype."""
    return sum(leaf.size * accumulator_dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(problem.params))
