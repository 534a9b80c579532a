"""What was sent, read from the optimiser's state."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gcjax._core.options import check_checksum
from gcjax._core.own_models import GossipState, gossip_states
from gcjax._core.per_worker import PerWorker
from gcjax._core.state import CompressState, UpdateReport, compress_states, fresh_report, options_of
from gcjax._kernels.floats import TINY
from gcjax._types import Array, PyTree


class Info(NamedTuple):
    """What the last update sent. Arrays have one entry per worker whose state was given. Printed, it is a summary.

    Attributes:
      selected: int64[workers], entries that passed the method's test: sent + underflow + overflow.
      sent: int64[workers], entries put on the wire.
      underflow: int64[workers], entries too small for the value code.
      overflow: int64[workers], entries beyond the capacity.
      capacity: slots in each worker's payload, summed over its buckets.
      wire_bytes: bytes that a worker sends, and receives, with ring algorithms, padding and headers included; 0 for a
        single worker. With `inner_axis_name`, its part of what moves along `axis_name`.
      payload_bits: float64[workers], bits of each worker's message without padding. 32 * parameters / payload_bits is
        the ratio that papers on quantisation give.
      entropy_bits: float64[workers], the least that any code takes for the same message: where it has the places of
        entries, each set of places counts as equally likely.
      compression_ratio: parameters / mean of `sent` over the workers, the ratio of the paper (arXiv 1802.06058). It
        counts neither indices nor padding. inf when nothing was sent.
      wire_ratio: bytes that a float32 ring all-reduce of the gradient moves / `wire_bytes`; nan for a single worker.
        Inner workers share the all-reduce, too.
      residual_norm: float64[workers], 2-norm of what each worker has taken in and not yet sent.
      skipped: updates so far that were skipped because some worker's input was not finite: NaN, infinite or of
        magnitude 2**80 (1.2e24) or more.
      misplaced: updates so far in which some worker had the state of another, as after a state of several workers was
        saved or returned as if it were that of one.
      identical: updates so far in which all workers had the same gradient: it was reduced before, or all have the same
        batch.
      squares_ratio: running mean over the updates of the workers' largest sum(g**2) / sum(`sum_grad_squared`), from a
        sample. About 1 for noise, n for n samples that agree. Far below 1: the gradient was scaled without its squares.
      saturated: entries of the last update beyond the range of their leaf's dtype, such as float16. They became its
        largest number, and the rest is lost: compress float32 or bfloat16 gradients, or use a smaller loss scale.
      residual_ratio: float64[workers], `residual_norm` / norm of the gradient that `info` was given, about the number
        of steps for which gradients wait; nan without a gradient. It should settle: if it grows and grows, the method
        sends less than comes in.
    """

    selected: np.ndarray
    sent: np.ndarray
    underflow: np.ndarray
    overflow: np.ndarray
    capacity: int
    wire_bytes: float
    payload_bits: np.ndarray
    entropy_bits: np.ndarray
    compression_ratio: float
    wire_ratio: float
    residual_norm: np.ndarray
    skipped: int
    misplaced: int
    identical: int
    squares_ratio: float
    saturated: int
    residual_ratio: np.ndarray

    def __str__(self) -> str:
        sent = float(np.mean(self.sent))
        bits = f", {np.mean(self.payload_bits) / sent:.1f} bits per entry" if sent else ""
        ratio = "" if np.isnan(self.wire_ratio) else f", 1/{self.wire_ratio:,.1f} of a float32 all-reduce"
        waits = (
            "" if np.isnan(self.residual_ratio).any() else f", {np.max(self.residual_ratio):.3g} times the gradient's"
        )
        held_back = f"{np.mean(self.underflow):,.0f} too small for the code, {np.mean(self.overflow):,.0f} beyond"
        lines = [
            f"sent     {sent:,.0f} entries per worker, {1 / self.compression_ratio:.2%} of the parameters{bits}",
            f"selected {np.mean(self.selected):,.0f}: {held_back} the capacity of {self.capacity:,}",
            f"moved    {self.wire_bytes:,.0f} bytes per worker{ratio}",
            f"waiting  residual norm {np.min(self.residual_norm):.3g} to {np.max(self.residual_norm):.3g}{waits}",
            f"skipped  {self.skipped} updates so far, {self.saturated} entries saturated in the last one",
        ]
        return "\n".join(lines)


class GossipInfo(NamedTuple):
    """What the workers of a gossip transform have sent so far. Arrays have one entry per worker whose state was given.

    Attributes:
      step: updates so far.
      exchanges: int64[workers], exchanges in which each worker took part, without those in which it sat out.
      failures: exchanges repeated in full precision because some worker could not decode. The first exchange, before
        any distance is known, does not count.
      bits_last: float64[workers], bits sent in the last update, with padding and agreements. A ring all-reduce counts
        as what it makes one worker send.
      bits: float64[workers], bits sent so far, counted likewise.
      weights: float64[workers], push-sum weights, which sum to the number of workers; ones with other methods.
      compressor: the `Info` of the compressor of `local_sgd`; None without one.
    """

    step: int
    exchanges: np.ndarray
    failures: int
    bits_last: np.ndarray
    bits: np.ndarray
    weights: np.ndarray
    compressor: Info | None


def info(opt_state: PyTree, gradient: PyTree = None) -> Any:
    """Read from an optimiser's state what its compressor or gossip transform has sent.

    It fetches arrays, so call it between steps, not inside `jax.jit`.

    Args:
      opt_state: any optax state that holds a gcjax state: of `optax.chain`, of a single transform,
        `TrainState.opt_state`; of one worker or of all. On a mesh of several processes, each process sees the workers
        on its own devices. States of several compressors (`optax.partition`) are added up.
      gradient: of one worker's batch, or its norm, for `residual_ratio`.

    Returns:
      The `Info` of the last update, or the `gcjax.gossip.GossipInfo` of all updates of a gossip transform.

    Raises:
      ValueError: there is no gcjax state in it, or there are several of gossip transforms; state of several workers
        claims to be that of one.
      TypeError: called inside `jax.jit`.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.top_k_compress(0.5)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> sent = gcjax.info(tx.update(g, tx.init(g))[1])
    >>> print(sent.sent, sent.compression_ratio, sent.residual_norm.round(2))
    [2] 2.0 [1.12]
    """
    if found := gossip_states(opt_state):
        if len(found) > 1:
            raise ValueError(f"the chain has {len(found)} gossip transforms; give the state of one")
        own = info_of_compressors(found[0], gradient) if compress_states(found[0]) else None
        return _gossip_info(found[0], own)
    return info_of_compressors(opt_state, gradient)


def _gossip_info(state: GossipState, compressor: Info | None) -> GossipInfo:
    _reject_traced(state)
    traffic = jax.tree.map(_local_values, state.traffic.value)
    low, high = traffic.total.reshape(-1, 2).T.astype(np.float64)
    weights = np.ones(len(traffic.last))
    if isinstance(state.method, PerWorker):
        weights = _local_values(state.method.value).astype(np.float64)
    return GossipInfo(
        step=int(_local_values(state.step)[0]),
        exchanges=traffic.exchanges.astype(np.int64),
        failures=int(traffic.failures[0]),
        bits_last=32.0 * traffic.last,
        bits=32 * (high * 2.0**32 + low),
        weights=weights,
        compressor=compressor,
    )


def _local_values(x: Array) -> np.ndarray:
    """The workers' values that this process holds, one after the other."""
    return np.concatenate([np.ravel(part) for part in local_parts(x)])


