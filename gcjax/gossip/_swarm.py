"""SwarmSGD: averaging in random pairs, with local steps between, in full precision or on a lattice.

**Source.** Giorgi Nadiradze, Amirmojtaba Sabour, Peter Davies, Shigang Li, Dan Alistarh, "Asynchronous Decentralized
SGD with Quantized and Local Updates" (first "SwarmSGD: Scalable Decentralized SGD with Local Updates"), NeurIPS 2021,
arXiv 1910.12308: the blocking variant.

**Wire format.** In full precision the model, float32[bucket.size] per bucket. With `bits` the words of
`gcjax.gossip._lattice`, and in an all-reduce a flag and one scale per leaf, float32.

**Deviations.** All pairs of a matching exchange at once, because that is what an SPMD program can do;
`gcjax.gossip.simulate` has the asynchronous variants. With `bits` a worker moves by half the difference of the two
rounded models, not to the mean of them: what one gains the other loses, so the mean of all models stays as it is.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.collectives import pmax_if_axes, send
from gcjax._kernels.buckets import layout_of
from gcjax._kernels.groups import leaf_groups
from gcjax._kernels.hashing import step_key
from gcjax._validation import check_integer, check_random_key
from gcjax.gossip import _graphs
from gcjax.gossip._lattice import decode, encode_points, lattice_points, margin, scale_for
from gcjax.gossip._matchings import matchings
from gcjax.gossip._periodic import Outcome, Round, exchanging

_SLACK = 2.0  # margin over the largest distance seen, before the scale is rounded up to a power of two
_DECAY = 0.8  # of the distance remembered, per exchange
_FINEST = 2.0**-24  # of a leaf's largest entry: float32 knows nothing finer


def swarm_average(
    local_steps=2, bits=None, graph="complete", *, key, axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the models of random pairs of workers in every `local_steps`-th update.

    .. math::
        x_i \leftarrow x_i + \tfrac12 (Q(x_j) - Q(x_i))

    for the pairs (i, j) of a matching, which a shared key draws from `matchings(graph, workers)`. Q is the identity, or
    with `bits` the modulo lattice of Davies et al., whose error depends on how far apart the models are and not on how
    large they are. Its scale is one power of two per leaf, from the largest distance lately seen between partners, such
    that the models may be 2 to 4 times as far apart. Where they are further a checksum tells; then all workers repeat
    that exchange in full precision, which is counted in `gcjax.gossip.info`. So they do in the first exchange, before
    any distance is known.

    It ends a chain: `optax.chain(optax.sgd(0.1), gcjax.gossip.swarm_average(bits=8, key=jax.random.key(0),
    axis_name="data"))`. Momentum stays local. An exchange sends one model per worker, 4 or bits / 8 bytes per
    parameter, whatever the number of workers, and with `bits` an all-reduce of one word per leaf, by which all agree on
    the scales and on whether to repeat. Nothing moves in the updates between.

    Args:
      local_steps: updates from one exchange to the next, the last of them included.
      bits: None for full precision, or 4 to 16.
      graph: who may be paired: a name, `random_regular(degree)`, pairs of node numbers or a symmetric bool array. Of an
        odd number of workers one sits out, not always the same one.
      key: random key, made by `jax.random.key(seed)`, the same on all workers.
      axis_name: mesh axis or axes of the workers; None for a single worker, for whom this does nothing.

    Returns:
      A transform whose `update(updates, state, params)` needs the worker's own parameters, a pytree of floating-point
      leaves, and returns updates with which `optax.apply_updates` gives the averaged ones.

    Raises:
      TypeError, ValueError: for an argument out of range; for an unconnected graph, here where its number of nodes is
        known, else from `update`.

    **Randomness**: matchings and roundings are the same draws on all workers. **Bias**: none; the mean over the workers
    is kept to rounding errors of float32. **Non-finite input** spreads to the partners and is not hidden: put
    `optax.apply_if_finite` around the optimiser before this transform, not around the chain, since a worker that skips
    an exchange would leave the others waiting.

    >>> import gcjax, jax, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.5), gcjax.gossip.swarm_average(key=jax.random.key(0)))
    >>> params = jnp.ones(3)
    >>> tx.update(params, tx.init(params), params)[0].tolist()
    [-0.5, -0.5, -0.5]
    """
    check_random_key("key", key)
    _graphs.check(graph)
    if bits is not None:
        check_integer("bits", bits, 4, 16)

    def init_method(params):
        """The margins wanted, float32 per leaf of each bucket; 0 as long as no distance is known."""
        buckets = layout_of(params).buckets if bits is not None else ()
        return tuple(jnp.zeros(len(bucket.segments)) for bucket in buckets)

    def exchange(before: Round, method) -> Outcome:
        models = before.models()
        if before.workers == 1:
            return Outcome([jnp.zeros_like(x) for x in models], method, 0, False, False)
        family = matchings(graph, before.workers)
        drawn = jax.random.randint(jax.random.fold_in(key, before.number), (), 0, len(family))
        paired = jnp.asarray(family != np.arange(before.workers))[drawn, before.rank]

        def swap(payloads):
            """One branch per matching: a permutation of devices must be static. Only the one drawn is run."""
            branches = [functools.partial(_send_all, partner, before.axes) for partner in family]
            return lax.switch(drawn, branches, payloads)

        if bits is None:
            return _in_full(models, paired, swap)
        return _on_lattice(before, models, paired, swap, method, bits, key)

    return exchanging(init_method, exchange, local_steps, axis_name)


