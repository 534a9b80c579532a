"""Stochastic gradient push: one message to one neighbour per update, and weights that undo the bias of the graph.

**Source.** Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Michael Rabbat, "Stochastic Gradient Push for Distributed
Deep Learning", ICML 2019, arXiv 1811.10792, algorithm 1.

**Wire format.** Per bucket half of the biased model x, float32[bucket.entries]; after the last, half of the weight w.

**Deviations.** The parameters are the de-biased z = x / w. x is computed from them and from w, which the state keeps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._comm.collectives import axis_tuple
from gcjax._core.per_worker import PerWorker
from gcjax._types import AxisNames
from gcjax.gossip._graphs import Graph, check_graph
from gcjax.gossip._matchings import rounds
from gcjax.gossip._periodic import (
    ExchangeInput,
    ExchangeResult,
    leaves_of,
    no_exchange,
    periodic_exchange,
    send_in_round,
    vectors_of,
)


def sgp(graph: Graph = "exponential", *, axis_name: AxisNames = None) -> optax.GradientTransformationExtraArgs:
    """Sends half of each worker's model in every update, to its neighbours in turn.

        x_i = w_i z_i + u_i
        (x_i, w_i) <- sum_j P_ij (x_j, w_j)
        z_i = x_i / w_i

    with the incoming updates u. P is column stochastic: a worker keeps half and sends half, or keeps everything if it
    has no neighbour in this round. **The parameters are z, the de-biased ones**: the gradient is taken at them. The
    weights start at 1 and sum to the number of workers. They stay 1 if every worker sends and receives in every round,
    as on the exponential graph. `gcjax.info` returns them, and `mean_params` takes them. It ends a chain. An
    update sends at most one model, 4 bytes per parameter.

    Args:
      graph: a name, or an array bool[workers, workers] whose entry [i, j] says that i sends to j. Its edges are
        used in rounds, in each of which no worker sends or receives twice.
      axis_name: mesh axis or axes of the workers; None for a single worker, for which this does nothing.

    Returns:
      A transform like that of `gcjax.gossip.swarm_average`, also for input that is not finite.

    Raises:
      TypeError, ValueError: not a graph; a graph that is not strongly connected; (from `update`) one that does not fit.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.5), gcjax.gossip.sgp())  # a single worker: nothing is sent
    >>> params = jnp.ones(3)
    >>> tx.update(params, tx.init(params), params)[0].tolist()
    [-0.5, -0.5, -0.5]
    """
    check_graph(graph)
    axes = axis_tuple(axis_name)

    def exchange(inputs: ExchangeInput, method: PerWorker) -> ExchangeResult:
        if inputs.workers == 1:
            return no_exchange(inputs, method)
        plan = rounds(graph, inputs.workers)
        turn = inputs.number % len(plan)
        sends = jnp.asarray(plan != np.arange(inputs.workers))[turn, inputs.rank]
        weight = method.unpack()
        pushed = vectors_of(jax.tree.map(lambda z, u: weight * z + u, inputs.params, inputs.updates))
        pushed[-1] = jnp.concatenate([pushed[-1], weight[None]])
        kept = [jnp.where(sends, x / 2, x) for x in pushed]
        received = send_in_round(plan, turn, kept, inputs.axes)
        total = [x + y for x, y in zip(kept, received, strict=True)]
        weight = total[-1][-1]
        models = leaves_of(inputs.layout, [*total[:-1], total[-1][:-1]])
        changes = jax.tree.map(lambda x, z, u: x / weight - z - u, models, inputs.params, inputs.updates)
        words = jnp.where(sends, inputs.layout.entries + 1, 0)
        return ExchangeResult(changes, PerWorker.pack(weight, axes), words, sends)

    return periodic_exchange(lambda params: PerWorker.pack(jnp.float32(1), axes), exchange, 1, axis_name)