def info_of_compressors(opt_state: PyTree, gradient: PyTree = None) -> Info:
    """The `Info` of all compressors in a state; see `info`."""
    states = readable_states((opt_state, gradient))
    reports = [report_of(s) for s in states]
    sent = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=np.float64), *[r.sent for r in reports])
    parameters = sum(float(r.parameters[0]) for r in reports)
    widest = max(reports, key=lambda report: report.workers[0])  # that of a compressor without leaves has one worker
    workers = int(widest.workers[0])
    wire_bytes = float(sent.wire_bytes[0])
    mean_sent = float(np.mean(sent.sent))
    residual_norm = np.linalg.norm([_residual_norms(s) for s in states], axis=0)
    gradient_norm = np.linalg.norm([float(_norm(leaf)) for leaf in jax.tree.leaves(gradient)])
    with np.errstate(divide="ignore", invalid="ignore"):
        residual_ratio = residual_norm / (np.nan if gradient is None else gradient_norm)
    dense_bytes = 2 * (workers - 1) / workers * 4 * parameters / int(widest.inner_workers[0])
    return Info(
        selected=sent.selected.astype(np.int64),
        sent=sent.sent.astype(np.int64),
        underflow=sent.underflow.astype(np.int64),
        overflow=sent.overflow.astype(np.int64),
        capacity=int(sent.capacity[0]),
        wire_bytes=wire_bytes,
        payload_bits=sent.payload_bits,
        entropy_bits=sent.entropy_bits,
        compression_ratio=parameters / mean_sent if mean_sent else float("inf"),
        wire_ratio=dense_bytes / wire_bytes if wire_bytes else float("nan"),
        residual_norm=residual_norm,
        skipped=max(int(r.skipped[0]) for r in reports),
        misplaced=max(int(r.symptoms.misplaced[0]) for r in reports),
        identical=max(int(r.symptoms.identical[0]) for r in reports),
        squares_ratio=min(float(r.symptoms.squares_ratio[0]) for r in reports),
        saturated=sum(int(r.saturated[0]) for r in reports),
        residual_ratio=residual_ratio,
    )


