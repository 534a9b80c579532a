"""A look at a chain of transforms without its exchanges: which leaves each compressor in it sees."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from gcjax._types import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Passing:
    """State of a compressor inside `without_exchange`: its number. Static."""

    number: int


class Seen:
    """What the compressors of a chain have seen.

    Attributes:
      compressors: for each, the mesh axes that it averages over, and the paths of the leaves that passed through it.
    """

    def __init__(self) -> None:
        self.compressors: list[tuple[frozenset[str], set[str]]] = []

    def init(self, axes: tuple[str, ...]) -> Passing:
        self.compressors.append((frozenset(axes), set()))
        return Passing(len(self.compressors) - 1)

    def update(self, updates: PyTree, state: Passing) -> tuple[PyTree, Passing]:
        paths = jax.tree_util.tree_leaves_with_path(updates)
        self.compressors[state.number][1].update(jax.tree_util.keystr(path) for path, _ in paths)
        return updates, state


seen: ContextVar[Seen | None] = ContextVar("seen", default=None)


@contextlib.contextmanager
def without_exchange() -> Iterator[Seen]:
    """Inside, compressors pass gradients on as they are, and keep no state. No mesh axis has to be bound."""
    found = Seen()
    token = seen.set(found)
    try:
        yield found
    finally:
        seen.reset(token)
