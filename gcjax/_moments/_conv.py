"""Convolutions: strided, dilated, transposed, grouped and depthwise, in any number of spatial axes.

The weight gradient is itself a convolution: its output's spatial axes are the kernel's taps, its right operand's
spatial axes are the positions of the layer's output. Padding, dilation and stride are read from that equation. Gathering
the taps and contracting over positions in one matrix product (im2col) is what XLA's CPU backend runs fast inside a loop.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gcjax._moments._naive import accumulator_dtype
from gcjax._moments._reduce import loop_moments, reduced, stacked_reader

MAX_TAPS = 256


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
        return self._product(lhs, rhs, self.eqn.params["preferred_element_type"])

    def moments(self, table, size):
        if self.positions > 1:
            return loop_moments(self, table, size)
        read = stacked_reader(table, size)
        dtype = accumulator_dtype(self.eqn.outvars[0].aval.dtype)
        squares = self._product(*(jnp.square(read(key).astype(dtype)) for key in self.eqn.invars), dtype)
        return self.summed(read), squares

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)

    def _product(self, lhs, rhs, dtype):
        params = self.eqn.params
        lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
        groups = params["batch_group_count"]
        lhs = self._taps(_features_first(lhs, lhs_spec))
        rhs = _features_first(rhs, rhs_spec)
        taps, channels, outputs = lhs.shape[0], lhs.shape[1], rhs.shape[0]
        lhs = lhs.reshape(taps, groups, channels // groups, -1)
        rhs = rhs.reshape(groups, outputs // groups, -1)
        if groups == 1:
            lhs, rhs = lhs.reshape(taps * channels, -1), rhs[0]
            out = jax.lax.dot_general(
                lhs, rhs, (((1,), (1,)), ((), ())), precision=_lhs_precision(params), preferred_element_type=dtype
            )
        else:
            lhs = jnp.swapaxes(lhs, 0, 1).reshape(groups, taps * (channels // groups), -1)
            out = jax.lax.dot_general(
                lhs, rhs, (((2,), (2,)), ((0,), (0,))), precision=_lhs_precision(params), preferred_element_type=dtype
            )
            out = out.reshape(groups, taps, channels // groups, -1).transpose(1, 2, 0, 3)
        shape = self.eqn.outvars[0].aval.shape
        out = out.reshape(*(shape[d] for d in out_spec[2:]), channels // groups, outputs)
        rank = len(out_spec)
        order = {axis: i for i, axis in enumerate([*out_spec[2:], out_spec[0], out_spec[1]])}
        return out.transpose([order[axis] for axis in range(rank)]).astype(dtype or self.eqn.outvars[0].aval.dtype)

    def _taps(self, lhs):
        """`[C, n, space]` -> `[taps, C, n, positions]`: for every kernel tap the inputs that it meets."""
        params = self.eqn.params
        _, rhs_spec, out_spec = params["dimension_numbers"]
        taps = [self.eqn.outvars[0].aval.shape[d] for d in out_spec[2:]]
        positions = [self.eqn.invars[1].aval.shape[d] for d in rhs_spec[2:]]
        spaces = [(lo, hi, d - 1) for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)]
        lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), (0, 0, 0), *spaces])
        slices = []
        for tap in itertools.product(*map(range, taps)):
            start = [t * s for t, s in zip(tap, params["window_strides"], strict=True)]
            stop = [a + (n - 1) * d + 1 for a, n, d in zip(start, positions, params["rhs_dilation"], strict=True)]
            part = jax.lax.slice(lhs, [0, 0, *start], [*lhs.shape[:2], *stop], [1, 1, *params["rhs_dilation"]])
            slices.append(part.reshape(*lhs.shape[:2], -1))
        return jnp.stack(slices)


def _features_first(array, spec):
    """`[N, ...]` in a convolution's layout -> `[features, N * summed, space]`.

    The layout's "batch" axis holds the features that the gradient keeps, its "feature" axis the ones it sums over.
    """
    array = array.transpose([spec[0] + 1, 0, *(d + 1 for d in spec[1:])])
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def _lhs_precision(params):
    return params["precision"]


def is_kernel_gradient(eqn) -> bool:
    """Whether the rule applies: few taps, and no grouping of the contracted axis."""
    _, _, out_spec = eqn.params["dimension_numbers"]
    taps = math.prod(eqn.outvars[0].aval.shape[d] for d in out_spec[2:])
    return eqn.params["feature_group_count"] == 1 and taps <= MAX_TAPS
