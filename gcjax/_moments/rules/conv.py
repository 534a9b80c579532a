"""Convolutions: strided, dilated, transposed, grouped and depthwise, in any number of spatial axes.

The weight gradient is itself a convolution: its output's spatial axes are the kernel's taps, its right operand's
spatial axes are the positions of the layer's output. Padding, dilation and stride are read from that equation.
Gathering the taps and contracting over positions in one matrix product (im2col) is what XLA's CPU backend runs fast
inside a loop; its own convolution there is about ten times slower.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._moments.per_sample import accumulator_dtype
from gcjax._moments.reduce import loop_moments, reduced, stacked_reader
from gcjax._moments.rules.dense import product


@dataclass(frozen=True, eq=False)
class Conv:
    """A `conv_general_dilated` that makes a kernel's gradient."""

    eqn: Any

    @property
    def rule(self) -> str:
        return "conv" if self.eqn.params["batch_group_count"] == 1 else "grouped conv"

    @property
    def operands(self):
        return tuple(self.eqn.invars)

    @property
    def positions(self) -> int:
        _, rhs_spec, _ = self.eqn.params["dimension_numbers"]
        return math.prod(self.eqn.invars[1].aval.shape[d] for d in rhs_spec[1:])

    def summed(self, read):
        lhs, rhs = (read(key) for key in self.eqn.invars)
        return self._product(self._features_first(lhs), rhs, self.eqn.params["preferred_element_type"])

    def moments(self, table, size):
        lhs, rhs = self.eqn.invars
        dtype = self.eqn.params["preferred_element_type"]
        if self.positions > 1:
            # Transposed once for all samples, and not in every step of the loop.
            value, is_batched = table[lhs]
            value = self._features_first(value if is_batched else value[None])
            table = {"lhs": (value if is_batched else value[0], is_batched), "rhs": table[rhs]}
            return loop_moments(lambda read: self._product(read("lhs"), read("rhs"), dtype), table, size)
        read = stacked_reader(table, size)
        wide = accumulator_dtype(self.eqn.outvars[0].aval.dtype)
        values = self._features_first(read(lhs)), read(rhs)
        squares = self._product(*(jnp.square(value.astype(wide)) for value in values), wide)
        return self._product(*values, dtype), squares

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)

    def _features_first(self, lhs):
        """`[N, ...]` in the equation's layout -> `[N, C, n, space]`: the positions last, where products are fastest."""
        return lhs.transpose(0, *(d + 1 for d in self.eqn.params["dimension_numbers"][0]))

    def _product(self, lhs, rhs, dtype):
        """Gradient summed over N, from lhs `[N, C, n, space]` and rhs `[N, ...]` in the equation's layout."""
        params = self.eqn.params
        _, rhs_spec, out_spec = ([d + 1 for d in spec] for spec in params["dimension_numbers"])
        groups = params["batch_group_count"]
        shape = self.eqn.outvars[0].aval.shape
        # lhs [N, taps, groups, C / groups, n, positions] and rhs with its features split in the same way.
        lhs = _split(self._taps(lhs), 2, groups)
        rhs = _split(rhs, rhs_spec[0], groups)
        lhs_axes = [0, *range(4, lhs.ndim)]
        rhs_axes = [d + (d > rhs_spec[0]) for d in (0, *rhs_spec[1:])]
        out = product(
            lhs, rhs, list(zip(lhs_axes, rhs_axes, strict=True)), [(2, rhs_spec[0])], params["precision"], dtype
        )
        out = jnp.moveaxis(out, 0, 2)
        out = out.reshape(*(shape[d - 1] for d in out_spec[2:]), -1, shape[out_spec[1] - 1])
        order = [d - 1 for d in (*out_spec[2:], out_spec[0], out_spec[1])]
        return out.transpose(np.argsort(order)).astype(dtype or self.eqn.outvars[0].aval.dtype)

    def _taps(self, lhs):
        """`[N, C, n, space]` -> `[N, taps, C, n, positions]`: for every kernel tap the inputs that it meets."""
        params = self.eqn.params
        _, rhs_spec, out_spec = params["dimension_numbers"]
        taps = [self.eqn.outvars[0].aval.shape[d] for d in out_spec[2:]]
        positions = [self.eqn.invars[1].aval.shape[d] for d in rhs_spec[2:]]
        padding = [(lo, hi, d - 1) for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)]
        lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0)] * 3 + padding)
        windows = list(zip(taps, positions, params["window_strides"], params["rhs_dilation"], strict=True))
        # One space axis after the other, the last one first: as fast as a slice for every tap, and quicker to compile.
        axis = lhs.ndim - 1
        for count, *window in reversed(windows):
            lhs = jnp.stack([_window(lhs, axis, tap, *window) for tap in range(count)], axis=1)
        return lhs.reshape(lhs.shape[0], -1, *lhs.shape[1 + len(taps) :])


def _window(lhs, axis, tap, positions, stride, step):
    """The inputs that a tap meets along one space axis."""
    first = tap * stride
    return jax.lax.slice_in_dim(lhs, first, first + (positions - 1) * step + 1, step, axis)


def _split(array, axis, groups):
    return array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])


def is_kernel_gradient(eqn) -> bool:
    """Whether the rule applies: the contracted axis is not grouped (it is under a forward batch_group_count)."""
    return eqn.params["feature_group_count"] == 1
