"""Convolutions: strided, dilated, transposed, grouped and depthwise, with any number of spatial axes.

The gradient of a kernel is itself a convolution. The spatial axes of its output are the kernel's taps, and the spatial
axes of its right operand are the positions of the layer's output. Padding, dilation and stride are read from that
equation. The rule gathers the taps and contracts over positions in one matrix product (im2col): inside a loop,
XLA's own convolution on CPU is about ten times slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._moments.jaxprs import aval
from gcjax._moments.rules.dense import Product, contracted_over
from gcjax._moments.rules.node import Reader, Sums, Table, loop_moments
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

    def moments(self, table: Table, size: int) -> Sums:
        if self.positions == 1:
            return super().moments(table, size)
        # Transposed once for all samples rather than in every step of the loop.
        (value, is_batched), rhs = (table[key] for key in self.operands)
        value = self._features_first(value if is_batched else value[None])
        table = {"lhs": (value if is_batched else value[0], is_batched), "rhs": rhs}
        dtype = self.eqn.params["preferred_element_type"]
        return loop_moments(lambda read: self.product(read("lhs"), read("rhs"), dtype), table, size)

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


def _split(array: Array, axis: int, groups: int) -> Array:
    return array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
