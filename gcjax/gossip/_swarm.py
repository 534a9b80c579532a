"""SwarmSGD: averages random pairs of models every few local steps, in full precision or on a lattice.

**Source.** Giorgi Nadiradze, Amirmojtaba Sabour, Peter Davies, Shigang Li, Dan Alistarh, "Asynchronous Decentralized
SGD with Quantized and Local Updates" (first "SwarmSGD: Scalable Decentralized SGD with Local Updates"), NeurIPS 2021,
arXiv 1910.12308: the blocking variant.

**Wire format.** In full precision the model, float32[bucket.entries] per bucket. With `bits` the words of
`gcjax.gossip._lattice`, and in an all-reduce a flag and one scale per leaf, float32.

**Deviations.** All pairs of a matching exchange at once, because an SPMD program can do no more;
`gcjax.gossip.simulate` has the asynchronous variants. With `bits` a worker moves by half the difference of the two
rounded models, not to their mean: what one gains the other loses, so the mean of all models does not change.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.collectives import pmax_if_axes
from gcjax._jax_compat import in_32_bits
from gcjax._kernels.groups import Groups, leaf_groups
from gcjax._kernels.hashing import step_key
from gcjax._kernels.layout import layout_of
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_integer, check_random_key
from gcjax.gossip._graphs import Graph, check_graph
from gcjax.gossip._lattice import FINEST, decode, encode_points, lattice_points, margin, scale_for
from gcjax.gossip._matchings import matchings
from gcjax.gossip._periodic import (
    ExchangeInput,
    ExchangeResult,
    leaves_of,
    no_exchange,
    periodic_exchange,
    send_in_round,
    vectors_of,
)

_SLACK = 2.0  # margin over the largest distance seen, before the scale is rounded up to a power of two
_DECAY = 0.8  # of the remembered margin, per exchange


def swarm_average(
    local_steps: int = 2,
    bits: int | None = None,
    graph: Graph = "complete",
    *,
    key: Array,
    axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the models of random pairs of workers in every `local_steps`-th update.

        x_i <- x_i + (Q(x_j) - Q(x_i)) / 2

    for the pairs (i, j) of a matching, which a shared key draws from `matchings(graph, workers)`. Without `bits`, Q is
    the identity. With `bits` it is the modulo lattice. Each leaf has one scale, a power of two, chosen from the largest
    recent distance between partners so that the models may be 2 to 4 times as far apart. A checksum detects models that
    are further apart. Then, and in the first exchange, all workers exchange in full precision; `info` counts repeats.

    It ends a chain: `optax.chain(optax.sgd(0.1), gcjax.gossip.swarm_average(bits=8, key=jax.random.key(0),
    axis_name="data"))`. An exchange sends one model per worker, 4 or bits / 8 bytes per parameter; with `bits` also an
    all-reduce of a word per leaf. Other updates send nothing.

    Args:
      local_steps: updates from one exchange to the next, including the one that exchanges.
      bits: None for full precision, or 4 to 16.
      graph: which workers may be paired: a name, or a symmetric array bool[workers, workers]. If the number
        of workers is odd, one sits out, not always the same one.
      key: random key, made by `jax.random.key(seed)`, the same on all workers.
      axis_name: mesh axis or axes of the workers; None for a single worker, for which this does nothing.

    Returns:
      A transform whose `update(updates, state, params)` needs the worker's own floating-point parameters.

    Raises:
      TypeError, ValueError: an argument out of range; (from `update` with a named graph) a graph that does not fit.

    The mean over the workers is kept up to rounding errors of the parameters' dtype. Input that is not finite reaches
    the partners and stays visible: put `optax.apply_if_finite` around the optimiser before this transform, not around
    the chain, because a worker that skips an exchange would leave the others waiting.

    >>> import gcjax, jax, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.5), gcjax.gossip.swarm_average(key=jax.random.key(0)))
    >>> params = jnp.ones(3)
    >>> tx.update(params, tx.init(params), params)[0].tolist()
    [-0.5, -0.5, -0.5]
    """
    check_random_key("key", key)
    check_graph(graph)
    if bits is not None:
        check_integer("bits", bits, 4, 16)

    def init_method(params: PyTree) -> tuple[Array, ...]:
        """The margins that decoding needs, float32 per leaf of each bucket; 0 until a distance is known."""
        buckets = layout_of(params).buckets if bits is not None else ()
        return tuple(jnp.zeros(len(bucket.segments)) for bucket in buckets)

    def exchange(inputs: ExchangeInput, margins: tuple[Array, ...]) -> ExchangeResult:
        if inputs.workers == 1:
            return no_exchange(inputs, margins)
        models = inputs.models()
        family = matchings(graph, inputs.workers)
        drawn = jax.random.randint(jax.random.fold_in(key, inputs.number), (), 0, len(family))
        paired = jnp.asarray(family != np.arange(inputs.workers))[drawn, inputs.rank]

        def swap(payloads):
            return send_in_round(family, drawn, payloads, inputs.axes)

        if bits is None:
            theirs = leaves_of(inputs.layout, swap(vectors_of(models)))
            changes = jax.tree.map(lambda theirs, own: _half(theirs - own, paired), theirs, models)
            return ExchangeResult(changes, (), jnp.where(paired, inputs.layout.entries, 0), paired)
        return _on_lattice(inputs, models, paired, swap, margins, bits, key)

    return periodic_exchange(in_32_bits(init_method), in_32_bits(exchange), local_steps, axis_name)


