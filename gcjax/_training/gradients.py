"""Loss, gradient and squares of one worker's batch, as a whole or part by part."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gcjax._core.state import reads_squares
from gcjax._jax_compat import tracks_variation, varying_axes, zeros
from gcjax._moments.api import value_and_moments
from gcjax._moments.aux import Traced, whole_batch_aux
from gcjax._moments.problem import check_scalar_loss
from gcjax._training.frozen import merge_params
from gcjax._training.local import as_local
from gcjax._types import Array, PyTree


class BatchGradient(NamedTuple):
    """What one worker computes from its batch.

    Attributes:
      loss: float32, mean over the samples.
      gradient: a pytree like the parameters.
      squares: `sum_grad_squared`, a pytree like the parameters; None without moments.
      model_state: as the loss returned it; None if it has none.
      aux: as the loss returned it; None if it has none.
    """

    loss: Array
    gradient: PyTree
    squares: PyTree
    model_state: PyTree
    aux: PyTree


class Inputs(NamedTuple):
    """What a loss is computed from, beside the parameters that are trained.

    Attributes:
      batch: a pytree, split over the samples.
      key: random key or None. Under moments: one for each sample.
      model_state: a pytree, shared by the samples, or None.
      frozen: the other parameters, shared by the samples.
    """

    batch: PyTree
    key: Array | None = None
    model_state: PyTree = None
    frozen: PyTree = None


Moments = Callable[..., Any] | str | None  # the option of `make_train_step`


class Returned(NamedTuple):
    """What a loss returns beside itself, None where it does not."""

    model_state: PyTree
    aux: PyTree


Loss = Callable[[PyTree, Inputs], tuple[Array, Returned]]
GradientFn = Callable[[PyTree, Inputs], BatchGradient]  # both of the trained parameters


def uniform_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Loss:
    """`loss_fn` with the same arguments and results in every case, and with its results checked."""

    def loss(trained: PyTree, inputs: Inputs) -> tuple[Array, Returned]:
        options = {} if inputs.key is None else {"key": inputs.key}
        if inputs.model_state is not None:
            options["model_state"] = inputs.model_state
        try:
            out = loss_fn(merge_params(trained, inputs.frozen), inputs.batch, **options)
        except ValueError as error:
            if any(text in str(error) for text in _OF_LAYOUTS):
                raise ValueError(_LAYOUT.format(error)) from error
            raise
        parts = ["loss", *["model_state"] * (inputs.model_state is not None), *["aux"] * has_aux]
        if len(parts) == 1:
            out = (out,)
        if not isinstance(out, tuple) or len(out) != len(parts):
            raise TypeError(f"loss_fn must return ({', '.join(parts)}), got {_kind(out)}. {_RETURNS}")
        found = dict(zip(parts, out, strict=True))
        model_state = found.get("model_state")
        _check_loss_value(found["loss"])
        _check_model_state(inputs.model_state, model_state)
        return found["loss"], Returned(model_state, found.get("aux"))

    return loss


_OF_LAYOUTS = (  # in what JAX says of `with_sharding_constraint` and `reshard` where axes are manual
    "passed to with_sharding_constraint can only refer to Auto axes",
    "passed to reshard cannot contain axis names that are of type",
    "`manual_axis_type` field of ShapedArray should be of type `Manual`",
)
_LAYOUT = (
    "loss_fn lays an array out over the mesh (jax.lax.with_sharding_constraint or jax.reshard), but sees one worker's "
    "part, and in make_train_step one device's: leave the layout out, or use gcjax.compressed_value_and_grad, which "
    "leaves all axes but axis_name to JAX. There, give a layout along the other axes as a jax.P, not as a "
    "jax.NamedSharding. JAX says: {}"
)
_RETURNS = "It returns model_state if init got one, and aux with make_train_step(has_aux=True)"


def _kind(out: object) -> str:
    return f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"


def _check_loss_value(value: Any) -> None:
    if isinstance(value, tuple | list | dict):
        raise TypeError(f"loss_fn must return one scalar, got {_kind(value)}. {_RETURNS}")
    check_scalar_loss(value)


def _check_model_state(old: PyTree, new: PyTree) -> None:
    got, returned = (jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", t) for t in (old, new))
    if jax.tree.flatten(got) != jax.tree.flatten(returned):
        raise ValueError(f"loss_fn got a model_state of {got} and returned one of {returned}; they must agree")


def batch_gradient(loss: Loss, moments: Callable[..., Any] | None, has_aux: bool, axes: tuple[str, ...]) -> GradientFn:
    """The function from parameters and batch to a `BatchGradient`.

    Args:
      loss: of `uniform_loss`.
      moments: of `moments_for`.
      has_aux: see `make_train_step`.
      axes: of the workers.
    """

    def of_sample(trained: PyTree, inputs: tuple) -> Any:  # a batch of one sample, with one key
        batch, keys, model_state, frozen = inputs
        out = loss(trained, Inputs(batch, None if keys is None else keys[0], model_state, frozen))
        return out if has_aux or model_state is not None else out[0]

    def gradient(trained: PyTree, inputs: Inputs) -> BatchGradient:
        squares, rest = None, Returned(None, None)
        if moments is None:
            (value, rest), grad = jax.value_and_grad(loss, has_aux=True)(trained, inputs)
        else:
            batch, key, model_state, frozen = inputs
            keys = None if key is None else jax.random.split(key, jax.tree.leaves(batch)[0].shape[0])
            returns_more = has_aux or model_state is not None
            value_and_moments = moments(of_sample, has_aux=returns_more, in_axes=(0, 0, None, None))
            value, (grad, squares) = value_and_moments(trained, (batch, keys, model_state, frozen))
            if returns_more:
                value, rest = value
        _reject_averaged(value, axes)
        return BatchGradient(value.astype(jnp.float32), grad, squares, *rest)

    return gradient


def check_moments_option(moments: Any) -> None:
    """Raise TypeError for what `make_train_step(moments=...)` does not take."""
    if moments is None or moments == "auto":
        return
    try:
        inspect.signature(moments).bind(lambda params, batch: None, has_aux=True, in_axes=(0,))
    except TypeError:
        raise TypeError(
            "moments must be 'auto', gcjax.value_and_moments or a functools.partial of it, not called with a loss yet, "
            f"or None, got {moments!r}"
        ) from None


def moments_for(opt_state: PyTree, moments: Moments) -> Callable[..., Any] | None:
    """The function that computes gradient and squares, or None for the gradient alone.

    Args:
      opt_state: "auto" computes squares if a compressor whose state is in it reads them, with `groups="auto"`.
      moments: see `make_train_step`.
    """
    if not isinstance(moments, str):
        return moments
    return functools.partial(value_and_moments, groups="auto") if reads_squares(opt_state) else None


def options_of(moments: Callable[..., Any] | None) -> dict[str, Any]:
    """The options of a `functools.partial` of `value_and_moments`."""
    return getattr(moments, "keywords", {})


def _reject_averaged(loss: Array, axes: tuple[str, ...]) -> None:
    averaged = sorted(set(axes) - varying_axes(loss)) if tracks_variation(axes) else []
    if averaged:
        raise ValueError(
            f"the loss is equal on all workers along {averaged}: loss_fn averages or sums over them itself, and its "
            "gradient would not be the worker's own. Return the mean over the worker's own batch, without jax.lax.pmean"
        )


def accumulated(whole: GradientFn, parts: int, axes: tuple[str, ...], moments: Callable[..., Any] | None) -> GradientFn:
    """`whole` on `parts` equal parts of the batch, one after the other: what it returns for the whole batch.

    Args:
      whole: of `batch_gradient`.
      parts: their number.
      axes: of the workers.
      moments: that of `whole`.
    """
    if parts == 1:
        return whole
    count = 1 if options_of(moments).get("reduction") == "sum" else parts  # what sums over the parts are divided by

    def gradient(trained: PyTree, inputs: Inputs) -> BatchGradient:
        batch = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), inputs.batch)
        keys = None if inputs.key is None else jax.random.split(inputs.key, parts)
        shapes = jax.eval_shape(whole, trained, inputs._replace(batch=jax.tree.map(lambda x: x[0], batch)))

        def zeros_like(tree):
            return jax.tree.map(lambda s, p: zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32), p), tree, trained)

        def add(carry, part):
            sums, model_state = carry
            *new, model_state, aux = whole(trained, Inputs(part[0], part[1], model_state, inputs.frozen))
            return (jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, tuple(new)), model_state), aux

        squares = None if shapes.squares is None else zeros_like(shapes.squares)
        start = as_local(jnp.float32(0), axes), zeros_like(shapes.gradient), squares
        ((loss, grad, squares), model_state), aux = jax.lax.scan(add, (start, inputs.model_state), (batch, keys))
        grad = jax.tree.map(lambda g, s: (g / count).astype(s.dtype), grad, shapes.gradient)
        # In a mean each sample counts 1 / (parts * part size), so its square falls by parts**2.
        squares = jax.tree.map(lambda s: s / count**2, squares)
        traced = Traced(whole, trained, inputs)
        depend = _depend_on_parts(traced, inputs)
        aux = whole_batch_aux(aux, traced.shapes.aux, depend.aux, lambda: traced.values().aux)
        return BatchGradient(loss / count, grad, squares, model_state, aux)

    return gradient


def _depend_on_parts(traced: Traced, inputs: Inputs) -> BatchGradient:
    """Which results of a part depend on samples, its own or, through the model state, those of the parts before it."""
    marks = jax.tree.map(lambda _: True, inputs)._replace(frozen=False)
    of_state = jax.tree.map(lambda _: False, inputs.model_state)
    while True:
        found = traced.depends_on((False, marks._replace(model_state=of_state)))
        if jax.tree.leaves(found.model_state) == jax.tree.leaves(of_state):
            return found
        of_state = found.model_state
