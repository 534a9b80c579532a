"""The types that every layer shares: compressor, communication, per-worker state."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerWorker:
    """State that differs between workers.

    A global leaf on a mesh is the workers' leaves one after the other along axis 0, sharded over `axes` (static), so
    that each worker sees its own without a reshape (XLA would copy the state for one). Leaves therefore have at least
    one axis. `gcjax.state_specs` and `gcjax.place` treat these nodes apart from all other state, which is replicated.
    """

    value: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})


class Sent(NamedTuple):
    """What one worker sent in one update of one bucket. Scalars, int32 unless said.

    selected: entries that passed the method's test; it equals sent + underflow + overflow.
    sent: entries put on the wire.  underflow: too small for the value code.  overflow: beyond the capacity.
    capacity: slots in the payload.
    wire_bytes: float32, moved by metered collectives (`Comm`); the others run on every step and are counted apart.
    payload_bits: float32, this worker's message without padding; where the method's source codes it in varying length,
      as long as that code would be.
    """

    selected: Array
    sent: Array
    underflow: Array
    overflow: Array
    capacity: Array
    wire_bytes: Array
    payload_bits: Array


def sent_whole(entries: int, payload_bits) -> Sent:
    """The report of a method that sends something for all of the bucket's entries, with unmetered collectives."""
    count, none = jnp.int32(entries), jnp.int32(0)
    return Sent(count, count, none, none, count, jnp.float32(0), jnp.float32(payload_bits))


@dataclasses.dataclass(frozen=True)
class Comm:
    """The collectives a method may use, injected so that no method names one.

    size: number of workers, static.  rank(): this worker's number, int32.
    max(x), sum(x), mean(x): elementwise over the workers, of the shape of `x`, equal on all workers.
    gather(x): shape (size, *x.shape), row w from worker w, equal on all workers.
    swap(x): x of shape (size, ...): row w goes to worker w; returns the rows that came, row w from worker w.
    bytes_moved(): what the calls so far (at trace time) make one worker send, which is also what it receives, with ring
    algorithms: a gather of m bytes moves (size - 1) * m, a maximum, sum or mean of m bytes 2 * (size - 1) / size * m, a
        swap of m bytes (size - 1) / size * m.
    metered(): the same collectives with the count at zero, for code that only runs on some steps.
    stripes: number of inner workers that share the work of one worker here. All but maxima are cut into as many parts;
        m is then the size of a part, padding included. What moves between the inner workers is not counted.
    """

    size: int
    rank: Callable[[], Array]
    max: Callable[[Array], Array]
    sum: Callable[[Array], Array]
    mean: Callable[[Array], Array]
    gather: Callable[[Array], Array]
    swap: Callable[[Array], Array]
    bytes_moved: Callable[[], float]
    metered: Callable[[], "Comm"]
    stripes: int = 1


class Compressor(NamedTuple):
    """A method, as pure functions over one flat bucket (`_layout.Bucket`).

    init(bucket) -> state of one worker, a pytree node with attributes `bucket` and `residual`: float32[bucket.size],
        what this worker has taken in and neither sent nor given up.
    update(gradient, sum_grad_squared, state, comm, ok) -> (mean, state, Sent): `gradient` is float32[bucket.size],
        `sum_grad_squared` the same or None; `mean` is the update, bit-equal on all workers. `ok` is a bool scalar,
        equal on all workers, False when any worker's input is not finite: then `mean` must be NaN everywhere and the
        state come back as it was.
    """

    init: Callable[..., PyTree]
    update: Callable[..., tuple[Array, PyTree, Sent]]
