"""The check, at the first step, that the loss is a mean over independent samples."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._jax_compat import without_mesh_types
from gcjax._moments.check import CURE
from gcjax._moments.precision import NOISE, coarsest_epsilon, nudged, signs
from gcjax._training.equal_draws import key_of_equal_draws
from gcjax._training.gradients import Inputs, Loss, options_of
from gcjax._types import Array, ArrayLike, PyTree

SAMPLES = 8  # of each worker, at most
TOLERANCE = 0.01  # relative, at the least: the order of summation changes less, the mistakes looked for more
# Of the loss, relative: a gradient that moves it by less is one of rounding errors, as that of saturated tanh units.
FLOOR = 1000 * float(jnp.finfo(jnp.float32).eps)
PRODUCTS = 4  # of each gradient with random signs: their mean square is that of the gradient, give or take 70 %
OFF = "make_train_step(checks=False) turns this check off."


class Sketch(NamedTuple):
    """What is kept of a gradient: little, so that the check needs no more memory than a step.

    Attributes:
      products: float32[leaves, PRODUCTS], with random signs.
      norm: float32[leaves].
      loss: float32[].
    """

    products: Array
    norm: Array
    loss: Array


def gradients_to_compare(loss: Loss, moments: Callable[..., Any] | None, trained: PyTree, inputs: Inputs) -> Array:
    """Compare gradients of some samples of one worker, as one batch and alone, for `check_comparison`.

    Without moments, where a loss may couple its samples, a batch is compared with itself repeated. Random numbers drawn
    from keys are the same for all samples here. Parameters that are all zero are given values: a last layer of zeros
    would hide whatever is before it.

    A gradient is the mean (or sum) if that of at least half of the parameters is, each with its own norm as the scale.
    The others may have no gradient but rounding errors (a bias before a normalisation), or be summed in 16 bits, one
    token after the other (a look-up table).

    Args:
      loss: of `uniform_loss`.
      moments: as in `make_train_step`.
      trained: the parameters.
      inputs: the worker's batch and the rest.

    Returns:
      float32[3]: whether the gradient of the batch is the mean of those of its parts, whether it is their sum (1 or 0),
      and its relative distance to the mean. The distance is NaN where there is nothing to compare.
    """
    inputs = jax.tree.map(_with_equal_draws, inputs)
    axis, size = options_of(moments).get("sample_axis"), jax.tree.leaves(inputs.batch)[0].shape[0]
    if moments is not None and (options_of(moments).get("microbatches") or size < 2):
        return jnp.full(3, jnp.nan)

    def compare(trained: PyTree, inputs: Inputs) -> Array:
        def value(trained, batch):
            return loss(trained, inputs._replace(batch=batch))[0].astype(jnp.float32)

        sketches = functools.partial(_sketches, value, axis)
        if moments is not None:
            parts = jax.tree.map(lambda x: x[:, None], _spread(inputs.batch, min(size, SAMPLES)))
            return _compare(sketches, trained, parts, _changed)
        few = _spread(inputs.batch, max(1, min(size, SAMPLES) // 2))
        return _compare(sketches, trained, jax.tree.map(lambda x: jnp.stack([x, x]), few))

    return compare(trained, inputs) if axis is None else without_mesh_types(compare, trained, inputs)


def check_comparison(found: np.ndarray, moments: Callable[..., Any] | None) -> None:
    """Raise ValueError if the gradients, float32[devices, 3], are not those of a mean (or sum) over the samples."""
    is_mean, is_sum, distance = found[:, 0] > 0, found[:, 1] > 0, found[:, 2]
    wants_sum = options_of(moments).get("reduction") == "sum"
    wrong = np.isfinite(distance) & ~(is_sum if wants_sum else is_mean)
    if moments is None:
        wrong &= is_sum
    if not wrong.any():
        return
    worst = int(np.argmax(wrong))
    if moments is None:
        seen = "the gradient of a batch doubles if the batch is repeated"
    else:
        seen = "the gradient of some samples as one batch differs from the mean of their own gradients"
        seen = f"{seen} by {100 * distance[worst]:.3g} %"
    if is_sum[worst]:
        cure = (
            "loss_fn sums over its samples, or divides by a constant, but must be their mean: use jnp.mean. For a sum, "
            "moments=functools.partial(gcjax.value_and_moments, reduction='sum') passes on its gradient."
        )
        raise ValueError(f"{seen}: {cure} {OFF}")
    raise ValueError(f"{seen}: loss_fn is not a mean over independent samples. {CURE} {OFF}")


def _sketches(value: Callable[[PyTree, PyTree], Array], axis: Any, trained: PyTree, groups: PyTree) -> Sketch:
    """Sketches, with an axis in front, of gradients that add up to that of the mean over the groups.

    Args:
      value: the loss of one group, of the parameters and the group.
      axis: None, or bound over the groups as under `value_and_moments`.
      trained: the parameters.
      groups: the groups, [groups, samples, ...].
    """
    count = jax.tree.leaves(groups)[0].shape[0]
    if axis is None:
        return jax.lax.map(
            lambda batch: _sketch(*jax.value_and_grad(lambda p: value(p, batch) / count)(trained)), groups
        )

    def mean(trained):
        return jnp.mean(jax.vmap(value, in_axes=(None, 0), axis_name=axis)(trained, groups))

    return jax.tree.map(lambda x: x[None], _sketch(*jax.value_and_grad(mean)(trained)))


def _sketch(loss: Array, grad: PyTree) -> Sketch:
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(grad)]
    products = [jnp.stack([jnp.sum(x * signs(x.shape, i)) for i in range(PRODUCTS)]) for x in leaves]
    return Sketch(jnp.stack(products), _norms(leaves), loss)


def _norms(leaves: Sequence[Array]) -> Array:
    return jnp.stack([jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))) for x in leaves])


def _compare(
    sketches: Callable[[PyTree, PyTree], Sketch],
    trained: PyTree,
    parts: PyTree,
    changed: Callable[[PyTree, ArrayLike], PyTree] | None = None,
) -> Array:
    """See `gradients_to_compare`.

    Args:
      sketches: from the parameters and groups.
      trained: the parameters.
      parts: the parts of the batch, [parts, samples, ...].
      changed: makes the parameters to compare with, and others that differ by rounding errors, from the amount of
        these; None for the parameters as they are.
    """
    count = jax.tree.leaves(parts)[0].shape[0]
    batch = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), parts)
    epsilon = coarsest_epsilon(jax.make_jaxpr(sketches)(trained, parts).jaxpr)

    def both(amount):
        own = changed(trained, amount) if changed else trained
        of_parts = sketches(own, parts)
        norm = jnp.sqrt(jnp.sum(jnp.square(of_parts.norm), axis=0))
        total = Sketch(jnp.sum(of_parts.products, axis=0), norm, jnp.sum(jnp.abs(of_parts.loss)))
        return total, jax.tree.map(lambda x: x[0], sketches(own, batch))

    # In one loop, in which the parameters are changed, so that no more than one copy of them exists.
    of_parts, of_batch = jax.lax.map(both, jnp.array([0, epsilon] if changed else [0], jnp.float32))
    (total, size, loss), (exact, norm, _) = (jax.tree.map(lambda x: x[0], found) for found in (of_parts, of_batch))
    slack = NOISE * jnp.maximum(_distance(total, of_parts.products[-1]), _distance(exact, of_batch.products[-1]))
    slack += (
        FLOOR
        * loss
        / jnp.maximum(_norms(jax.tree.leaves(jax.tree.map(_without_zeros, trained))), jnp.finfo(jnp.float32).tiny)
    )
    tolerance = max(TOLERANCE, epsilon**0.5)

    def agree(factor):
        # Gradients of samples may cancel. Their rounding errors do not, and are relative to their own size.
        sizes = jnp.maximum(norm, factor * size)
        return _distance(exact, factor * total) <= tolerance * sizes + slack

    known = jnp.maximum(norm, size) > 0
    is_mean, is_sum = (2 * jnp.sum(agree(factor) & known) >= jnp.sum(known) for factor in (1, count))
    distance = jnp.sum(_distance(exact, total)) / jnp.sum(jnp.where(known, jnp.maximum(norm, size), 0))
    return jnp.stack([is_mean.astype(jnp.float32), is_sum.astype(jnp.float32), distance])


def _distance(a: Array, b: Array) -> Array:
    """About the norm of the difference of two gradients, for each leaf, from their products."""
    return jnp.sqrt(jnp.mean(jnp.square(a - b), axis=-1))


def _spread(batch: PyTree, count: int) -> PyTree:
    """`count` samples, spread evenly over the batch."""
    return jax.tree.map(lambda x: x[np.linspace(0, x.shape[0] - 1, count).round().astype(int)], batch)


def _with_equal_draws(x: Array) -> Array:
    return key_of_equal_draws(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _changed(params: PyTree, amount: ArrayLike) -> PyTree:
    # Without the barrier XLA moves a copy of all parameters out of the loop.
    params, amount = jax.lax.optimization_barrier((params, amount))
    return nudged(jax.tree.map(_without_zeros, params), amount)


def _without_zeros(x: Array) -> Array:
    values = 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return jnp.where(jnp.any(x != 0), x, values.astype(x.dtype))
