"""State that differs between workers, and its encoding on a mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gcjax._core.mixing import Mixing, mix
from gcjax._types import Array, PyTree

_placeholder: list[type] = []
# optax calls `init` with an object that stands for the parameters, to find their copies in a state.
optax.tree_utils.tree_map_params(lambda params: _placeholder.append(type(params)), lambda: None, None)


WHOLE_NODE: Any = "PerWorker"  # a leaf in place of a node
OTHER_OPTIONS = (
    "Use the options that the state was made with, or begin with a new state for the compressor: the parameters and "
    "the rest of the optimiser's state still fit"
)


def stands_for_params(params: PyTree) -> bool:
    """Whether `init` is called by `optax.tree_utils.tree_map_params`: its result is then a prefix of the state.

    State per worker holds no copies of the parameters. `WHOLE_NODE` in place of a `PerWorker` leaves it whole:
    `transform_non_params` gets the node.
    """
    return isinstance(params, tuple(_placeholder))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerWorker:
    """State that differs between workers.

    Off the mesh, and inside `jax.shard_map`, a node holds one worker's state. On a mesh it holds all workers' leaves
    one after the other along axis 0, sharded over `axes`. Each worker then sees its own leaf without a reshape, for
    which XLA would copy the state. `gcjax.state_specs` and `gcjax.distribute` shard these nodes and replicate all
    others.

    Attributes:
      value: the packed state: leaves as they are, scalars as vectors of one.
      axes: mesh axes of the workers. Static.
      shapes: shape of each leaf of one worker's state, before packing. Static.

    >>> import gcjax, jax.numpy as jnp
    >>> node = gcjax.PerWorker.pack({"step": jnp.int32(0)}, ("data",))
    >>> print(node.value, node.unpack(), node.workers)
    {'step': Array([0], dtype=int32)} {'step': Array(0, dtype=int32)} 1
    """

    value: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def pack(cls, tree: PyTree, axes: tuple[str, ...]) -> "PerWorker":
        """One worker's state, a pytree of arrays, as a node."""
        shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree))
        return cls(jax.tree.map(lambda x: jnp.reshape(x, jnp.shape(x) or (1,)), tree), axes, shapes)

    def unpack(self) -> PyTree:
        """The state of the only worker that the node holds: the inverse of `pack`.

        Raises:
          ValueError: when the node holds several workers, or lacks arrays.
        """
        if (workers := self.workers) > 1:
            raise ValueError(
                f"update got the state of {workers} workers at once. Call it inside jax.shard_map or jax.pmap with "
                "in_specs=gcjax.state_specs(state), so that every worker sees its own"
            )
        return self._rebuilt(lambda x, shape: x.reshape(shape))

    def of_one(self) -> PyTree:
        """The shapes of one worker's state, as `jax.ShapeDtypeStruct`s."""
        return self._rebuilt(lambda x, shape: jax.ShapeDtypeStruct(shape, x.dtype))

    def stacked(self) -> PyTree:
        """The state of all workers that the node holds: leaves of shape (workers, *shape)."""
        workers = self.workers
        return self._rebuilt(lambda x, shape: _stacked(x, (workers, *shape)))

    def mixed(self, mixing: Mixing) -> "PerWorker":
        """The states of `mixing.new` workers, all in the node, made of those of `mixing.old` ones."""
        tree = mix(self.stacked(), mixing)
        shapes = tuple(x.shape[1:] for x in jax.tree.leaves(tree))
        value = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
        return PerWorker(value, self.axes, shapes)

    @property
    def workers(self) -> int:
        """Number of workers whose state the node holds; 1 where no leaf has an entry."""
        sizes = zip(self._leaves(), self.shapes, strict=True)
        return max((math.prod(x.shape) // math.prod(shape) for x, shape in sizes if math.prod(shape)), default=1)

    def _leaves(self) -> list[Array]:
        """The arrays of `value`. Raises ValueError if there are not as many as `shapes`."""
        leaves = jax.tree.leaves(self.value)
        if len(leaves) != len(self.shapes):
            raise ValueError(
                f"the state has {len(leaves)} arrays per worker and should have {len(self.shapes)}: a checkpoint of "
                "other options, such as another transport or feedback, or of another version of gcjax was restored "
                f"into it. {OTHER_OPTIONS}"
            )
        return leaves

    def _rebuilt(self, function: Callable[[Array, tuple[int, ...]], Any]) -> PyTree:
        """`value` with function(array, shape of one worker's) in place of each array."""
        parts = [function(x, shape) for x, shape in zip(self._leaves(), self.shapes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.value), parts)


def _stacked(x: Array, shape: tuple[int, ...]) -> Array:
    # JAX does not reshape an empty array whose axis 0 is sharded explicitly.
    return x.reshape(shape) if math.prod(shape) else jnp.zeros(shape, x.dtype)


def is_per_worker(node: object) -> bool:
    return isinstance(node, PerWorker)
