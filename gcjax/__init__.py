"""gcjax: gradient compression for data-parallel training in JAX, as optax transforms."""

from gcjax._delay import DelayState, delay
from gcjax._info import Info, info
from gcjax._moments import Moments, check_moments, explain_moments, value_and_moments
from gcjax._place import local_gradients, per_worker, place, state_specs
from gcjax._train import Metrics, TrainState, make_train_step
from gcjax._transform import CompressState, compress
from gcjax._types import Comm, Compressor, PerWorker, Sent
from gcjax.methods.dense import dense_compress
from gcjax.methods.ef_sign import ef_sign_compress
from gcjax.methods.strom import strom_compress
from gcjax.methods.top_k import top_k_compress
from gcjax.methods.variance import variance_compress

__version__ = "0.1.0"

__all__ = [
    "Comm",
    "CompressState",
    "Compressor",
    "DelayState",
    "Info",
    "Metrics",
    "Moments",
    "PerWorker",
    "Sent",
    "TrainState",
    "check_moments",
    "compress",
    "delay",
    "dense_compress",
    "ef_sign_compress",
    "explain_moments",
    "info",
    "local_gradients",
    "make_train_step",
    "per_worker",
    "place",
    "state_specs",
    "strom_compress",
    "top_k_compress",
    "value_and_moments",
    "variance_compress",
]
