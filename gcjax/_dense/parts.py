"""Codes of every entry in two phases, whose traffic does not grow with the number of workers.

Every leaf is cut, in C order, into as many pieces of equal size as there are workers; zeros pad the last ones. Worker w
owns piece w of every leaf. The pieces of a worker are its part, and all parts have the layout of one `Bucket`: a method
encodes and decodes a part as if it were a model. In the first phase every worker sends each owner the code of its part,
and the owner averages them. In the second phase it sends the code of the mean to all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gcjax._comm.comm import Comm
from gcjax._jax_compat import vary_like
from gcjax._kernels.buckets import Bucket, bucket_of
from gcjax._types import Array

UNROLLED = 16  # payloads of up to this many workers are decoded in one pass over the entries


def goes_through_owners(transport: str, comm: Comm, words_of: Callable[[int], int]) -> bool:
    """Whether messages take two phases here.

    Args:
      transport: "all_gather", "two_phase", or "auto" for the one that moves fewer words. Two workers then always
        gather: two phases could only save padding, and owners would need state.
      comm: the collectives.
      words_of: words_of(n) -> words of a message of one n-th of the entries.

    >>> import types, jax.numpy as jnp, gcjax.extend as gx
    >>> comm = types.SimpleNamespace(size=8)  # stands for a `Comm`
    >>> gx.goes_through_owners("auto", comm, lambda n: 1000 // n)
    True
    """
    if transport == "auto":
        return comm.size > 2 and 2 * words_of(comm.size) < words_of(1)
    return transport == "two_phase" and comm.size > 1


def part_of(bucket: Bucket, workers: int) -> Bucket:
    """The layout of every worker's part. `Segment.leaf` is the number of the bucket's segment."""
    sizes = [-(-s.size // workers) for s in bucket.segments]
    return bucket_of([(i, 0, size) for i, size in enumerate(sizes)], [(size,) for size in sizes])


def cut(leaves: Sequence[Array], bucket: Bucket, workers: int) -> Array:
    """The parts of all workers, float32[workers, blocks, 32, 128], from arrays of the bucket's segments."""
    part = part_of(bucket, workers)

    def pieces(x: Array, size: int) -> Array:
        return jnp.pad(x.reshape(-1), (0, workers * size - x.size)).reshape(workers, size)

    return jax.vmap(part.join)([pieces(leaves[s.leaf], s.size) for s in part.segments])


def uncut(parts: Array, bucket: Bucket) -> tuple[Array, ...]:
    """The inverse of `cut`."""
    part = part_of(bucket, len(parts))
    pieces = {s.leaf: x for s, x in zip(part.segments, jax.vmap(part.split)(parts), strict=True)}
    return tuple(pieces[i].reshape(-1)[: s.size].reshape(s.shape) for i, s in enumerate(bucket.segments))


def parameters_of(x: Array, rank: Array, bucket: Bucket, workers: int) -> Array:
    """The part of this worker with zeros wherever it holds no parameter: in the last pieces of leaves, too."""
    part = part_of(bucket, workers)
    valid = [rank * s.size + jnp.arange(s.size) < bucket.segments[s.leaf].size for s in part.segments]
    return jnp.where(part.join([v.astype(jnp.float32) for v in valid]) > 0, x, 0)


def add_decoded(total: Array, payloads: Array, decode: Callable[[Array], Array]) -> Array:
    """`total` plus the mean of decode(payload) over the workers' payloads.

    Workers are added in the order of their numbers, so that the mean is bit-equal everywhere on any backend.

    >>> import jax.numpy as jnp, gcjax.extend as gx
    >>> payloads = jnp.uint32([[1, 2], [3, 4]])  # of two workers
    >>> print(gx.add_decoded(jnp.zeros(2), payloads, jnp.float32))
    [2. 3.]
    """
    workers = len(payloads)

    def add(worker: Array | int, total: Array) -> Array:
        return total + decode(payloads[worker]) / workers

    def in_turn() -> Array:
        return lax.fori_loop(0, workers, add, vary_like(total, payloads))

    def in_one_pass() -> Array:
        return functools.reduce(lambda total, worker: add(worker, total), range(workers), vary_like(total, payloads))

    if workers > UNROLLED:
        return in_turn()
    # XLA makes one pass of it, but not for TPUs, where it would hold what all payloads decode to at once.
    return lax.platform_dependent(tpu=in_turn, default=in_one_pass)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The `Sharing` of a bucket in parts of pieces.

    Attributes:
      fewest: workers from which on there are owners.
    """

    fewest: int = 2

    def shape(self, bucket: Bucket, workers: int) -> tuple[int, ...] | None:
        return part_of(bucket, workers).shape if workers >= self.fewest else None

    def deal(self, x: Array, bucket: Bucket, workers: int) -> Array:
        return cut(bucket.split(x), bucket, workers)

    def collect(self, parts: Array, bucket: Bucket) -> Array:
        return bucket.join(uncut(parts, bucket))


def pieces_for(transport: str) -> Pieces | None:
    """How a transport shares out a bucket; None for "all_gather". "auto" has owners from three workers on."""
    return {"all_gather": None, "two_phase": Pieces(), "auto": Pieces(fewest=3)}[transport]
