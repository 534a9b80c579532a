"""gcjax: gradient compression for data-parallel training in JAX, as optax transforms."""

from gcjax import gossip
from gcjax._comm.comm import Comm
from gcjax._core.compressor import Compressor, SendReport
from gcjax._core.delay import DelayState, delay
from gcjax._core.info import Info, info
from gcjax._core.per_worker import PerWorker
from gcjax._core.transform import CompressState, compress
from gcjax._moments import Moments, check_moments, explain_moments, value_and_moments
from gcjax._planner.costs import Cost, Method, measure_costs
from gcjax._planner.network import Link
from gcjax._planner.plan import Plan, plan
from gcjax._training.consistency import check_agreement
from gcjax._training.sharding import init_sharded, local_gradients, per_worker, place, state_specs
from gcjax._training.step import Metrics, TrainState, make_train_step
from gcjax.methods.demo import demo_compress
from gcjax.methods.dense import dense_compress
from gcjax.methods.dgc import dgc_compress
from gcjax.methods.drive import drive_compress
from gcjax.methods.drop import drop_compress
from gcjax.methods.dryden import dryden_compress
from gcjax.methods.ef21 import ef21_compress
from gcjax.methods.ef_sign import ef_sign_compress
from gcjax.methods.gaussian_k import gaussian_k_compress
from gcjax.methods.natural import natural_compress
from gcjax.methods.onebit import onebit_compress
from gcjax.methods.power_sgd import power_sgd_compress
from gcjax.methods.qsgd import qsgd_compress
from gcjax.methods.random_k import random_k_compress
from gcjax.methods.sidco import sidco_compress
from gcjax.methods.sign_vote import sign_vote_compress, signum_compress
from gcjax.methods.sketch import sketch_compress
from gcjax.methods.strom import strom_compress
from gcjax.methods.terngrad import terngrad_compress
from gcjax.methods.top_k import top_k_compress
from gcjax.methods.variance import variance_compress

__version__ = "0.1.0"

__all__ = [
    "Comm",
    "CompressState",
    "Compressor",
    "Cost",
    "DelayState",
    "Info",
    "Link",
    "Method",
    "Metrics",
    "Moments",
    "PerWorker",
    "Plan",
    "SendReport",
    "TrainState",
    "check_agreement",
    "check_moments",
    "compress",
    "delay",
    "demo_compress",
    "dense_compress",
    "dgc_compress",
    "drive_compress",
    "drop_compress",
    "dryden_compress",
    "ef21_compress",
    "ef_sign_compress",
    "explain_moments",
    "gaussian_k_compress",
    "gossip",
    "info",
    "init_sharded",
    "local_gradients",
    "make_train_step",
    "measure_costs",
    "natural_compress",
    "onebit_compress",
    "per_worker",
    "place",
    "plan",
    "power_sgd_compress",
    "qsgd_compress",
    "random_k_compress",
    "sidco_compress",
    "sign_vote_compress",
    "signum_compress",
    "sketch_compress",
    "state_specs",
    "strom_compress",
    "terngrad_compress",
    "top_k_compress",
    "value_and_moments",
    "variance_compress",
]
