"""An imitation of many workers, who all send what this one sends, to see and time what a method does.

A transform made without axis names talks to whatever stands in for its workers. Traced on shapes alone, the imitation
tells every message for any number of workers; run, it takes the time of compressing and decoding without a network.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gcjax._exchange import without_axes
from gcjax._types import Array, Comm, PyTree

SIDE = 1000  # a model of which only the size is known is made of square matrices of so many rows


class Message(NamedTuple):
    """kind: "maximum", "all_reduce", "all_gather" or "all_to_all".  bytes: what one worker puts in."""

    kind: str
    bytes: int


Record = list["Message | Record"]  # a list within stands for code that only runs on some steps


def ring_bytes(message: Message, workers: int) -> float:
    """What one worker sends, and receives, with ring algorithms."""
    share = {"maximum": 2 / workers, "all_reduce": 2 / workers, "all_gather": 1, "all_to_all": 1 / workers}[
        message.kind
    ]
    return share * (workers - 1) * message.bytes


def arriving_bytes(message: Message, workers: int) -> int:
    """What a worker has in its memory when the message is through."""
    return message.bytes * (workers if message.kind == "all_gather" else 1)


def model_of(size: int) -> list[jax.ShapeDtypeStruct]:
    """Square matrices of `SIDE` rows, of fewer if the model is smaller, then a matrix and a vector of the rest."""
    side = min(SIDE, max(math.isqrt(size), 1))
    rows, rest = divmod(size, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * (rows // side) + [(rows % side, side), (rest,)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes if math.prod(shape)]


def messages_of(tx, params: PyTree, workers: int, squares: bool) -> tuple[Message, ...]:
    """What one of `workers` sends in one update, in order; nothing is computed and no memory taken.

    tx: a transform made without axis names.  params: arrays or `jax.ShapeDtypeStruct`s.  squares: whether it takes
    `sum_grad_squared`.  Of a choice between several exchanges, as a ladder of capacities has, the largest counts.
    """
    record: Record = []

    def update(gradient, zeros):
        extra = {"sum_grad_squared": gradient} if squares else {}
        with imitated(workers, zeros, record):
            return tx.update(gradient, tx.init(gradient), **extra)

    jax.eval_shape(update, params, jax.ShapeDtypeStruct((workers,), jnp.int32))
    return _with_largest_branches(record, workers)


def _with_largest_branches(record: Record, workers: int) -> tuple[Message, ...]:
    # The worker that chooses does so by a collective, so that branches of two choices never stand side by side.
    messages: list[Message] = []
    branches: list[tuple[Message, ...]] = []
    for entry in [*record, None]:
        if isinstance(entry, list):
            branches.append(_with_largest_branches(entry, workers))
            continue
        if branches:
            messages += max(branches, key=lambda branch: sum(ring_bytes(m, workers) for m in branch))
            branches = []
        if entry is not None:
            messages.append(entry)
    return tuple(messages)


@contextlib.contextmanager
def imitated(workers: int, zeros: Array, record: Record) -> Iterator[None]:
    """Inside, transforms without axis names have `workers` workers. `zeros` is as for `imitation`."""
    token = without_axes.set(lambda: imitation(workers, zeros, record))
    try:
        yield
    finally:
        without_axes.reset(token)


def imitation(workers: int, zeros: Array, record: Record) -> Comm:
    """`workers` workers who all send the same, which is written down in `record`.

    zeros: int32[workers], zeros that the compiler does not know. It would else decode one payload for all.
    """
    own: Record = record

    def note(kind, x):
        own.append(Message(kind, x.nbytes))

    def maximum(x):
        note("maximum", x)
        return x + zeros[0].astype(x.dtype)

    def total(x):
        note("all_reduce", x)
        return workers * x + zeros[0].astype(x.dtype)

    def rows(x):
        return x[None] + zeros.astype(x.dtype).reshape(-1, *[1] * x.ndim)

    def gather(x):
        note("all_gather", x)
        return rows(x)

    def swap(x):
        note("all_to_all", x)
        return rows(x[0])  # what the others send to worker 0 is what it sends to itself

    def metered():
        branch: Record = []
        own.append(branch)
        return imitation(workers, zeros, branch)

    return Comm(
        size=workers,
        rank=lambda: zeros[0],
        max=maximum,
        sum=total,
        mean=lambda x: total(x) / workers,
        gather=gather,
        swap=swap,
        bytes_moved=lambda: sum(ring_bytes(entry, workers) for entry in own if isinstance(entry, Message)),
        metered=metered,
    )
