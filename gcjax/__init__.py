"""gcjax: gradient compression for data-parallel training in JAX, as optax transforms."""

from gcjax import contrib, extend, gossip, methods
from gcjax._comm.link import Link
from gcjax._core.check_training import check_training
from gcjax._core.info import Info, info
from gcjax._core.missing_squares import MissingSquaresWarning
from gcjax._core.per_worker import PerWorker
from gcjax._core.scaling import ScaleFirstState, scale_first
from gcjax._core.state import CompressState
from gcjax._core.transform import compress
from gcjax._export import register_states
from gcjax._jax_compat import UntestedJaxWarning
from gcjax._moments import Moments, check_moments, explain_moments, value_and_moments
from gcjax._planner.costs import measure_costs
from gcjax._planner.measuring import Cost, Method
from gcjax._planner.plan import plan
from gcjax._planner.prediction import Plan
from gcjax._training.compressed_grad import compressed_value_and_grad
from gcjax._training.consistency import check_agreement
from gcjax._training.local import local_gradients, local_transform
from gcjax._training.make_step import make_train_step
from gcjax._training.resize import resize, restore_target
from gcjax._training.sharding import distribute, init_sharded, state_specs
from gcjax._training.step import Metrics, TrainState
from gcjax._version import __version__ as __version__
from gcjax.methods import *  # noqa: F403

__all__ = [
    "CompressState",
    "Cost",
    "Info",
    "Link",
    "Method",
    "Metrics",
    "MissingSquaresWarning",
    "Moments",
    "PerWorker",
    "Plan",
    "ScaleFirstState",
    "TrainState",
    "UntestedJaxWarning",
    "check_agreement",
    "check_moments",
    "check_training",
    "compress",
    "compressed_value_and_grad",
    "contrib",
    "distribute",
    "explain_moments",
    "extend",
    "gossip",
    "info",
    "init_sharded",
    "local_gradients",
    "local_transform",
    "make_train_step",
    "measure_costs",
    "plan",
    "resize",
    "restore_target",
    "scale_first",
    "state_specs",
    "value_and_moments",
]
__all__ += methods.__all__

register_states()
