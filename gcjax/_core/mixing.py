"""What becomes of state per worker when the number of workers changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The states of `new` workers, made of those of `old` ones. Arrays have the workers along axis 0.

    The workers share the interval from 0 to 1 equally, before and after. A new worker takes from each old one in
    proportion to how much of its share lies in that one's: 4 workers of 8 are the means of pairs, 8 of 4 are copies.
    The mean over the workers stays as it was, to rounding, and with it what updates will make of what they hold.

    Attributes:
      old, new: numbers of workers.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> print(gx.Mixing(old=4, new=2).means(jnp.array([1.0, 3.0, 5.0, 7.0])))
    [2. 6.]
    """

    old: int
    new: int

    def weights(self) -> np.ndarray:
        """float64[new, old]; every row adds up to 1, every column to new / old."""
        new, old = np.arange(self.new)[:, None], np.arange(self.old)
        overlap = np.minimum((new + 1) * self.old, (old + 1) * self.new) - np.maximum(new * self.old, old * self.new)
        return np.maximum(overlap, 0) / self.old

    def means(self, tree: PyTree) -> PyTree:
        """Gradients and sums of gradients: the mean over the workers stays."""
        return self._weighted(tree, self.weights())

    def squares(self, tree: PyTree) -> PyTree:
        """Sums of squares of what each sample adds to such a gradient: a share of w in a mean counts w^2."""
        return self._weighted(tree, self.weights() ** 2)

    def equal(self, tree: PyTree) -> PyTree:
        """What is equal on all workers."""
        return jax.tree.map(lambda x: jnp.repeat(x[:1], self.new, axis=0), tree)

    def zeros(self, tree: PyTree) -> PyTree:
        """What begins anew."""
        return jax.tree.map(lambda x: jnp.zeros((self.new, *x.shape[1:]), x.dtype), tree)

    def ranks(self) -> Array:
        """int32[new], the workers' numbers."""
        return jnp.arange(self.new, dtype=jnp.int32)

    def _weighted(self, tree: PyTree, weights: np.ndarray) -> PyTree:
        def weighted(x: Array) -> Array:
            rows = []
            for row in weights:
                parts = [x[i] if w == 1 else (w * x[i]).astype(x.dtype) for i, w in enumerate(row) if w]
                rows.append(sum(parts[1:], parts[0]))
            return jnp.stack(rows)

        return jax.tree.map(weighted, tree)


def mix(tree: PyTree, mixing: Mixing) -> PyTree:
    """State per worker, each part as its class says; of what says nothing, floats as means and the rest as equal."""

    def mixed(node: PyTree) -> PyTree:
        if is_mixable(node):
            return node.mixed(mixing)
        return mixing.means(node) if jnp.issubdtype(node.dtype, jnp.inexact) else mixing.equal(node)

    return jax.tree.map(mixed, tree, is_leaf=is_mixable)


def is_mixable(node: object) -> bool:
    """Whether a node says by a method `mixed(mixing)` what becomes of its fields."""
    return hasattr(node, "mixed")
