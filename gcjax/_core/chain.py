"""Runs of a chain whose compressors only look, note their means, or return means that are known already."""

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


seen: ContextVar["Seen | Replay | None"] = ContextVar("seen", default=None)


@contextlib.contextmanager
def without_exchange() -> Iterator[Seen]:
    """Inside, compressors pass gradients on as they are, and keep no state. No mesh axis has to be bound."""
    found = Seen()
    token = seen.set(found)
    try:
        yield found
    finally:
        seen.reset(token)


_noted: ContextVar[list[PyTree] | None] = ContextVar("_noted", default=None)


@contextlib.contextmanager
def noting_means() -> Iterator[list[PyTree]]:
    """Inside, every compressor adds its compressed mean to the list, in the order of their calls."""
    means: list[PyTree] = []
    token = _noted.set(means)
    try:
        yield means
    finally:
        _noted.reset(token)


def noted(mean: PyTree) -> PyTree:
    """The mean as it is."""
    if (means := _noted.get()) is not None:
        means.append(mean)
    return mean


class Replay:
    """What compressors return while their means are known: these, in order, and their states as they are."""

    def __init__(self, means: list[PyTree]) -> None:
        self.left = list(means)

    def update(self, updates: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.left.pop(0), state


@contextlib.contextmanager
def replaying(means: list[PyTree]) -> Iterator[None]:
    """Inside, compressors return `means`, and what stands before them sees gradients without meaning."""
    token = seen.set(Replay(means))
    try:
        yield
    finally:
        seen.reset(token)


def means_are_known() -> bool:
    """Whether a transform before the compressors has nothing to do.

    Raises:
      ValueError: inside `replaying`, a transform with state per worker stands after all compressors.
    """
    replay = seen.get()
    if not isinstance(replay, Replay):
        return False
    if not replay.left:
        raise ValueError("gcjax.local_transform stands after the compressor, where all workers are equal: leave it out")
    return True
