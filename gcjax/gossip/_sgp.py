"""Stochastic gradient push: one message to one neighbour per update, and weights that undo the bias of the graph.

**Source.** Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Michael Rabbat, "Stochastic Gradient Push for Distributed
Deep Learning", ICML 2019, arXiv 1811.10792, algorithm 1.

**Wire format.** Per bucket float32[bucket.size], half of the biased model x; behind the last bucket half of the weight
w.

**Deviations.** The parameters are the de-biased z = x / w; x is made of them and of w, which the state keeps.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gcjax._comm.collectives import axis_tuple, send
from gcjax._core.per_worker import PerWorker
from gcjax.gossip import _graphs
from gcjax.gossip._matchings import rounds
from gcjax.gossip._periodic import Outcome, Round, exchanging


def sgp(graph="exponential", *, axis_name=None) -> optax.GradientTransformationExtraArgs:
    r"""Sends half of each worker's model on in every update, to its neighbours in turn.

    .. math::
        x_i = w_i z_i + u_i, \qquad (x_i, w_i) \leftarrow \sum_j P_{ij} (x_j, w_j), \qquad z_i = x_i / w_i

    with the updates u that come in. P is column stochastic: a worker keeps a half and sends a half, or keeps all where
    it has no neighbour in this round. **The parameters are z, the de-biased ones**: the gradient is taken at them, and
    nothing else needs to be done. The weights start at 1 and sum to the number of workers; they stay 1 where all always
    send and receive, as on the exponential graph. `gcjax.gossip.info` has them; `mean_params` takes them.

    It ends a chain: `optax.chain(optax.sgd(0.1), gcjax.gossip.sgp(axis_name="data"))`. An update sends at most one
    model, 4 bytes per parameter.

    Args:
      graph: a name, `random_regular(degree)`, pairs of node numbers or a bool array, whose entry [i, j] says that i
        sends to j. Its edges are taken in rounds, in each of which nobody sends or receives twice.
      axis_name: mesh axis or axes of the workers; None for a single worker, for whom this does nothing.

    Returns:
      A transform as `gcjax.gossip.swarm_average` returns it.

    Raises:
      TypeError, ValueError: for something that is no graph; for one that is not strongly connected, here where its
        number of nodes is known, else from `update`.

    **Randomness**: none. **Non-finite input** spreads to the neighbours and is not hidden: put `optax.apply_if_finite`
    around the optimiser before this transform.
    """
    _graphs.check(graph)
    axes = axis_tuple(axis_name)

    def exchange(before: Round, method) -> Outcome:
        if before.workers == 1:
            return Outcome([jnp.zeros_like(x) for x in before.params], method, 0, False, False)
        plan = rounds(graph, before.workers)
        turn = before.number % len(plan)
        sends = jnp.asarray(plan != np.arange(before.workers))[turn, before.rank]
        weight = method.unpack()
        pushed = [weight * z + u for z, u in zip(before.params, before.updates, strict=True)]
        pushed[-1] = jnp.concatenate([pushed[-1], weight[None]])
        kept = [jnp.where(sends, x / 2, x) for x in pushed]

        def push(to, halves):
            return [send(x, to, before.axes) for x in halves]

        came = lax.switch(turn, [functools.partial(push, to) for to in plan], kept)
        total = [x + y for x, y in zip(kept, came, strict=True)]
        weight = total[-1][-1]
        total[-1] = total[-1][:-1]
        old = zip(total, before.params, before.updates, strict=True)
        changes = [x / weight - z - u for x, z, u in old]
        words = jnp.where(sends, sum(len(x) for x in kept), 0)
        return Outcome(changes, PerWorker.pack(weight, axes), words, sends, False)

    return exchanging(lambda params: PerWorker.pack(jnp.float32(1), axes), exchange, 1, axis_name)
