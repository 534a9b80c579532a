"""The methods, one module each, and `METHODS`, the table of them.

The table feeds the exports of `gcjax`, the planner, the benches, the laws and the table of methods in the README. A
method that is not in it does not exist for them.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import jax
import optax

from gcjax._types import Array
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

__all__ = [
    "demo_compress",
    "dense_compress",
    "dgc_compress",
    "drive_compress",
    "drop_compress",
    "dryden_compress",
    "ef21_compress",
    "ef_sign_compress",
    "gaussian_k_compress",
    "natural_compress",
    "onebit_compress",
    "power_sgd_compress",
    "qsgd_compress",
    "random_k_compress",
    "sidco_compress",
    "sign_vote_compress",
    "signum_compress",
    "sketch_compress",
    "strom_compress",
    "terngrad_compress",
    "top_k_compress",
    "variance_compress",
]


class Workload(NamedTuple):
    """What a setting is made for, when methods are measured or planned.

    Attributes:
      density: share of the entries that sparse methods send.
      entries: parameters of the model.
    """

    density: float
    entries: int

    @property
    def slots(self) -> int:
        """Entries that a sparse method sends."""
        return max(1, round(self.density * self.entries))

    @property
    def threshold(self) -> float:
        """The magnitude that a standard normal exceeds with the probability `density`."""
        return max(NormalDist().inv_cdf(1 - self.density / 2), 1e-6)

    @property
    def key(self) -> Array:
        return jax.random.key(0)


Setting = Callable[[Workload], optax.GradientTransformationExtraArgs]


class MethodRow(NamedTuple):
    """A method's row of the table.

    Attributes:
      settings: label -> a function that makes the transform, without axis names, for a workload: what the planner and
        the benches measure. Payloads have just the slots that they need.
      readme: the README's rows of the method: call, what it sends, bytes for N parameters, whether it keeps a residual,
        source.
      sparse: sends a share of the entries that can be chosen.
      squares: uses `sum_grad_squared`.
    """

    settings: dict[str, Setting]
    readme: tuple[tuple[str, str, str, str, str], ...]
    sparse: bool = False
    squares: bool = False


def _variance(transport: str) -> Setting:
    return lambda w: variance_compress(1.0, capacity=w.slots, transport=transport)


def _power_sgd(rank: int) -> Setting:
    return lambda w: power_sgd_compress(rank, key=w.key)


METHODS: dict[str, MethodRow] = {
    "dense": MethodRow(
        {"dense float32": lambda w: dense_compress(), "dense float16": lambda w: dense_compress("float16")},
        (('`dense_compress("float32")`, `"bfloat16"`, `"float16"`', "everything", "4N or 2N", "no", "baseline"),),
    ),
    "variance": MethodRow(
        {"variance": _variance("all_gather"), "variance (reduce_scatter)": _variance("reduce_scatter")},
        (
            (
                "`variance_compress(alpha=1.5)`",
                "entries with r² > αv, to the nearest power of two",
                "4 per sent entry",
                "yes (`feedback=True`: rounding too)",
                "Tsuzuku et al. 2018",
            ),
            (
                "`variance_compress(alpha, threshold=tau)`",
                "the sign of entries that also exceed tau",
                "4 per sent entry",
                "yes",
                "its hybrid with Strom 2015",
            ),
            (
                "`variance_compress(density=0.01, feedback=True)`",
                "the k entries of largest size times certainty",
                "4 per sent entry",
                "yes",
                "gcjax",
            ),
            (
                '`variance_compress(values="levels", key=key)`',
                "the same entries, unbiased levels",
                "4 per sent entry",
                "yes",
                "with QSGD, Alistarh et al. 2017",
            ),
            (
                '`variance_compress(values="float16")`, `"float32"`',
                "the same entries, more exactly",
                "6 or 8 per sent entry",
                "yes",
                "",
            ),
        ),
        sparse=True,
        squares=True,
    ),
    "strom": MethodRow(
        {"strom": lambda w: strom_compress(w.threshold, capacity=w.slots)},
        (
            (
                "`strom_compress(threshold)`",
                "the sign of entries whose residual exceeds the threshold",
                "4 per sent entry",
                "yes",
                "Strom 2015",
            ),
        ),
        sparse=True,
    ),
    "top_k": MethodRow(
        {
            "top_k": lambda w: top_k_compress(w.density),
            "top_k (reduce_scatter)": lambda w: top_k_compress(w.density, transport="reduce_scatter"),
        },
        (
            (
                "`top_k_compress(density)`",
                "the k entries of largest magnitude, exactly",
                "8 per sent entry",
                "yes",
                "Alistarh et al. 2018",
            ),
        ),
        sparse=True,
    ),
    "dgc": MethodRow(
        {"dgc": lambda w: dgc_compress(w.density)},
        (
            (
                "`dgc_compress(density=0.001, momentum=0.9)`",
                "the k entries of largest velocity, small leaves whole; momentum inside",
                "8 per sent entry",
                "yes",
                "Lin et al. 2018",
            ),
        ),
        sparse=True,
    ),
    "drop": MethodRow(
        {"drop": lambda w: drop_compress(w.density, capacity=w.slots)},
        (
            (
                "`drop_compress(density=0.01)`, `layer_wise=True`",
                "entries above a quantile estimated from a sample",
                "8 per sent entry",
                "yes",
                "Aji & Heafield 2017",
            ),
        ),
        sparse=True,
    ),
    "gaussian_k": MethodRow(
        {"gaussian_k": lambda w: gaussian_k_compress(w.density, capacity=w.slots)},
        (
            (
                "`gaussian_k_compress(density)`",
                "entries above a threshold fitted with a normal distribution",
                "8 per sent entry",
                "yes",
                "Shi et al. 2019",
            ),
        ),
        sparse=True,
    ),
    "sidco": MethodRow(
        {"sidco": lambda w: sidco_compress(w.density, capacity=w.slots)},
        (
            (
                "`sidco_compress(density)`",
                "entries above a threshold fitted with exponentials, in stages",
                "8 per sent entry",
                "yes",
                "Abdelmoniem et al. 2021",
            ),
        ),
        sparse=True,
    ),
    "dryden": MethodRow(
        {"dryden": lambda w: dryden_compress(w.density, capacity=w.slots)},
        (
            (
                "`dryden_compress(density=0.01)`",
                "the largest entries of either sign of a leaf, as their mean",
                "4 per sent entry, 8 per leaf",
                "yes",
                "Dryden et al. 2016",
            ),
        ),
        sparse=True,
    ),
    "random_k": MethodRow(
        {"random_k": lambda w: random_k_compress(w.density, key=w.key)},
        (
            (
                "`random_k_compress(density, key=key)`, `block=`",
                "random entries or blocks, the same on all workers: values only",
                "4 per sent entry (all-reduce)",
                "yes (`feedback=False`: no, unbiased)",
                "Stich et al. 2018",
            ),
        ),
        sparse=True,
    ),
    "ef21": MethodRow(
        {"ef21": lambda w: ef21_compress(w.density)},
        (
            (
                "`ef21_compress(density)`",
                "the k entries that changed most since they were last sent; the update is dense",
                "8 per sent entry",
                "no: resends changes",
                "Richtárik et al. 2021",
            ),
        ),
        sparse=True,
    ),
    "sketch": MethodRow(
        {"sketch": lambda w: sketch_compress(w.density, key=w.key)},
        (
            (
                "`sketch_compress(density, rows, columns, key=key)`",
                "a count sketch, then exact values of 4k candidates, k of which count",
                "4 rows x columns + 16 per sent entry",
                "yes",
                "Ivkin et al. 2019",
            ),
        ),
        sparse=True,
    ),
    "demo": MethodRow(
        {"demo": lambda w: demo_compress()},
        (
            (
                "`demo_compress(top_k=32)`",
                "the largest cosine coefficients of every 64 x 64 chunk",
                "6 per coefficient, 3N/64",
                "yes, decaying",
                "Peng et al. 2024",
            ),
        ),
    ),
    "qsgd": MethodRow(
        {"qsgd 4 bits": lambda w: qsgd_compress(4, key=w.key)},
        (
            (
                "`qsgd_compress(bits=4, key=key)`",
                "every entry to one of 8 levels and a sign, unbiased",
                "N/2",
                "no",
                "Alistarh et al. 2017",
            ),
        ),
    ),
    "terngrad": MethodRow(
        {"terngrad": lambda w: terngrad_compress(key=w.key)},
        (
            (
                "`terngrad_compress(clip=2.5, key=key)`",
                "every entry as -1, 0 or 1, unbiased after clipping",
                "N/2 (up to 7 workers) or N (127), added up",
                "no",
                "Wen et al. 2017",
            ),
        ),
    ),
    "natural": MethodRow(
        {"natural": lambda w: natural_compress(key=w.key)},
        (
            (
                "`natural_compress(key=key)`",
                "every entry to a power of two, unbiased",
                "9N/8",
                "no",
                "Horvath et al. 2019",
            ),
        ),
    ),
    "drive": MethodRow(
        {"drive": lambda w: drive_compress(key=w.key)},
        (
            (
                "`drive_compress(bits=1, key=key)`",
                "signs (up to 4 bits) of the randomly rotated gradient, and a scale per block; nearly unbiased",
                "N/8 per bit",
                "no (`feedback=True`: yes)",
                "Vargaftik et al. 2021, 2022",
            ),
        ),
    ),
    "onebit": MethodRow(
        {"onebit": lambda w: onebit_compress()},
        (
            (
                "`onebit_compress()`",
                "signs, and the two means of each column",
                "N/8 + 8 per column, each way",
                "yes",
                "Seide et al. 2014",
            ),
        ),
    ),
    "ef_sign": MethodRow(
        {"ef_sign": lambda w: ef_sign_compress()},
        (
            (
                "`ef_sign_compress()`",
                "signs, and the mean magnitude of each leaf",
                "N/8",
                "yes",
                "Karimireddy et al. 2019",
            ),
        ),
    ),
    "sign_vote": MethodRow(
        {"sign_vote": lambda w: sign_vote_compress()},
        (("`sign_vote_compress()`", "signs, to a majority vote", "N/8 each way", "no", "Bernstein et al. 2019"),),
    ),
    "signum": MethodRow(
        {"signum": lambda w: signum_compress()},
        (
            (
                "`signum_compress(momentum=0.9)`",
                "signs of the momentum, to a majority vote",
                "N/8 each way",
                "no",
                "Bernstein et al. 2018",
            ),
        ),
    ),
    "power_sgd": MethodRow(
        {f"power_sgd rank {rank}": _power_sgd(rank) for rank in (1, 2, 4)},
        (
            (
                "`power_sgd_compress(rank=2, key=key)`",
                "two thin factors of every n x m matrix",
                "4 rank (n + m) per matrix",
                "yes",
                "Vogels et al. 2019",
            ),
        ),
    ),
}
