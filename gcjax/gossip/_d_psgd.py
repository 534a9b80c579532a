"""D-PSGD: in every update a weighted mean with all neighbours on a fixed graph.

**Source.** Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can Decentralized Algorithms
Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent", NeurIPS 2017,
arXiv 1705.09056, algorithm 1.

**Wire format.** Per bucket the model, float32[bucket.entries], to every neighbour; on the complete graph an all-reduce.

**Deviations.** None. The local update may come from any optimiser.
"""

import jax.numpy as jnp
import numpy as np
import optax

from gcjax._comm.collectives import dense_mean, send
from gcjax._types import AxisNames, PyTree
from gcjax.gossip._graphs import Graph, adjacency, check_graph, mixing_matrix
from gcjax.gossip._matchings import rounds
from gcjax.gossip._periodic import (
    ExchangeInput,
    ExchangeResult,
    leaves_of,
    no_exchange,
    periodic_exchange,
    vectors_of,
)


def d_psgd(graph: Graph = "ring", *, axis_name: AxisNames = None) -> optax.GradientTransformationExtraArgs:
    """Averages every worker's model with its neighbours' while it takes its own step.

        x_i <- sum_j W_ij x_j + u_i

    with the incoming updates u and the weights W of `mixing_matrix`: 1/3 each on a ring. The larger
    `gcjax.gossip.spectral_gap(graph, workers)`, the faster the workers agree. It ends a chain. An update sends one
    model, 4 bytes per parameter, to each neighbour.

    Args:
      graph: a name, or an array bool[workers, workers] whose entry [i, j] says that i sends to j; if directed, it must
        be regular.
      axis_name: mesh axis or axes of the workers; None for a single worker, for which this does nothing.

    Returns:
      A transform like that of `gcjax.gossip.swarm_average`, also for input that is not finite.

    Raises:
      TypeError, ValueError: not a graph; an unconnected graph; (from `update`) a graph that does not fit.

    >>> import gcjax, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.5), gcjax.gossip.d_psgd("ring"))  # a single worker: nothing is averaged
    >>> params = jnp.ones(3)
    >>> tx.update(params, tx.init(params), params)[0].tolist()
    [-0.5, -0.5, -0.5]
    """
    check_graph(graph)

    def exchange(inputs: ExchangeInput, method: PyTree) -> ExchangeResult:
        models, workers, length = vectors_of(inputs.params), inputs.workers, inputs.layout.entries
        if workers == 1:
            return no_exchange(inputs, method)
        if isinstance(graph, str) and graph == "complete":
            changes = [dense_mean(x, inputs.axes) - x for x in models]
            words = -(-2 * (workers - 1) * length // workers)
            return ExchangeResult(leaves_of(inputs.layout, changes), method, words, True)
        weights, everyone = mixing_matrix(graph, workers), np.arange(workers)
        changes = [jnp.zeros_like(x) for x in models]
        for to in rounds(graph, workers):
            senders = everyone[to != everyone]
            receiver_weights = np.zeros(workers, np.float32)
            receiver_weights[to[senders]] = weights[to[senders], senders]
            weight = jnp.asarray(receiver_weights)[inputs.rank]
            for k, x in enumerate(models):
                changes[k] += weight * (send(x, to, inputs.axes) - x)
        degrees = adjacency(graph, workers).sum(1)
        if (most := int(degrees.max()) * length) >= 2**32:
            raise ValueError(
                f"a worker sends {most:,} entries in one exchange, and gcjax.gossip counts to {2**32 - 1:,}; give a "
                'graph of fewer neighbours such as "ring", or use gcjax.gossip.swarm_average'
            )
        degree = jnp.asarray(degrees, jnp.uint32)[inputs.rank]
        return ExchangeResult(leaves_of(inputs.layout, changes), method, degree * length, True)

    return periodic_exchange(lambda params: (), exchange, 1, axis_name)
