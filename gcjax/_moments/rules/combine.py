"""Nodes that combine others: several uses of one parameter, and stacked layers and loops over time in a scan."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gcjax._moments.jaxprs import JaxprEqn, Operand, ScannedValue
from gcjax._moments.rules.node import Key, Node, Reader, Samples, Sums
from gcjax._types import Array


@dataclass(frozen=True)
class ScannedMoments:
    """Key of the `Sums` of a node inside the body of a scan, stacked over the scan's steps."""

    scan: JaxprEqn
    node: Node


@dataclass(frozen=True, eq=False)
class Tied(Node):
    """A parameter used more than once. A sample's gradients of all uses are added before the square."""

    rule = "tied"

    def gradient(self, read: Reader) -> Array:
        return sum(child.gradient(read) for child in self.children[1:]) + self.children[0].gradient(read)


@dataclass(frozen=True, eq=False)
class Concatenated(Node):
    """A concatenation of gradients: both sums are concatenated."""

    eqn: JaxprEqn
    rule = "concatenated"

    @property
    def needs(self) -> tuple[Key, ...]:
        return tuple(dict.fromkeys(key for child in self.children for key in child.needs))

    def gradient(self, read: Reader) -> Array:
        return self._join([child.gradient(read) for child in self.children])

    @property
    def is_loop(self) -> bool:
        return any(child.is_loop for child in self.children)

    def moments_under_vmap(self, read: Reader, samples: Samples) -> Sums:
        sums = [child.moments_under_vmap(read, samples) for child in self.children]
        return self._join([total for total, _ in sums]), self._join([squares for _, squares in sums])

    def _join(self, parts: Sequence[Array]) -> Array:
        return jax.lax.concatenate(parts, self.eqn.params["dimension"])


@dataclass(frozen=True, eq=False)
class Scanned(Node):
    """A gradient that a scan makes."""

    scan: JaxprEqn

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(ScannedValue(self.scan, key) for key in self.child.operands)


@dataclass(frozen=True, eq=False)
class ScannedLayers(Scanned):
    """A stacked output of a scan, one gradient per layer. Its sums are made inside the scan's body."""

    @property
    def rule(self) -> str:
        return f"scanned {self.child.rule}"

    @property
    def needs(self) -> tuple[Key, ...]:
        return (ScannedMoments(self.scan, self.child),)

    def gradient(self, read: Reader) -> Array:
        keys = self.child.operands
        layers = [jnp.swapaxes(read(key), 0, 1) for key in self.operands]
        return jax.lax.map(lambda layer: self.child.gradient(dict(zip(keys, layer, strict=True)).__getitem__), layers)

    @property
    def is_loop(self) -> bool:
        return self.child.is_loop

    def moments_under_vmap(self, read: Reader, samples: Samples) -> Sums:
        del samples
        return read(ScannedMoments(self.scan, self.child))


@dataclass(frozen=True, eq=False)
class ScannedSum(Scanned):
    """A carry of a scan that only accumulates, as for a weight that all time steps share.

    The time steps count as further positions.
    """

    @property
    def rule(self) -> str:
        return f"{self.child.rule} over time"

    @property
    def positions(self) -> int:
        return self.child.positions * self.scan.params["length"]

    def gradient(self, read: Reader) -> Array:
        def flat(key):
            value = read(ScannedValue(self.scan, key))
            return value.reshape(-1, *value.shape[2:])

        return self.child.gradient(flat)
