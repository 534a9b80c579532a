"""What all nodes share, and how sums over samples are made next to the operands.

The backward pass of one sample runs under `jax.vmap`. There a node is a function whose batching rule does not batch: it
receives the operands of all samples, and returns the sum of the gradients and the sum of their squares, without an axis
of samples. So the sums can be made inside the body of a scan, where the operands are.
"""

import abc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gcjax import _jax_compat
from gcjax._moments.jaxprs import JaxprEqn, Operand, variables
from gcjax._types import Array

Key = Hashable  # a `Var`, a `ScannedValue`, or a `combine.ScannedMoments`
Reader = Callable[[Any], Any]  # from a key to its value: an array, or the `Sums` of a `ScannedMoments`
Table = Mapping[Key, tuple[Array, bool]]  # from a key to (value, whether the value has a leading axis of samples)
Sums = tuple[Array, Array]  # over samples: of the gradient in its own dtype, of its square in `accumulator_dtype`


@dataclass(frozen=True, eq=False, kw_only=True)
class Node(abc.ABC):
    """One step on the way from a gradient back to its sinks.

    Attributes:
      children: the nodes whose gradients this one transforms; none for a sink.
    """

    children: tuple["Node", ...] = ()

    @property
    def child(self) -> "Node":
        """The only child."""
        (child,) = self.children
        return child

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """The name that `explain_moments` shows."""

    @property
    def positions(self) -> int:
        """Contracted entries per sample (sequence positions, pixels)."""
        return max(child.positions for child in self.children)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Keys of the values that the gradient is made of."""
        return tuple(dict.fromkeys(key for child in self.children for key in child.operands))

    @property
    def needs(self) -> tuple[Key, ...]:
        """Keys that `moments_under_vmap` reads."""
        return self.operands

    @abc.abstractmethod
    def gradient(self, read: Reader) -> Array:
        """The gradient, summed over the leading axis of what `read` returns for the operands."""

    def moments(self, table: Table, size: int) -> Sums:
        """The sums over `size` samples, from the operands of all samples."""
        return loop_moments(self.gradient, table, size)

    def moments_under_vmap(self, read: Reader, dummy: Array) -> Sums:
        """The sums over all samples, though called in the program of one sample.

        Args:
          read: from the keys in `needs` to their values for one sample.
          dummy: any value that vmap batches, so that the batching rule is called even if no operand is batched.
        """

        @custom_vmap
        def sums(dummy, values):
            del dummy
            table = {key: value[None] for key, value in zip(self.operands, values, strict=True)}
            gradient = self.gradient(table.__getitem__)
            wide = gradient.astype(accumulator_dtype(gradient.dtype))
            return gradient, wide * wide

        @sums.def_vmap
        def sums_over_samples(size, is_batched, dummy, values):
            del dummy
            table: Table = dict(zip(self.operands, zip(values, is_batched[1], strict=True), strict=True))
            return self.moments(table, size), (False, False)

        return sums(dummy, [read(key) for key in self.operands])


@dataclass(frozen=True, eq=False)
class Sink(Node):
    """An equation that makes a weight's gradient.

    Attributes:
      eqn: the equation.
    """

    eqn: JaxprEqn

    @property
    def operands(self) -> tuple[Operand, ...]:
        return variables(self.eqn.invars)


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype in which squares are summed: float32, or the gradient's own if that is wider."""
    return np.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def stacked_reader(table: Table, size: int) -> Reader:
    """A reader of operands as `[size, ...]`; those equal for all samples are broadcast."""

    def read(key):
        value, is_batched = table[key]
        return value if is_batched else jnp.broadcast_to(value[None], (size, *value.shape))

    return read


def loop_moments(gradient: Callable[[Reader], Array], table: Table, size: int) -> Sums:
    """The sums over samples by a loop that holds one gradient at a time.

    Args:
      gradient: as `Node.gradient`.
      table: the operands.
      size: number of samples.
    """
    batched = {key: value for key, (value, is_batched) in table.items() if is_batched}
    keys = list(batched)

    def sample_gradient(values):
        here = dict(zip(keys, values, strict=True))
        return gradient(lambda key: (here[key] if key in here else table[key][0])[None])

    def step(sums, values):
        g = sample_gradient(values)
        wide = g.astype(accumulator_dtype(g.dtype))
        return (sums[0] + wide, sums[1] + wide * wide), None

    like = jax.eval_shape(sample_gradient, [batched[key][0] for key in keys])
    dtype = accumulator_dtype(like.dtype)
    zeros = _jax_compat.zeros(like.shape, dtype, [value for value, _ in table.values()])
    (total, squares), _ = jax.lax.scan(step, (zeros, zeros), [batched[key] for key in keys], length=size)
    return total.astype(like.dtype), squares
