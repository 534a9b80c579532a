"""Convolutions: strided, dilated, transposed, grouped and depthwise, with any number of spatial axes.

The gradient of a kernel is itself a convolution. The spatial axes of its output are the kernel's taps, and the spatial
axes of its right operand are the positions of the layer's output. Padding, dilation and stride are read from that
equation. Samples are added up by making them features over which the convolution contracts anyway.

XLA's convolution on CPU is ten times slower inside a loop than outside. There the rule gathers the taps and contracts
over positions in one matrix product (im2col).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gcjax import _jax_compat
from gcjax._moments.jaxprs import aval
from gcjax._moments.rules.dense import Product, contracted_over
from gcjax._moments.rules.node import Reader, Sums, Table, at_once, loop_moments
from gcjax._types import Array


@dataclass(frozen=True, eq=False)
class Conv(Product):
    """A `conv_general_dilated` that makes a kernel's gradient."""

    @property
    def rule(self) -> str:
        return "conv" if self.eqn.params["batch_group_count"] == 1 else "grouped conv"

    @property
    def positions(self) -> int:
        _, rhs_spec, _ = self.eqn.params["dimension_numbers"]
        return math.prod(aval(self.eqn.invars[1]).shape[d] for d in rhs_spec[1:])

    def prepared(self, read: Reader) -> tuple[Array, Array]:
        lhs, rhs = map(read, self.operands)
        return self._features_first(lhs), rhs

    def moments(self, table: Table, size: int, groups: int | None) -> Sums:
        if not self.is_loop:
            return super().moments(table, size, groups)
        steps = size if groups is None else min(groups, size)
        batched = tuple(is_batched for _, is_batched in (table[key] for key in self.operands))

        def loop(gradient: Callable[[Array, Array], Array], *operands: Array) -> Sums:
            sides: Table = dict(zip(("lhs", "rhs"), zip(operands, batched, strict=True), strict=True))
            return loop_moments(lambda read: gradient(read("lhs"), read("rhs")), sides, size, groups)

        def by_products(lhs: Array, rhs: Array) -> Sums:
            # Transposed once for all samples rather than in every step of the loop.
            lhs = self._features_first(lhs) if batched[0] else self._features_first(lhs[None])[0]
            dtype = self.eqn.params["preferred_element_type"]
            return loop(lambda lhs, rhs: self.product(lhs, rhs, dtype), lhs, rhs)

        by_convolutions = functools.partial(loop, self._convolution)
        operands = [table[key][0] for key in self.operands]
        if steps <= at_once(aval(self.eqn.outvars[0])):
            return by_convolutions(*operands)
        return jax.lax.platform_dependent(*operands, cpu=by_products, default=by_convolutions)

    def _convolution(self, lhs: Array, rhs: Array) -> Array:
        """The gradient summed over the leading axis of both operands, behind which is the equation's layout."""
        lhs_spec, rhs_spec, _ = self.eqn.params["dimension_numbers"]
        return _jax_compat.bind(self.eqn, [_merged(lhs, lhs_spec[1]), _merged(rhs, rhs_spec[1])])[0]

    def _features_first(self, lhs: Array) -> Array:
        """`[N, ...]` in the equation's layout -> `[N, C, n, space]`: the positions last, where products are fastest."""
        return lhs.transpose(0, *(d + 1 for d in self.eqn.params["dimension_numbers"][0]))

    def product(self, lhs: Array, rhs: Array, dtype: jax.typing.DTypeLike | None) -> Array:
        """The gradient summed over N, from lhs `[N, C, n, space]` and rhs `[N, ...]` in the equation's layout."""
        params = self.eqn.params
        _, rhs_spec, out_spec = ([d + 1 for d in spec] for spec in params["dimension_numbers"])
        groups, out = params["batch_group_count"], aval(self.eqn.outvars[0])
        # lhs becomes [N, taps, groups, C / groups, n, positions]; the features of rhs are split in the same way.
        lhs = _split(self._taps(lhs), 2, groups)
        rhs = _split(rhs, rhs_spec[0], groups)
        lhs_axes = [0, *range(4, lhs.ndim)]
        rhs_axes = [d + (d > rhs_spec[0]) for d in (0, *rhs_spec[1:])]
        contract = list(zip(lhs_axes, rhs_axes, strict=True))
        gradient = contracted_over(lhs, rhs, contract, [(2, rhs_spec[0])], params["precision"], dtype)
        gradient = jnp.moveaxis(gradient, 0, 2)
        gradient = gradient.reshape(*(out.shape[d - 1] for d in out_spec[2:]), -1, out.shape[out_spec[1] - 1])
        order = [d - 1 for d in (*out_spec[2:], out_spec[0], out_spec[1])]
        return gradient.transpose(np.argsort(order)).astype(dtype or out.dtype)

    def _taps(self, lhs: Array) -> Array:
        """`[N, C, n, space]` -> `[N, taps, C, n, positions]`: for each tap of the kernel, the inputs that it meets."""
        params = self.eqn.params
        _, rhs_spec, out_spec = params["dimension_numbers"]
        taps = [aval(self.eqn.outvars[0]).shape[d] for d in out_spec[2:]]
        positions = [aval(self.eqn.invars[1]).shape[d] for d in rhs_spec[2:]]
        padding = [(lo, hi, d - 1) for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)]
        lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0)] * 3 + padding)
        windows = list(zip(taps, positions, params["window_strides"], params["rhs_dilation"], strict=True))
        # One spatial axis after another, the last one first: as fast as one slice per tap, and quicker to compile.
        axis = lhs.ndim - 1
        for count, *window in reversed(windows):
            lhs = jnp.stack([_window(lhs, axis, tap, window) for tap in range(count)], axis=1)
        return lhs.reshape(lhs.shape[0], -1, *lhs.shape[1 + len(taps) :])


def _window(lhs: Array, axis: int, tap: int, window: Sequence[int]) -> Array:
    """The inputs that a tap meets along one spatial axis; window: (positions, distance of taps, of positions)."""
    positions, stride, step = window
    first = tap * stride
    return jax.lax.slice_in_dim(lhs, first, first + (positions - 1) * step + 1, step, axis)


def _merged(array: Array, axis: int) -> Array:
    """Make the leading axis part of another one, whose number is that without the leading one."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def _split(array: Array, axis: int, groups: int) -> Array:
    return array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
