"""`check_moments`: is the loss really a mean (or sum) of independent samples?"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._moments.api import Moments, value_and_moments
from gcjax._moments.explain import explain_moments
from gcjax._moments.precision import NOISE, coarsest_epsilon, nudged
from gcjax._types import PyTree

CURE = (
    "The loss of the batch is not the mean (reduction='mean') or the sum (reduction='sum') of its samples' losses. "
    "BatchNorm: set sample_axis='batch' and pass the same axis name to the layer (gcjax.flax.sync_batchnorm does). "
    "Weighted or masked mean: divide the weights by their sum outside loss_fn and use reduction='sum'. "
    "Dropout: turn it off for this check, because its mask depends on the shape of the batch."
)

RULES = (
    "A rule of gcjax may be wrong for this parameter, or loss_fn may compute a sample otherwise under jax.vmap (random "
    "or impure operations, ties in an argmax): use method='vmap' or method='scan', which need no rules, and report the "
    "loss if it is deterministic."
)
# Last words of rules of parameters that `jax.grad` adds up exactly in 16 bits, too, if there are few positions.
EXACT = ("dense", "conv", "vmap", "scan")
COARSE = 1e-4  # machine epsilon from which on a dtype counts as coarse: 16 bits and fewer
UNSTEADY = 1 / 3  # relative change of the gradient by rounding errors from which on nothing can be compared


def check_moments(
    loss_fn: Callable[[PyTree, PyTree], Any], has_aux: bool = False, **keywords: Any
) -> Callable[..., None]:
    """Build a function that compares `value_and_moments` with plain autodiff, of the batch and of single samples.

    A loss that couples its samples (BatchNorm without an axis name, a mean over unmasked entries) gives a wrong
    gradient without any other sign. Call this once, outside jit, before training, with a small batch. docs/squares.md
    says how exact it is in 16 bits.

    Args:
      loss_fn: as in `value_and_moments`.
      has_aux: as in `value_and_moments`.
      **keywords: the other options of `value_and_moments`. The squares are compared as those of single samples, also
        where `groups` asks for an estimate.

    Returns:
      `check(params, batch, rtol=None) -> None`. `rtol` is relative to the largest gradient (of the batch, or of its
      samples where they cancel). The default is the square root of the coarsest machine epsilon in the gradient.

    Raises:
      ValueError: from `check`; loss, gradient or squares differ. The message names leaf, error and cure.
      TypeError: from `check`, called under jit, where values are not known.

    >>> check_moments(lambda w, x: jnp.mean(x @ w) ** 2)(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    Traceback (most recent call last):
    ...
    ValueError: the gradient of params differs from jax.grad of the batch loss by ...
    """

    def loss_and_size(params, batch):
        out = loss_fn(params, batch)
        value = out[0] if has_aux else out
        return value, jnp.abs(value)

    explain = explain_moments(loss_fn, has_aux, **keywords)
    keywords = {**keywords, "groups": None}
    # `jax.vmap` binds a sample axis, but cannot take every operation.
    method = "scan" if keywords.get("sample_axis") is None else "vmap"
    moments_fn = jax.jit(value_and_moments(loss_fn, has_aux, **keywords))
    # One group of the whole batch is the batch loss itself, with the sample axis bound to size 1.
    whole_fn = jax.jit(value_and_moments(loss_fn, has_aux, **{**keywords, "microbatches": 1, "method": method}))
    single_fn = jax.jit(value_and_moments(loss_and_size, True, **{**keywords, "method": method}))

    def check(params, batch, rtol=None):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, batch))):
            raise TypeError("check_moments compares values: call it outside jit, grad, vmap and shard_map")
        rows = explain(params, batch).rows
        with jax.default_matmul_precision("highest"):  # TPUs round factors to bfloat16, and squares of them otherwise
            epsilon = coarsest_epsilon(jax.make_jaxpr(whole_fn)(params, batch).jaxpr)
            value, moments = moments_fn(params, batch)
            expected, whole = whole_fn(params, batch)
            (_, size), single = single_fn(params, batch)
            other, changed = whole_fn(nudged(params, epsilon), batch)
        mean = max(1.5 * epsilon, 0.001) if rtol is None else rtol
        bounds = _Bounds(epsilon**0.5 if rtol is None else rtol, mean, epsilon > COARSE)
        sizes = np.maximum(_sizes(single), _norms(whole.grad))
        noise = _norms(jax.tree.map(_difference, changed.grad, whole.grad))
        if np.linalg.norm(noise) > UNSTEADY * np.linalg.norm(sizes):
            return
        _compare_whole(single.grad, whole.grad, sizes, NOISE * noise, bounds)
        exact = (row.rule.split()[-1] in EXACT and row.positions * epsilon <= 1 / 8 for row in rows)
        known = [is_exact or not bounds.coarse for is_exact in exact]
        roots = jax.tree.map(jnp.sqrt, single.sum_grad_squared)
        _compare_rules("the gradient of params", moments.grad, single.grad, roots, bounds, known)
        squares = moments.sum_grad_squared, single.sum_grad_squared
        _compare_rules("sum_grad_squared of params", *squares, squares[1], bounds, known)
        value, expected, other = (v[0] if has_aux else v for v in (value, expected, other))
        slack = bounds.rtol * max(abs(float(expected)), float(size)) + NOISE * abs(float(other) - float(expected))
        if not abs(float(value) - float(expected)) <= slack:
            raise ValueError(f"the loss is {value:.6g}, and {expected:.6g} for the whole batch. {CURE}")

    return check


class _Bounds(NamedTuple):
    """Bounds of relative errors."""

    rtol: float  # of single entries, and of norms
    mean: float  # of a leaf in the direction of its own gradient, in which rounding errors average out
    coarse: bool  # whether something is computed in a coarse dtype


def _compare_rules(name: str, got: PyTree, want: PyTree, sizes: PyTree, bounds: _Bounds, known: Sequence[bool]) -> None:
    """Raise ValueError unless the leaves `got` agree with `want`, those of single samples.

    `sizes` are entries where the samples' do not cancel; `known` says for each leaf whether `want` is exact enough.
    """
    wanted, scales = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (want, sizes))
    scales = [np.maximum(np.abs(x), scale) for x, scale in zip(wanted, scales, strict=True)]
    largest = max((float(np.max(scale, initial=0.0)) for scale in scales), default=0.0)
    norms = np.array([np.linalg.norm(scale) for scale in scales])
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), wanted, norms, known, strict=True)
    for (path, ours), like, theirs, norm, is_known in leaves:
        message = f"{name}{jax.tree_util.keystr(path)} differs from that of single samples by"
        if ours.dtype != like.dtype:
            raise ValueError(f"{message} its dtype, {ours.dtype} instead of {like.dtype}. {RULES}")
        if not is_known:
            continue
        difference = np.asarray(ours, np.float64) - theirs
        error = np.max(np.abs(difference), initial=0.0)
        # Written so that a NaN difference counts as disagreement.
        if not error <= bounds.rtol * largest:
            raise ValueError(
                f"{message} {error:.3g}, where the largest entry is {largest:.3g} (rtol {bounds.rtol:.3g}). {RULES}"
            )
        length = max(float(np.linalg.norm(theirs)), float(np.finfo(np.float64).tiny))
        along = abs(float(np.vdot(difference, theirs))) / length
        # Of a leaf without gradient, such as a bias before a normalisation, rounding errors are all there is.
        if not along <= bounds.mean * (norm + norms.max() / 8):
            raise ValueError(f"{message} a factor of {1 + np.vdot(difference, theirs) / length**2:.4g}. {RULES}")


def _compare_whole(got: PyTree, want: PyTree, sizes: np.ndarray, noise: np.ndarray, bounds: _Bounds) -> None:
    """Raise ValueError unless the summed and the batch gradient agree: all leaves, or half if something is coarse.

    `sizes` are the norms of the leaves, `noise` an absolute bound of each besides.
    """
    errors = _norms(jax.tree.map(_difference, got, want))
    allowed = np.sum(sizes > 0) / 2 if bounds.coarse else 0
    off = ~(errors <= bounds.rtol * (sizes if bounds.coarse else sizes.max(initial=0.0)) + noise)
    if off.sum() > allowed:
        worst = int(np.argmax(off * errors))
        path = jax.tree_util.tree_leaves_with_path(got)[worst][0]
        raise ValueError(
            f"the gradient of params{jax.tree_util.keystr(path)} differs from jax.grad of the batch loss by "
            f"{errors[worst]:.3g}, where its norm is {sizes[worst]:.3g} (rtol {bounds.rtol:.3g}). {CURE}"
        )


def _difference(a: Any, b: Any) -> np.ndarray:
    return np.asarray(a, np.float64) - np.asarray(b, np.float64)


def _norms(tree: PyTree) -> np.ndarray:
    return np.array([np.linalg.norm(np.ravel(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)])


def _sizes(single: Moments) -> np.ndarray:
    """The norm of each leaf's gradient, or of its samples' where they cancel."""
    squares = [float(np.sum(np.asarray(x, np.float64))) for x in jax.tree.leaves(single.sum_grad_squared)]
    return np.maximum(_norms(single.grad), np.sqrt(squares))
