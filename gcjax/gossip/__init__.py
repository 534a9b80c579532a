"""Training without a global round: SwarmSGD and the decentralised family."""

from gcjax._core.info import GossipInfo
from gcjax._core.own_models import GossipState
from gcjax.gossip._d_psgd import d_psgd
from gcjax.gossip._graphs import spectral_gap
from gcjax.gossip._local_sgd import local_sgd
from gcjax.gossip._models import ConsensusDistance, consensus_distance, mean_params, worker_params
from gcjax.gossip._sgp import sgp
from gcjax.gossip._simulate.api import Curves, simulate
from gcjax.gossip._swarm import swarm_average

__all__ = [
    "ConsensusDistance",
    "Curves",
    "GossipInfo",
    "GossipState",
    "consensus_distance",
    "d_psgd",
    "local_sgd",
    "mean_params",
    "sgp",
    "simulate",
    "spectral_gap",
    "swarm_average",
    "worker_params",
]
