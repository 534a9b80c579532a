"""BatchNorm of Flax models under `value_and_moments`: statistics over the whole batch, though samples run one by one.

Needs flax; no other module of gcjax imports it. Under `value_and_moments` a model sees one sample at a time. Its
BatchNorm must average its statistics over the sample axis; otherwise the gradient is silently wrong (see
`gcjax.check_moments`).
"""

import contextlib
from collections.abc import Iterator

from flax import linen, nnx


@contextlib.contextmanager
def sync_batchnorm(axis_name: str, *models: nnx.Module) -> Iterator[None]:
    """Make every BatchNorm that has no axis name of its own average its statistics over `axis_name`.

    Linen: works on any module applied inside the context. NNX: works on the models passed in, until the context ends.
    Inside a loss make them with `nnx.merge(graphdef, params, rest, copy=True)`: NNX forbids changing a module that was
    made outside the current trace. Layers with an axis name and layers that use running averages are left alone.
    Initialise models outside the context.

    Running statistics come out equal for all samples, so `has_aux` returns them as plain training would.

    Args:
      axis_name: the `sample_axis` of `value_and_moments`.
      *models: NNX modules.

    Raises:
      TypeError: a model is not an NNX module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from gcjax import value_and_moments
      >>> model = linen.BatchNorm(use_running_average=False)
      >>> x = jnp.array([[1.0], [3.0]])
      >>> variables = model.init(jax.random.key(0), x)
      >>> def loss_fn(params, batch):
      ...     with sync_batchnorm("batch"):
      ...         variables = {"params": params, "batch_stats": batch["stats"]}
      ...         out, updated = model.apply(variables, batch["x"], mutable=["batch_stats"])
      ...     return jnp.mean(out), updated["batch_stats"]
      >>> fn = value_and_moments(loss_fn, has_aux=True, sample_axis="batch", in_axes={"x": 0, "stats": None})
      >>> (loss, stats), moments = fn(variables["params"], {"x": x, "stats": variables["batch_stats"]})
      >>> print(moments.grad["scale"].round(3), moments.sum_grad_squared["scale"].round(3))
      [0.] [0.5]
    """

    def set_axis(next_fun, args, kwargs, context):
        module = context.module
        if isinstance(module, linen.BatchNorm) and module.axis_name is None:
            # A bound module is a clone made by apply, so the user's module stays as it is. It is a frozen dataclass.
            object.__setattr__(module, "axis_name", axis_name)
        return next_fun(*args, **kwargs)

    layers = [layer for model in models for layer in _batchnorms(model)]
    for layer in layers:
        layer.axis_name = axis_name
    try:
        with linen.intercept_methods(set_axis):
            yield
    finally:
        for layer in layers:
            layer.axis_name = None


def _batchnorms(model: nnx.Module) -> list[nnx.BatchNorm]:
    """The BatchNorm layers of a model that have no axis name."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"sync_batchnorm takes NNX modules, got {type(model).__name__}; do not pass linen modules")
    nodes = (node for _, node in nnx.iter_graph(model))
    return [node for node in nodes if isinstance(node, nnx.BatchNorm) and node.axis_name is None]
