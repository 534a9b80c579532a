"""The state of a compressing transform, and where to find it in that of an optimiser."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax._core.compressor import SendReport
from gcjax._core.mixing import Mixing
from gcjax._core.options import meaning
from gcjax._core.per_worker import PerWorker
from gcjax._core.symptoms import Symptoms
from gcjax._types import Array, PyTree


class UpdateReport(NamedTuple):
    """What the last update sent, summed over the buckets. Scalars of one worker.

    Attributes:
      sent: `SendReport`.
      parameters: float32, entries of the model.
      workers: int32, number of workers.
      inner_workers: int32, inner workers of each.
      skipped: int32, updates so far that were skipped because some worker's input was not finite.
      saturated: int32, entries of the last update that lie beyond the range of their leaf's dtype, such as float16.
      symptoms: `Symptoms`, signs of mistakes.
      options: uint32, checksum of the options that made the state.
    """

    sent: SendReport
    parameters: Array
    workers: Array
    inner_workers: Array
    skipped: Array
    saturated: Array
    symptoms: Symptoms
    options: Array

    def mixed(self, mixing: Mixing) -> "UpdateReport":
        """As before the first update; only skipped steps still count, and the options are the same."""
        _reject_shards(self, mixing.old)
        fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (mixing.new, *jnp.shape(x))), fresh_report(0))
        names = "parameters", "skipped", "options"
        kept = mixing.equal({name: getattr(self, name) for name in names})
        return fresh._replace(**kept)


def _reject_shards(report: UpdateReport, nodes: int) -> None:
    """Raise ValueError if the nodes of a state are not one for each worker."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(report)):
        return
    workers = int(np.max(report.workers, initial=1))
    if workers != nodes and any(np.any(x) for x in jax.tree.leaves(report.sent)):
        raise ValueError(
            f"the state has {nodes} parts for {workers} worker(s): the parameters are sharded, and each shard has "
            "state of its own, which cannot be mixed with that of another. Gather the parameters, and begin with "
            "new state for the compressor"
        )


def fresh_report(parameters: int, options: int = 0) -> UpdateReport:
    """The report before the first update."""
    none, no_bytes = jnp.int32(0), jnp.float32(0)
    return UpdateReport(
        sent=SendReport(none, none, none, none, none, no_bytes, no_bytes, no_bytes),
        parameters=jnp.float32(parameters),
        workers=jnp.int32(1),
        inner_workers=jnp.int32(1),
        skipped=none,
        saturated=none,
        symptoms=Symptoms.create(),
        options=jnp.uint32(options),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressState:
    """State of a compressing transform.

    Attributes:
      buckets: PerWorker, a tuple with the method's state of each bucket.
      report: PerWorker, an `UpdateReport`.
      reads_squares: whether the method reads `sum_grad_squared`. Static: a training step looks here before it computes
        any.
    """

    buckets: PerWorker
    report: PerWorker
    reads_squares: bool = dataclasses.field(metadata={"static": True})


def is_compress_state(node: object) -> bool:
    return isinstance(node, CompressState)


def reads_squares(tree: PyTree) -> bool:
    """Whether any compressor whose state is in the tree reads `sum_grad_squared`."""
    return any(node.reads_squares for node in compress_states(tree))


def options_of(state: CompressState) -> dict[str, str]:
    """The `meaning` of a state, of one worker or of all."""
    return meaning(state.buckets.of_one())


def compress_states(tree: PyTree) -> list[CompressState]:
    """The compressors' states within an optimiser's, in the order of its leaves."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_compress_state) if is_compress_state(node)]
