"""Nodes that join others: uses of one parameter in several places, stacked layers and loops over time in a scan."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gcjax import _jax_compat
from gcjax._moments.reduce import loop_moments, reduced


@dataclass(frozen=True)
class Stacked:
    """Key of a value of a scan's body, stacked over the scan's steps."""

    scan: Any
    key: Any


@dataclass(frozen=True)
class Paired:
    """Key of the (G, S) of a node of a scan's body, stacked over the scan's steps."""

    scan: Any
    node: Any


@dataclass(frozen=True, eq=False)
class Tied:
    """A parameter used more than once: the uses of a sample are added before the square."""

    children: tuple
    rule = "tied"

    @property
    def operands(self):
        return tuple(dict.fromkeys(key for child in self.children for key in child.operands))

    @property
    def positions(self):
        return max(child.positions for child in self.children)

    def summed(self, read):
        return sum(child.summed(read) for child in self.children[1:]) + self.children[0].summed(read)

    def moments(self, table, size):
        return loop_moments(self.summed, table, size)

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)


@dataclass(frozen=True, eq=False)
class Joined:
    """A concatenation: each part moves to its place, in both sums."""

    eqn: Any
    children: tuple
    rule = "joined"

    @property
    def operands(self):
        return tuple(dict.fromkeys(key for child in self.children for key in child.operands))

    @property
    def needs(self):
        return tuple(dict.fromkeys(key for child in self.children for key in child.needs))

    @property
    def positions(self):
        return max(child.positions for child in self.children)

    def summed(self, read):
        return self._join([child.summed(read) for child in self.children])

    def moments(self, table, size):
        return loop_moments(self.summed, table, size)

    def pair(self, read, token):
        totals, squares = zip(*(child.pair(read, token) for child in self.children), strict=True)
        return self._join(totals), self._join(squares)

    def _join(self, parts):
        return jax.lax.concatenate(parts, self.eqn.params["dimension"])


@dataclass(frozen=True, eq=False)
class Mixed:
    """A linear operation that mixes the entries of a weight's gradient, as in the gradient of a low-rank factor.

    Its other operands are the same for all samples. Squares do not pass through it, but each sample's gradient does:
    the loop over samples applies it to one gradient at a time, so that no array of batch x weight is made.
    """

    eqn: Any
    index: int
    child: Any

    @property
    def rule(self):
        return f"mixed {self.child.rule}"

    @property
    def positions(self):
        return self.child.positions

    @property
    def others(self):
        return self.eqn.invars[: self.index] + self.eqn.invars[self.index + 1 :]

    @property
    def operands(self):
        return (*self.child.operands, *(atom for atom in self.others if not _jax_compat.is_literal(atom)))

    @property
    def needs(self):
        return self.operands

    def summed(self, read):
        others = [atom.val if _jax_compat.is_literal(atom) else read(atom)[0] for atom in self.others]
        return _jax_compat.bind(self.eqn, [*others[: self.index], self.child.summed(read), *others[self.index :]])[0]

    def moments(self, table, size):
        return loop_moments(self.summed, table, size)

    def pair(self, read, token):
        return reduced(self, read, token)


@dataclass(frozen=True, eq=False)
class ScannedLayers:
    """A stacked output of a scan, one gradient per layer: reduced inside the scan's body."""

    scan: Any
    child: Any

    @property
    def rule(self):
        return f"scanned {self.child.rule}"

    @property
    def positions(self):
        return self.child.positions

    @property
    def operands(self):
        return tuple(Stacked(self.scan, key) for key in self.child.operands)

    def summed(self, read):
        keys = self.child.operands
        layers = [jnp.swapaxes(read(key), 0, 1) for key in self.operands]
        return jax.lax.map(lambda layer: self.child.summed(dict(zip(keys, layer, strict=True)).__getitem__), layers)

    @property
    def needs(self):
        return (Paired(self.scan, self.child),)

    def pair(self, read, token):
        del token
        return read(Paired(self.scan, self.child))


@dataclass(frozen=True, eq=False)
class ScannedSum:
    """A carry of a scan that only accumulates, as for a weight shared by all time steps: time joins the positions."""

    scan: Any
    child: Any

    @property
    def rule(self):
        return f"{self.child.rule} over time"

    @property
    def positions(self):
        return self.child.positions * self.scan.params["length"]

    @property
    def operands(self):
        return tuple(Stacked(self.scan, key) for key in self.child.operands)

    def summed(self, read):
        def flat(key):
            value = read(Stacked(self.scan, key))
            return value.reshape(-1, *value.shape[2:])

        return self.child.summed(flat)

    def moments(self, table, size):
        return loop_moments(self.summed, table, size)

    @property
    def needs(self):
        return self.operands

    def pair(self, read, token):
        return reduced(self, read, token)