def _on_lattice(
    inputs: ExchangeInput,
    models: list[tuple[Array, ...]],
    paired: Array,
    swap: Callable[[list[Array]], list[Array]],
    margins: tuple[Array, ...],
    bits: int,
    key: Array,
) -> ExchangeResult:
    """Exchange lattice points, and if any worker cannot decode, whole models.

    `swap` gives the partner's arrays; `margins` are float32 for each leaf of each bucket, the same on all workers.
    """
    buckets = inputs.layout.buckets
    # The barrier writes the models out once. XLA could otherwise compute a model again with other fused
    # multiplications, round it to another lattice point, and the sender would hold another point than it sent.
    arrays = lax.optimization_barrier([bucket.join(leaves) for bucket, leaves in zip(buckets, models, strict=True)])
    groups = [leaf_groups(bucket) for bucket in buckets]
    scales = [g.per_entry(scale_for(m, bits)) for g, m in zip(groups, margins, strict=True)]
    keys = [step_key(key, inputs.number, bucket) for bucket in buckets]
    points = [lattice_points(x, s, k) for x, s, k in zip(arrays, scales, keys, strict=True)]
    payloads = [encode_points(*p, bits, bucket.words) for p, bucket in zip(points, buckets, strict=True)]
    theirs = [decode(words, x, s, bits) for words, x, s in zip(swap(payloads), arrays, scales, strict=True)]
    own = [p.astype(jnp.float32) * s for (p, _), s in zip(points, scales, strict=True)]
    distances = [x - y for (x, _), y in zip(theirs, own, strict=True)]
    finest = [margin(FINEST, bits) * g.maxima(jnp.abs(x))[0] for g, x in zip(groups, arrays, strict=True)]

    failed = paired & ~jnp.all(jnp.stack([ok for _, ok in theirs]))
    wanted = _wanted_margins(groups, distances, finest, paired)
    agreed = pmax_if_axes(jnp.concatenate([failed.astype(jnp.float32)[None], wanted]), inputs.axes)
    failed = agreed[0] > 0

    def repeat(_):
        leaves = [bucket.split(x) for bucket, x in zip(buckets, arrays, strict=True)]
        theirs = leaves_of(inputs.layout, swap(vectors_of(leaves)))
        distances = [bucket.join(x) - y for bucket, x, y in zip(buckets, theirs, arrays, strict=True)]
        wanted = _wanted_margins(groups, distances, finest, paired)
        return [_half(d, paired) for d in distances], pmax_if_axes(wanted, inputs.axes)

    def keep(_):
        return [_half(d, paired) for d in distances], agreed[1:]

    changes, wanted = lax.cond(failed, repeat, keep, None)  # `failed` is equal on all workers: all repeat, or none
    changes = [bucket.split(x) for bucket, x in zip(buckets, changes, strict=True)]
    ends = np.cumsum([len(g) for g in groups])[:-1]
    margins = tuple(jnp.maximum(w, _DECAY * m) for w, m in zip(jnp.split(wanted, ends), margins, strict=True))
    # The flag and the margins go through a ring all-reduce; a repeat reduces the margins again.
    share = 2 * (inputs.workers - 1) / inputs.workers
    words = jnp.where(paired, sum(map(len, payloads)), 0) + math.ceil(share * agreed.size)
    repeat_words = jnp.where(paired, inputs.layout.entries, 0) + math.ceil(share * wanted.size)
    words = words + jnp.where(failed, repeat_words, 0)
    return ExchangeResult(changes, margins, words, paired, failed & (inputs.number > 0))


def _wanted_margins(groups: list[Groups], distances: list[Array], finest: list[Array], paired: Array) -> Array:
    """The margins for the next exchange, float32 for each leaf of all buckets; 0 where they are not finite."""
    found = zip(groups, distances, finest, strict=True)
    wanted = [jnp.maximum(jnp.where(paired, _SLACK * g.maxima(jnp.abs(d))[0], 0), f) for g, d, f in found]
    return jnp.concatenate([jnp.where(jnp.isfinite(w), w, 0) for w in wanted])


def _half(distance: Array, paired: Array) -> Array:
    return jnp.where(paired, distance / 2, 0)
