"""`python -m gcjax selfcheck`: do the laws hold on the devices at hand?

Each method takes a few steps on every device. Looked at are the bits of the updates, what is left over, and the
collectives of the program that XLA has compiled for these devices.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gcjax
from gcjax._core.state import compress_states
from gcjax._hlo import collectives, totals

SHAPES = [(96, 128), (128,), (), (3, 3, 16, 16)]
STEPS = 4
ENTRIES = sum(map(math.prod, SHAPES))
Make = Callable[[str], optax.GradientTransformationExtraArgs]
# Both transports, and every kind of collective.
METHODS: dict[str, Make] = {
    "dense": lambda axis: gcjax.dense_compress(axis_name=axis),
    "variance, all_gather": lambda axis: _variance("all_gather", axis),
    "variance, two_phase": lambda axis: _variance("two_phase", axis),
    "top_k": lambda axis: gcjax.top_k_compress(0.01, axis_name=axis),
    "qsgd": lambda axis: gcjax.qsgd_compress(4, key=jax.random.key(0), axis_name=axis),
    "power_sgd": lambda axis: gcjax.power_sgd_compress(2, key=jax.random.key(0), axis_name=axis),
    "onebit": lambda axis: gcjax.onebit_compress(axis_name=axis),
}
UNBIASED = ("qsgd",)  # keep nothing of what they do not send


def _variance(transport: str, axis: str) -> optax.GradientTransformationExtraArgs:
    return gcjax.variance_compress(1.0, threshold=0.5, transport=transport, axis_name=axis)


class Check(NamedTuple):
    """One law on one method.

    Attributes:
      method: as in `METHODS`.
      law: in words.
      holds: whether it does.
      found: what was measured.
    """

    method: str
    law: str
    holds: bool
    found: str


def selfcheck(mesh: jax.sharding.Mesh, methods: dict[str, Make] = METHODS) -> Iterator[Check]:
    """The laws on every method, with one worker on each device of a mesh with one axis.

    Yields:
      For each method whether all workers have the same bits, nothing is lost, the compiled program moves the bytes that
      `gcjax.info` reports, and reduces nothing of the gradient's size; at the end, whether gradients in `shard_map` are
      each worker's own.
    """
    for name, make in methods.items():
        yield from _check_method(name, make, mesh)
    yield _check_gradients(mesh)


def _check_method(name: str, make: Make, mesh: jax.sharding.Mesh) -> Iterator[Check]:
    (axis,), workers = mesh.axis_names, mesh.size
    tx = make(axis)
    state = gcjax.distribute(tx.init([jnp.zeros(shape) for shape in SHAPES]), mesh)
    specs = gcjax.state_specs(state)

    def local(gradient, state):
        gradient = [x[0] for x in gradient]
        updates, state = tx.update(gradient, state, sum_grad_squared=[g**2 / 4 for g in gradient])
        return [x[None] for x in updates], state  # stacked, so that the workers' bits can be compared

    over = PartitionSpec(axis)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(over, specs), out_specs=(over, specs)))
    rng, equal = np.random.default_rng(0), True
    given, sent = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for _ in range(STEPS):
        gradient = [rng.normal(size=(workers, *shape)).astype(np.float32) for shape in SHAPES]
        placed = jax.device_put(gradient, NamedSharding(mesh, over))
        updates, state = jax.block_until_ready(run(placed, state))
        for leaf, x in enumerate(map(np.asarray, updates)):
            equal &= bool((x.view(np.uint32) == x[:1].view(np.uint32)).all())
            sent[leaf] += x[0]
            given[leaf] += gradient[leaf].mean(0, dtype=np.float64)
    yield Check(name, "the same bits on all workers", equal, "")
    if name not in UNBIASED:
        error = _lost(state, given, sent)
        yield Check(name, "nothing is lost", error < 1e-5, f"{error:.1e} of the gradients")
    moved = collectives(run.lower(placed, state).compile().as_text() or "")
    reported = gcjax.info(state).wire_bytes
    near = min(totals(moved), key=lambda total: abs(total - reported))
    text = f"{reported:,.0f} bytes reported, {near:,.0f} in the program"
    yield Check(name, "the program moves the bytes that are reported", abs(near - reported) <= 0.01 * reported, text)
    if name != "dense":
        largest = max((c.elements for c in moved if c.kind == "all-reduce"), default=0)
        found = f"at most {largest:,} of {ENTRIES:,} entries are reduced"
        yield Check(name, "no all-reduce of the gradient's size", largest < ENTRIES / 2, found)


def _lost(state: gcjax.CompressState, given: list[np.ndarray], sent: list[np.ndarray]) -> float:
    """The share of the dense means that is neither in the updates nor in the residuals."""
    left = [np.zeros(shape) for shape in SHAPES]
    buckets = compress_states(state)[0].buckets
    for bucket in jax.device_get(buckets.stacked()):
        for worker in range(buckets.workers):
            own = jax.tree.map(lambda x, worker=worker: jnp.asarray(x[worker]), bucket)
            for segment, x in zip(bucket.bucket.segments, bucket.bucket.split(own.residual), strict=True):
                left[segment.leaf] += np.asarray(x, np.float64) / buckets.workers
    lost = [g - s - x for g, s, x in zip(given, sent, left, strict=True)]
    errors, whole = (np.linalg.norm([np.linalg.norm(x) for x in leaves]) for leaves in (lost, given))
    return float(errors / whole)


def _check_gradients(mesh: jax.sharding.Mesh) -> Check:
    (axis,), workers = mesh.axis_names, mesh.size

    def local(w, x):
        return gcjax.local_gradients(jax.grad(lambda w: jnp.sum(w * x)), axis)(w)[None]

    over = PartitionSpec(axis)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), over), out_specs=over))
    x = jax.device_put(np.arange(1, workers + 1, dtype=np.float32), NamedSharding(mesh, over))
    found = np.asarray(run(jnp.float32(1.0), x))
    return Check("local_gradients", "each worker has its own gradient", bool((found == np.asarray(x)).all()), "")