def _reject_replicated(node: PerWorker) -> None:
    """Raise for state per worker on several devices whose sharding says that it is equal on all of them."""
    shardings = [x.sharding for x in jax.tree.leaves(node) if isinstance(x, jax.Array)]
    if node.axes and any(s.is_fully_replicated and len(s.device_set) > 1 for s in shardings):
        raise ValueError(
            f"the state is per worker along {node.axes}, but its arrays claim to be equal on all devices: what is read "
            "or saved of them is that of one worker. Return it from jax.shard_map with "
            "out_specs=gcjax.state_specs(state), from jax.pmap with out_axes=0"
        )


def readable_states(opt_state: PyTree) -> list[CompressState]:
    """The states of all compressors; raises where their values cannot be read, or are not what they claim."""
    states = compress_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state holds no state of a gcjax compressor or gossip transform; pass the state of a chain that has one"
        )
    _reject_traced(opt_state)
    for state in states:
        _reject_replicated(state.report)
        check_restored(state)
    return states


def _reject_traced(tree: PyTree) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise TypeError(
            "gcjax.info reads values and cannot run inside jax.jit; call it on the state that the step returns"
        )


def check_restored(state: CompressState) -> None:
    """Raise ValueError if the arrays of a state, whose values can be read, are those of other options."""
    check_checksum(options_of(state), report_of(state).options)


def local_parts(x: Array) -> list[Array]:
    """`x` itself, or the parts that this process holds of an array over several processes, in the workers' order.

    Of an array that is the same everywhere there is one part.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return [x]
    if x.is_fully_replicated:
        return [x.addressable_data(0)]
    held = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return [held[start] for start in sorted(held)]


def _local_nodes(node: PerWorker) -> list[PerWorker]:
    """The node itself, or the parts that this process holds of a node over several processes."""
    leaves, treedef = jax.tree.flatten(node.value)
    parts = [jax.tree.unflatten(treedef, part) for part in zip(*map(local_parts, leaves), strict=True)]
    return [dataclasses.replace(node, value=part) for part in parts] or [node]


def report_of(state: CompressState) -> UpdateReport:
    """The report with numpy leaves of shape (workers,)."""
    parts = [jax.tree.leaves(jax.tree.map(np.asarray, node).stacked()) for node in _local_nodes(state.report)]
    leaves: list[Any] = [np.concatenate(workers) for workers in zip(*parts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(fresh_report(0)), leaves)  # anew, because NNX wraps every leaf


def _residual_norms(state: CompressState) -> np.ndarray:
    """float64[workers], 2-norm of each worker's residual."""
    workers = sum(node.workers for node in _local_nodes(state.report))
    nodes, norms = _local_nodes(state.buckets), []
    for node in nodes:
        with _automatic_axes(node) as automatic:
            norms.append(np.asarray(_bucket_norms(automatic, workers // len(nodes)), np.float64))
    return np.linalg.norm(np.concatenate(norms, axis=1), axis=0)


@contextlib.contextmanager
def _automatic_axes(tree: PyTree) -> Iterator[PyTree]:
    """The arrays of a tree on their own mesh with automatic axes, which is set.

    Explicit axes would restrict what can be computed, and under `jax.set_mesh` no function takes arrays that lie on
    other devices or another mesh.
    """
    shardings = [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if not shardings:
        yield tree
        return
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    mesh = Mesh(meshes[0].devices, meshes[0].axis_names) if meshes else Mesh([*shardings[0].device_set], ("devices",))

    def automatic(x):
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))

    with jax.set_mesh(mesh):
        yield jax.tree.map(automatic, tree)


@functools.partial(jax.jit, static_argnums=1)
def _bucket_norms(buckets: PerWorker, workers: int) -> Array:
    """float32[buckets, workers], 2-norm of every bucket's residual. A state without leaves does not know `workers`."""

    norms = [jax.vmap(lambda own: _norm(own.residual), axis_size=workers)(state) for state in buckets.stacked()]
    return jnp.asarray(norms, jnp.float32).reshape(-1, workers)


def _norm(x: Array) -> Array:
    """2-norm in float32, of entries of any magnitude."""
    x = jnp.abs(jnp.asarray(x)).astype(jnp.float32)
    largest = jnp.maximum(jnp.max(x, initial=0), TINY)  # squares of 1e38 and of 1e-38 leave float32's range
    return largest * jnp.sqrt(jnp.sum((x / largest) ** 2))
