"""The methods that the planner compares unless told otherwise."""

from statistics import NormalDist

import jax

from gcjax._planner.measuring import Method
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


def standard_methods(density: float) -> dict[str, Method]:
    """Every public method, by the name under which its cost is kept. Payloads have exactly the slots that they need."""
    key = jax.random.key(0)
    # A standard normal exceeds this with the probability `density`.
    threshold = max(NormalDist().inv_cdf(1 - density / 2), 1e-6)

    def slots(entries):
        return max(1, round(density * entries))

    def sparse(make, **more):
        return Method(make, sparse=True, **more)

    def variance(transport):
        return sparse(lambda n: variance_compress(1.0, capacity=slots(n), transport=transport), squares=True)

    return {
        "dense float32": Method(lambda n: dense_compress()),
        "dense float16": Method(lambda n: dense_compress("float16")),
        "variance": variance("all_gather"),
        "variance (reduce_scatter)": variance("reduce_scatter"),
        "strom": sparse(lambda n: strom_compress(threshold, capacity=slots(n))),
        "top_k": sparse(lambda n: top_k_compress(density)),
        "top_k (reduce_scatter)": sparse(lambda n: top_k_compress(density, transport="reduce_scatter")),
        "dgc": sparse(lambda n: dgc_compress(density)),
        "drop": sparse(lambda n: drop_compress(density, capacity=slots(n))),
        "gaussian_k": sparse(lambda n: gaussian_k_compress(density, capacity=slots(n))),
        "sidco": sparse(lambda n: sidco_compress(density, capacity=slots(n))),
        "dryden": sparse(lambda n: dryden_compress(density, capacity=slots(n))),
        "random_k": sparse(lambda n: random_k_compress(density, key=key)),
        "ef21": sparse(lambda n: ef21_compress(density)),
        "sketch": sparse(lambda n: sketch_compress(density, key=key)),
        "demo": Method(lambda n: demo_compress()),
        "qsgd 4 bits": Method(lambda n: qsgd_compress(4, key=key)),
        "terngrad": Method(lambda n: terngrad_compress(key=key)),
        "natural": Method(lambda n: natural_compress(key=key)),
        "drive": Method(lambda n: drive_compress(key=key)),
        "onebit": Method(lambda n: onebit_compress()),
        "ef_sign": Method(lambda n: ef_sign_compress()),
        "sign_vote": Method(lambda n: sign_vote_compress()),
        "signum": Method(lambda n: signum_compress()),
        "power_sgd rank 1": Method(lambda n: power_sgd_compress(1, key=key)),
        "power_sgd rank 2": Method(lambda n: power_sgd_compress(2, key=key)),
        "power_sgd rank 4": Method(lambda n: power_sgd_compress(4, key=key)),
    }
