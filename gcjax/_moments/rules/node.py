"""The base of all nodes, the node that needs no rule, and sums over samples.

The backward pass of one sample runs under `jax.vmap`. There a node is a function whose batching rule does not batch: it
receives the operands of all samples, and returns the sum of the gradients and the sum of their squares, without an axis
of samples. So the sums can be made inside the body of a scan, next to the operands.
"""

import abc
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gcjax import _jax_compat
from gcjax._moments.jaxprs import Atom, JaxprEqn, Literal, Operand, variables
from gcjax._types import Array
from gcjax._xla import entries_once

Key = Hashable  # a `Var`, a `ScannedValue`, or a `combine.ScannedMoments`
Reader = Callable[[Any], Any]  # from a key to its value: an array, or the `Sums` of a `ScannedMoments`
Table = Mapping[Key, tuple[Array, bool]]  # from a key to (value, whether the value has a leading axis of samples)
Sums = tuple[Array, Array]  # over samples: of the gradient in its own dtype, of its square in `accumulator_dtype`


class Samples(NamedTuple):
    """The samples that `vmap` stacks.

    Attributes:
      each: any value of each sample; in the program of one sample, its own.
      groups: the number of groups in which a loop takes them; None: one by one.
    """

    each: Array
    groups: int | None


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

    @property
    def is_loop(self) -> bool:
        """Whether a loop over the samples makes its moments."""
        return True

    @abc.abstractmethod
    def gradient(self, read: Reader) -> Array:
        """The gradient, summed over the leading axis of the operands that `read` returns."""

    def moments(self, table: Table, size: int, groups: int | None) -> Sums:
        """The sums over `size` samples, from the operands of all samples; `groups`: of `Samples`."""
        return loop_moments(self.gradient, table, size, groups)

    def moments_under_vmap(self, read: Reader, samples: Samples) -> Sums:
        """The sums over all samples, though called in the program of one sample; `read` takes the keys in `needs`."""

        @custom_vmap
        def sums(each, values):
            del each
            table = {key: value[None] for key, value in zip(self.operands, values, strict=True)}
            gradient = self.gradient(table.__getitem__)
            return gradient, jnp.square(widened(gradient))

        @sums.def_vmap
        def sums_over_samples(size, is_batched, each, values):
            del each
            table: Table = dict(zip(self.operands, zip(values, is_batched[1], strict=True), strict=True))
            return self.moments(table, size, samples.groups), (False, False)

        # With a value of each sample, the rule is called even if no operand is batched.
        return sums(samples.each, [read(key) for key in self.operands])


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
    is_loop = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return () if isinstance(self.key, Literal) else (self.key,)

    def gradient(self, read: Reader) -> Array:
        # A literal is never inside a loop, where there would be several samples to sum over.
        return jnp.asarray(self.key.val) if isinstance(self.key, Literal) else jnp.sum(read(self.key), axis=0)

    def moments(self, table: Table, size: int, groups: int | None) -> Sums:
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


# Gradients that a step of a loop makes before it adds them up: to add each by itself takes three times the memory
# traffic. Of large gradients fewer, so that they take no more than these bytes.
UNROLLED, UNROLLED_BYTES = 8, 256 << 20


def at_once(like: Any) -> int:
    """The number of gradients, shaped like this, that a step of a loop makes."""
    return min(UNROLLED, max(1, UNROLLED_BYTES // max(1, 4 * like.size)))


def loop_moments(gradient: Callable[[Reader], Array], table: Table, size: int, groups: int | None) -> Sums:
    """The sums over `size` samples by a loop over their gradients; `gradient`: as `Node.gradient`.

    With fewer groups than samples, each gradient is that of one group, and the squares are an estimate: see
    `from_groups`. The samples are dealt to the groups in turn.
    """
    groups = size if groups is None else min(groups, size)
    part = size // groups
    keys = [key for key, (_, is_batched) in table.items() if is_batched]
    dealt = [table[key][0].reshape(part, groups, *table[key][0].shape[1:]) for key in keys]

    def group_gradient(dealt, number):
        # A static index: XLA then reads the operands where they are.
        here = {key: jax.lax.index_in_dim(x, number, 1, False) for key, x in zip(keys, dealt, strict=True)}

        def read(key):
            value = table[key][0]
            return here[key] if key in here else jnp.broadcast_to(value, (part, *value.shape))

        return gradient(read)

    def gradients_of(dealt, count):
        return [widened(group_gradient(dealt, number)) for number in range(count)]

    def for_samples(total, squares):
        return (total, from_groups(total, squares, size, part)) if part > 1 else (total, squares)

    like = jax.eval_shape(functools.partial(group_gradient, number=0), dealt)
    count = at_once(like)
    if groups <= count:
        total, squares = entries_once(lambda *x: for_samples(*_sums(*x)), *gradients_of(dealt, groups))
    else:
        steps, rest = divmod(groups, count)

        def step(sums, number):
            here = [jax.lax.dynamic_slice_in_dim(x, number * count, count, 1) for x in dealt]
            return jax.tree.map(jnp.add, sums, _sums(*gradients_of(here, count))), None

        zeros = _jax_compat.zeros(like.shape, accumulator_dtype(like.dtype), [value for value, _ in table.values()])
        (total, squares), _ = jax.lax.scan(step, (zeros, zeros), jnp.arange(steps))
        if rest:
            last = [jax.lax.slice_in_dim(x, groups - rest, groups, axis=1) for x in dealt]
            total, squares = jax.tree.map(jnp.add, (total, squares), _sums(*gradients_of(last, rest)))
        total, squares = for_samples(total, squares)
    return total.astype(like.dtype), squares


def _sums(*gradients: Array) -> Sums:
    return functools.reduce(jnp.add, gradients), functools.reduce(jnp.add, map(jnp.square, gradients))


def from_groups(total: Array, squares: Array, size: int, part: int) -> Array:
    """The sum of squares over `size` samples, estimated from that over groups of `part` samples each.

    Over all ways to split the samples into such groups, the squares of the groups' gradients add up to
    `(1 - q) S + q G^2` on average: S is the sum over samples, G the gradient, and `q = (part - 1) / (size - 1)` the
    chance that two samples are in one group. What this is solved for is unbiased. It is at least `G^2 / size`, as S is.
    """
    square = total * total
    q = (part - 1) / (size - 1)
    return jnp.maximum((squares - q * square) / (1 - q), square / size)


def stacked_moments(gradients: Array) -> Sums:
    """Sum over axis 0 and sum of squares over axis 0, both in `accumulator_dtype`."""
    wide = widened(gradients)
    return jnp.sum(wide, axis=0), jnp.sum(wide * wide, axis=0)
