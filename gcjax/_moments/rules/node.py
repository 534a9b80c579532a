"""The base of all nodes, the node that needs no rule, and sums over samples.

The backward pass of one sample runs under `jax.vmap`. There a node is a function whose batching rule does not batch: it
receives the operands of all samples, and returns the sum of the gradients and the sum of their squares, without an axis
of samples. So the sums can be made inside the body of a scan, next to the operands.
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
from gcjax._moments.jaxprs import Atom, JaxprEqn, Literal, Operand, variables
from gcjax._types import Array

Key = Hashable  # a `Var`, a `ScannedValue`, or a `combine.ScannedMoments`
Reader = Callable[[Any], Any]  # from a key to its value: an array, or the `Sums` of a `ScannedMoments`
Table = Mapping[Key, tuple[Array, bool]]  # from a key to (value, whether the value has a leading axis of samples)
Sums = tuple[Array, Array]  # over samples: of the gradient in its own dtype, of its square in `accumulator_dtype`


@dataclass(frozen=True, eq=False, kw_only=True)
class Node(abc.ABC):
    """One step on the way from a gradient back to its sinks; a sink has no children."""

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
        """The gradient, summed over the leading axis of the operands that `read` returns."""

    def moments(self, table: Table, size: int) -> Sums:
        """The sums over `size` samples, from the operands of all samples."""
        return loop_moments(self.gradient, table, size)

    def moments_under_vmap(self, read: Reader, dummy: Array) -> Sums:
        """The sums over all samples, though called in the program of one sample.

        `read` takes the keys in `needs`. `dummy` is any value that vmap batches, so that the batching rule is called
        even if no operand is batched.
        """

        @custom_vmap
        def sums(dummy, values):
            del dummy
            table = {key: value[None] for key, value in zip(self.operands, values, strict=True)}
            gradient = self.gradient(table.__getitem__)
            return gradient, jnp.square(widened(gradient))

        @sums.def_vmap
        def sums_over_samples(size, is_batched, dummy, values):
            del dummy
            table: Table = dict(zip(self.operands, zip(values, is_batched[1], strict=True), strict=True))
            return self.moments(table, size), (False, False)

        return sums(dummy, [read(key) for key in self.operands])


@dataclass(frozen=True, eq=False)
class Sink(Node):
    """An equation that makes a weight's gradient."""

    eqn: JaxprEqn

    @property
    def operands(self) -> tuple[Operand, ...]:
        return variables(self.eqn.invars)


@dataclass(frozen=True, eq=False)
class PerSample(Node):
    """The gradient itself, or a part of it, cut where no rule goes further back: vmap stacks it over samples."""

    key: Atom  # the variable, or the literal zero that is the gradient of an unused scalar
    made_by: str = "input"  # name of the primitive at which the search stopped, below moves and scales, if any
    rule = "vmap"
    positions = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        return () if isinstance(self.key, Literal) else (self.key,)

    def gradient(self, read: Reader) -> Array:
        # A literal is never inside a loop, where there would be several samples to sum over.
        return jnp.asarray(self.key.val) if isinstance(self.key, Literal) else jnp.sum(read(self.key), axis=0)

    def moments(self, table: Table, size: int) -> Sums:
        if isinstance(self.key, Literal):
            value = jnp.asarray(self.key.val)
            return size * value, size * jnp.square(widened(value))
        dtype = table[self.key][0].dtype
        total, squares = stacked_moments(stacked_reader(table, size)(self.key))
        return total.astype(dtype), squares


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype in which squares are summed: float32, or the gradient's own if that is wider."""
    return np.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def widened(x: Array) -> Array:
    """x in its `accumulator_dtype`."""
    return x.astype(accumulator_dtype(x.dtype))


def stacked_reader(table: Table, size: int) -> Reader:
    """A reader of operands as `[size, ...]`; those equal for all samples are broadcast."""

    def read(key):
        value, is_batched = table[key]
        return value if is_batched else jnp.broadcast_to(value[None], (size, *value.shape))

    return read


def loop_moments(gradient: Callable[[Reader], Array], table: Table, size: int) -> Sums:
    """The sums over `size` samples by a loop that holds one gradient at a time; `gradient`: as `Node.gradient`."""
    batched = {key: value for key, (value, is_batched) in table.items() if is_batched}
    keys = list(batched)

    def sample_gradient(values):
        here = dict(zip(keys, values, strict=True))
        return gradient(lambda key: (here[key] if key in here else table[key][0])[None])

    def step(sums, values):
        wide = widened(sample_gradient(values))
        return (sums[0] + wide, sums[1] + wide * wide), None

    like = jax.eval_shape(sample_gradient, [batched[key][0] for key in keys])
    dtype = accumulator_dtype(like.dtype)
    zeros = _jax_compat.zeros(like.shape, dtype, [value for value, _ in table.values()])
    (total, squares), _ = jax.lax.scan(step, (zeros, zeros), [batched[key] for key in keys], length=size)
    return total.astype(like.dtype), squares


def stacked_moments(gradients: Array) -> Sums:
    """Sum over axis 0 and sum of squares over axis 0, both in `accumulator_dtype`."""
    wide = widened(gradients)
    return jnp.sum(wide, axis=0), jnp.sum(wide * wide, axis=0)
