"""What was sent, read from the optimiser's state."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gcjax._core.transform import CompressState
from gcjax._kernels.bits import TINY


class Info(NamedTuple):
    """What the last update sent. Arrays have one entry per worker whose state was given.

    selected, sent, underflow, overflow: entries that passed the method's test, were put on the wire, were too small for
      the value code, did not fit the capacity; int64[workers], selected = sent + underflow + overflow.
    capacity: slots in each worker's payload (of all its buckets).
    wire_bytes: bytes a worker sends, and receives, with ring algorithms, padding and headers included; 0 for one. With
      `inner_axis_name` its part of what moves along `axis_name`.
    payload_bits: bits of each worker's message without padding, float64[workers]; where the method's source codes it in
      varying length, as long as that code would be. 32 * parameters / payload_bits is the ratio that papers on
      quantisation give.
    compression_ratio: parameters / mean of `sent` over workers, the ratio of the paper (arXiv 1802.06058); it knows
      neither indices nor padding. inf when nothing was sent.
    wire_ratio: bytes that a float32 ring all-reduce of the gradient moves / `wire_bytes`; nan for one worker. Inner
      workers share the all-reduce, too.
    residual_norm: 2-norm of what each worker has taken in and not yet sent, float64[workers].
    skipped: updates so far that were skipped because some worker's input was not finite.
    """

    selected: np.ndarray
    sent: np.ndarray
    underflow: np.ndarray
    overflow: np.ndarray
    capacity: int
    wire_bytes: float
    payload_bits: np.ndarray
    compression_ratio: float
    wire_ratio: float
    residual_norm: np.ndarray
    skipped: int


def info(opt_state) -> Info:
    """Read from an optimiser's state what its compressing transform sent in the last update.

    Args:
      opt_state: any optax state holding a gcjax state: of `optax.chain`, a single transform, `TrainState.opt_state`; of
        one worker or of all; on a mesh of several processes each sees the workers on its own devices. States of several
        compressors (`optax.partition`) are added up. Its arrays are fetched, so call this between steps, not inside
        `jax.jit`.

    Raises:
      ValueError: when there is no gcjax state in it.
      TypeError: inside `jax.jit`.
    """
    states = [s for s in jax.tree.leaves(opt_state, is_leaf=_is_compress_state) if _is_compress_state(s)]
    if not states:
        raise ValueError("opt_state holds no state of a gcjax compressor; pass the state of a chain that has one in it")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(states)):
        raise TypeError(
            "gcjax.info reads values and cannot run inside jax.jit; call it on the state that the step returns"
        )
    reports = [jax.tree.map(lambda x: np.concatenate([np.ravel(p) for p in _parts(x)]), s.report.value) for s in states]
    sent = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=np.float64), *[r.sent for r in reports])
    parameters = sum(float(r.parameters[0]) for r in reports)
    workers = int(reports[0].workers[0])
    wire_bytes = float(sent.wire_bytes[0])
    mean_sent = float(np.mean(sent.sent))
    dense_bytes = 2 * (workers - 1) / workers * 4 * parameters / int(reports[0].inner_workers[0])
    return Info(
        selected=sent.selected.astype(np.int64),
        sent=sent.sent.astype(np.int64),
        underflow=sent.underflow.astype(np.int64),
        overflow=sent.overflow.astype(np.int64),
        capacity=int(sent.capacity[0]),
        wire_bytes=wire_bytes,
        payload_bits=sent.payload_bits,
        compression_ratio=parameters / mean_sent if mean_sent else float("inf"),
        wire_ratio=dense_bytes / wire_bytes if wire_bytes else float("nan"),
        residual_norm=np.linalg.norm([_residual_norms(s) for s in states], axis=0),
        skipped=max(int(r.skipped[0]) for r in reports),
    )


def _is_compress_state(node) -> bool:
    return isinstance(node, CompressState)


def _parts(x) -> list:
    """`x`, or of an array that is spread over several processes what this one holds, in the order of the workers."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return [x]
    held = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return [held[start] for start in sorted(held)]


def _residual_norms(state: CompressState) -> np.ndarray:
    """2-norm of each worker's residual; the workers' leaves stand one after the other."""
    workers = sum(part.size for part in _parts(state.report.value.skipped))

    def norms(bucket):
        leaves, treedef = jax.tree.flatten(jax.tree.map(_with_automatic_axes, bucket))
        parts = [treedef.unflatten(part) for part in zip(*map(_parts, leaves), strict=True)] or [bucket]
        return np.concatenate([_bucket_norms(part, workers // len(parts)) for part in parts])

    buckets = [norms(bucket) for bucket in state.buckets.value]
    return np.linalg.norm(np.asarray(buckets, np.float64).reshape(-1, workers), axis=0)


def _with_automatic_axes(x):
    """The same array where its mesh has explicit axes: outside of that mesh not every function takes such arrays."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    mesh = Mesh(x.sharding.mesh.devices, x.sharding.mesh.axis_names)
    return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))


@functools.partial(jax.jit, static_argnums=1)
def _bucket_norms(bucket, workers: int):
    def norm(state):
        residual = state.residual
        largest = jnp.maximum(jnp.max(jnp.abs(residual)), TINY)  # squares of 1e38 and of 1e-38 leave float32's range
        return largest * jnp.linalg.norm(residual / largest)

    return jax.vmap(norm, axis_size=workers)(jax.tree.map(lambda x: x.reshape(workers, -1), bucket))