def _send_all(partner, axes, payloads):
    return [send(x, partner, axes) for x in payloads]


def _in_full(models, paired, swap) -> Outcome:
    changes = [_half(theirs - own, paired) for theirs, own in zip(swap(models), models, strict=True)]
    return Outcome(changes, (), jnp.where(paired, _length(models), 0), paired, False)


def _on_lattice(before: Round, models, paired, swap, reaches, bits: int, key) -> Outcome:
    """reaches: float32, the margins wanted, per leaf of each bucket, the same on all workers."""
    # Written out once: computed again for another use, with other fused multiplications, a model could lie on the other
    # side of a rounding there, and its owner would believe in another point than it sent.
    models = lax.optimization_barrier(models)
    buckets = before.layout.buckets
    groups = [leaf_groups(bucket) for bucket in buckets]
    scales = [g.per_entry(scale_for(reach, bits)) for g, reach in zip(groups, reaches, strict=True)]
    keys = [step_key(key, before.number, bucket) for bucket in buckets]
    points = [lattice_points(x, s, k) for x, s, k in zip(models, scales, keys, strict=True)]
    payloads = [encode_points(*p, bits) for p in points]
    theirs = [decode(words, x, s, bits) for words, x, s in zip(swap(payloads), models, scales, strict=True)]
    own = [p.astype(jnp.float32) * s for (p, _), s in zip(points, scales, strict=True)]
    distances = [x - y for (x, _), y in zip(theirs, own, strict=True)]
    finest = [margin(_FINEST, bits) * g.maxima(jnp.abs(x))[0] for g, x in zip(groups, models, strict=True)]

    def wanted(distances):
        """The margins for next time, float32 per leaf; nothing where they are not finite."""
        found = zip(groups, distances, finest, strict=True)
        reach = [jnp.maximum(jnp.where(paired, _SLACK * g.maxima(jnp.abs(d))[0], 0), f) for g, d, f in found]
        return jnp.concatenate([jnp.where(jnp.isfinite(r), r, 0) for r in reach])

    failed = paired & ~jnp.all(jnp.stack([ok for _, ok in theirs]))
    agreed = pmax_if_axes(jnp.concatenate([failed.astype(jnp.float32)[None], wanted(distances)]), before.axes)
    failed = agreed[0] > 0

    def repeat(_):
        distances = [x - y for x, y in zip(swap(models), models, strict=True)]
        return [_half(d, paired) for d in distances], pmax_if_axes(wanted(distances), before.axes)

    def keep(_):
        return [_half(d, paired) for d in distances], agreed[1:]

    changes, found = lax.cond(failed, repeat, keep, None)  # `failed` is equal on all workers: all repeat, or none
    ends = np.cumsum([len(g) for g in groups])[:-1]
    reaches = [jnp.maximum(f, _DECAY * r) for f, r in zip(jnp.split(found, ends), reaches, strict=True)]
    # The flag and the reaches go through a ring all-reduce, the latter twice when repeated.
    share = 2 * (before.workers - 1) / before.workers
    words = jnp.where(paired, _length(payloads), 0) + math.ceil(share * agreed.size)
    again = jnp.where(paired, _length(models), 0) + math.ceil(share * found.size)
    words = words + jnp.where(failed, again, 0)
    return Outcome(changes, tuple(reaches), words, paired, failed & (before.number > 0))


def _half(distance, paired):
    return jnp.where(paired, distance / 2, 0)


def _length(vectors) -> int:
    return sum(len(x) for x in vectors)
