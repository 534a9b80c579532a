"""What each worker does with its own gradient, before the exchange."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import optax

from gcjax._comm.collectives import axis_tuple
from gcjax._core.chain import means_are_known
from gcjax._core.per_worker import WHOLE_NODE, PerWorker, stands_for_params
from gcjax._jax_compat import tracks_variation, vary, varying_axes
from gcjax._types import AxisNames, PyTree
from gcjax._validation import check_transform

Result = TypeVar("Result")


def local_gradients(grad_fn: Callable[..., Result], axis_name: AxisNames) -> Callable[..., Result]:
    """Make `grad_fn(params, ...)` return each worker's own gradient inside `shard_map`.

    Inside `shard_map`, `jax.grad` with respect to replicated parameters sums over the workers: the parameters count as
    one value that all workers use. This types them as varying over the axis first, so that nothing is summed. It does
    nothing in `pmap` and with `check_vma=False`, where JAX does not sum. `gcjax.value_and_moments` does not need it.

    Args:
      grad_fn: a function whose first argument is the parameters, for example `jax.value_and_grad(loss)`.
      axis_name: mesh axis or axes of the workers.

    Returns:
      A function with the signature of `grad_fn`.

    Example:
      >>> import gcjax, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> grad = gcjax.local_gradients(jax.grad(lambda w, x: jnp.mean(x * w)), axis_name="data")
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
      >>> per_worker = jax.shard_map(lambda w, x: grad(w, x)[None], mesh=mesh, **specs)
      >>> x = jax.device_put(jnp.array([2.0, 4.0]), jax.NamedSharding(mesh, P("data")))
      >>> print(jax.jit(per_worker)(jnp.float32(1.0), x))  # one gradient for each worker
      [3.]
    """
    axes = axis_tuple(axis_name)

    @functools.wraps(grad_fn)
    def local(params: PyTree, *args: Any, **kwargs: Any) -> Result:
        return grad_fn(as_local(params, axes), *args, **kwargs)

    return local


def as_local(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Type `tree` as each worker's own, so that autodiff does not sum its gradient over the axes."""
    return vary(tree, axes) if tracks_variation(axes) else tree


def local_transform(tx: optax.GradientTransformation, axis_name: AxisNames) -> optax.GradientTransformationExtraArgs:
    """`tx` with its state declared per worker, for a transform with state that stands before the compressor.

    Such a transform sees each worker's own gradient, so its state differs between workers, for example the momentum in
    `optax.chain(gcjax.local_transform(optax.trace(0.9), "data"), gcjax.variance_compress(axis_name="data"), ...)`.

    Args:
      tx: the transform.
      axis_name: mesh axis or axes of the workers.

    Returns:
      A transform with the same updates, whose state is a `PerWorker`.

    Raises:
      TypeError: `tx` is not a transform.

    Example:
      >>> import gcjax, jax.numpy as jnp
      >>> print(type(gcjax.local_transform(optax.trace(0.9), "data").init(jnp.ones(3))).__name__)
      PerWorker
    """
    check_transform("tx", tx)
    axes = axis_tuple(axis_name)
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        if stands_for_params(params):
            return WHOLE_NODE
        return PerWorker.pack(tx.init(params), axes + tuple(sorted(varying_axes(params) - set(axes))))

    def update(
        updates: PyTree, state: PerWorker, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PerWorker]:
        if means_are_known():  # the second half of an update, after the compressors
            return updates, state
        updates, new = tx.update(updates, state.unpack(), params, **extra_args)
        return updates, PerWorker.pack(new, state.axes)

    return optax.GradientTransformationExtraArgs(init, update)
