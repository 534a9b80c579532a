"""The methods that people pick, one module each: `gcjax.variance_compress`. `gcjax.contrib` has more."""

from gcjax.methods.dense import dense_compress
from gcjax.methods.dgc import dgc_compress
from gcjax.methods.ef_sign import ef_sign_compress
from gcjax.methods.onebit import onebit_compress
from gcjax.methods.power_sgd import power_sgd_compress
from gcjax.methods.qsgd import qsgd_compress
from gcjax.methods.sparse_loco import sparse_loco_compress
from gcjax.methods.top_k import top_k_compress
from gcjax.methods.variance import variance_compress

__all__ = [
    "dense_compress",
    "dgc_compress",
    "ef_sign_compress",
    "onebit_compress",
    "power_sgd_compress",
    "qsgd_compress",
    "sparse_loco_compress",
    "top_k_compress",
    "variance_compress",
]
