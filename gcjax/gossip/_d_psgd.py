"""D-PSGD: in every update a weighted mean with all neighbours on a fixed graph.

**Source.** Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can Decentralized Algorithms
Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent", NeurIPS 2017,
arXiv 1705.09056, algorithm 1.

**Wire format.** The model, float32[bucket.size] per bucket, to every neighbour; on the complete graph one all-reduce.

**Deviations.** None. The local update may come from any optimiser.
"""

import jax.numpy as jnp
import numpy as np
import optax

from gcjax._comm.collectives import dense_mean, send
from gcjax.gossip import _graphs
from gcjax.gossip._matchings import rounds
from gcjax.gossip._periodic import Outcome, Round, exchanging


def d_psgd(graph="ring", *, axis_name=None) -> optax.GradientTransformationExtraArgs:
    r"""Averages every worker's model with its neighbours' while it takes its own step.

    .. math::
        x_i \leftarrow \sum_j W_{ij} x_j + u_i

    with the updates u that come in and the weights W of `mixing_matrix`: 1/3 each on a ring. Workers agree the faster
    the larger `gcjax.gossip.spectral_gap(graph, workers)` is. What is averaged are the models before the local update,
    so communication need not wait for the gradient.

    It ends a chain: `optax.chain(optax.sgd(0.1), gcjax.gossip.d_psgd("ring", axis_name="data"))`. An update sends one
    model, 4 bytes per parameter, to each neighbour.

    Args:
      graph: a name, `random_regular(degree)`, pairs of node numbers or a bool array; regular where it is directed.
      axis_name: mesh axis or axes of the workers; None for a single worker, for whom this does nothing.

    Returns:
      A transform as `gcjax.gossip.swarm_average` returns it.

    Raises:
      TypeError, ValueError: for something that is no graph; for an unconnected one, here where its number of nodes is
        known, else from `update`.

    **Randomness**: none. **Non-finite input** spreads to the neighbours and is not hidden: put `optax.apply_if_finite`
    around the optimiser before this transform.
    """
    _graphs.check(graph)

    def exchange(before: Round, method) -> Outcome:
        models, workers = before.params, before.workers
        if workers == 1:
            return Outcome([jnp.zeros_like(x) for x in models], method, 0, False, False)
        length = sum(len(x) for x in models)
        if isinstance(graph, str) and graph == "complete":
            changes = [dense_mean(x, before.axes) - x for x in models]
            return Outcome(changes, method, -(-2 * (workers - 1) * length // workers), True, False)
        weights, everyone = _graphs.mixing_matrix(graph, workers), np.arange(workers)
        changes = [jnp.zeros_like(x) for x in models]
        for to in rounds(graph, workers):
            senders = everyone[to != everyone]
            taken = np.zeros(workers, np.float32)  # the weight with which each takes what it gets
            taken[to[senders]] = weights[to[senders], senders]
            weight = jnp.asarray(taken)[before.rank]
            for k, x in enumerate(models):
                changes[k] += weight * (send(x, to, before.axes) - x)
        degree = jnp.asarray(_graphs.neighbours(graph, workers)[1])[before.rank]
        return Outcome(changes, method, degree * length, True, False)

    return exchanging(lambda params: (), exchange, 1, axis_name)
