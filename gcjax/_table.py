"""`METHODS`, the table of all methods, of `gcjax` and of `gcjax.contrib`.

It feeds the planner, the benches, the laws and the table in docs/methods.md. A method that is not in it does not exist
for them.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import jax
import optax

from gcjax import contrib, methods
from gcjax._types import Array


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


Make = Callable[[Workload], optax.GradientTransformationExtraArgs]


class MethodRow(NamedTuple):
    """A method's row of the table.

    Attributes:
      factory: makes the transform.
      readme: cells of the table in docs/methods.md, separated by " | ": call, bytes for N parameters, whether it keeps
        a residual, source. What the method sends is the first line of its docstring.
      settings: label -> a function that makes the transform, without axis names, for a workload: what the planner and
        the benches measure. Payloads have just the slots that they need.
      sparse: sends a share of the entries that can be chosen.
      squares: uses `sum_grad_squared`.
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    readme: str
    settings: dict[str, Make]
    sparse: bool = False
    squares: bool = False


def _variance(transport: str) -> Make:
    return lambda w: methods.variance_compress(1.0, capacity=w.slots, transport=transport)


def _power_sgd(rank: int) -> Make:
    return lambda w: methods.power_sgd_compress(rank, key=w.key)


METHODS: dict[str, MethodRow] = {
    "dense": MethodRow(
        methods.dense_compress,
        '`dense_compress("float32")`, `"bfloat16"`, `"float16"` | 4N or 2N | no | baseline',
        {
            "dense float32": lambda w: methods.dense_compress(),
            "dense float16": lambda w: methods.dense_compress("float16"),
        },
    ),
    "variance": MethodRow(
        methods.variance_compress,
        "`variance_compress(alpha=0.5)` | 1.6 per sent entry at 1/100 | yes | Tsuzuku et al. 2018",
        {"variance": _variance("all_gather"), "variance (two_phase)": _variance("two_phase")},
        sparse=True,
        squares=True,
    ),
    "top_k": MethodRow(
        methods.top_k_compress,
        "`top_k_compress(density)` | 5.1 per sent entry at 1/100 | yes | Alistarh et al. 2018",
        {
            "top_k": lambda w: methods.top_k_compress(w.density, transport="all_gather"),
            "top_k (two_phase)": lambda w: methods.top_k_compress(w.density, transport="two_phase"),
        },
        sparse=True,
    ),
    "dgc": MethodRow(
        methods.dgc_compress,
        "`dgc_compress(density=0.001, momentum=0.9)` | 5.1 per sent entry at 1/100 | yes | Lin et al. 2018",
        {"dgc": lambda w: methods.dgc_compress(w.density)},
        sparse=True,
    ),
    "sparse_loco": MethodRow(
        methods.sparse_loco_compress,
        "`sparse_loco_compress(top_k=64)` | 1.75 per sent entry, 7N/256 | yes, decaying | Sarfi et al. 2025",
        {"sparse_loco": lambda w: methods.sparse_loco_compress()},
    ),
    "qsgd": MethodRow(
        methods.qsgd_compress,
        "`qsgd_compress(bits=4, key=key)` | N/2 | no | Alistarh et al. 2017",
        {"qsgd 4 bits": lambda w: methods.qsgd_compress(4, key=w.key)},
    ),
    "onebit": MethodRow(
        methods.onebit_compress,
        "`onebit_compress()` | N/8 + 8 per column, each way | yes | Seide et al. 2014",
        {"onebit": lambda w: methods.onebit_compress()},
    ),
    "ef_sign": MethodRow(
        methods.ef_sign_compress,
        "`ef_sign_compress()` | N/8 | yes | Karimireddy et al. 2019",
        {"ef_sign": lambda w: methods.ef_sign_compress()},
    ),
    "power_sgd": MethodRow(
        methods.power_sgd_compress,
        "`power_sgd_compress(rank=2, key=key)` | 4 rank (n + m) per matrix | yes | Vogels et al. 2019",
        {f"power_sgd rank {rank}": _power_sgd(rank) for rank in (1, 2, 4)},
    ),
    "strom": MethodRow(
        contrib.strom_compress,
        "`contrib.strom_compress(threshold)` | 1.2 per sent entry at 1/100 | yes | Strom 2015",
        {"strom": lambda w: contrib.strom_compress(w.threshold, capacity=w.slots)},
        sparse=True,
    ),
    "drop": MethodRow(
        contrib.drop_compress,
        "`contrib.drop_compress(density=0.01)`, `layer_wise=True` | 5.1 per sent entry at 1/100 | yes | "
        "Aji & Heafield 2017",
        {"drop": lambda w: contrib.drop_compress(w.density, capacity=w.slots)},
        sparse=True,
    ),
    "gaussian_k": MethodRow(
        contrib.gaussian_k_compress,
        "`contrib.gaussian_k_compress(density)` | 5.1 per sent entry at 1/100 | yes | Shi et al. 2019",
        {"gaussian_k": lambda w: contrib.gaussian_k_compress(w.density, capacity=w.slots)},
        sparse=True,
    ),
    "dryden": MethodRow(
        contrib.dryden_compress,
        "`contrib.dryden_compress(density=0.01)` | 1.2 per sent entry at 1/100, 8 per leaf | yes | Dryden et al. 2016",
        {"dryden": lambda w: contrib.dryden_compress(w.density, capacity=w.slots)},
        sparse=True,
    ),
    "random_k": MethodRow(
        contrib.random_k_compress,
        "`contrib.random_k_compress(density, key=key)` | 4 per sent entry | yes (`feedback=False`: no) | "
        "Stich et al. 2018",
        {"random_k": lambda w: contrib.random_k_compress(w.density, key=w.key)},
        sparse=True,
    ),
    "sketch": MethodRow(
        contrib.sketch_compress,
        "`contrib.sketch_compress(density, key=key)` | 4 rows x columns + 16 per sent entry | yes | Ivkin et al. 2019",
        {"sketch": lambda w: contrib.sketch_compress(w.density, key=w.key)},
        sparse=True,
    ),
    "demo": MethodRow(
        contrib.demo_compress,
        "`contrib.demo_compress(top_k=32)` | 6 per coefficient, 3N/64 | yes, decaying | Peng et al. 2024",
        {"demo": lambda w: contrib.demo_compress()},
    ),
    "terngrad": MethodRow(
        contrib.terngrad_compress,
        "`contrib.terngrad_compress(clip=2.5, key=key)` | N/2 (up to 7 workers) or N (127), added up | no | "
        "Wen et al. 2017",
        {"terngrad": lambda w: contrib.terngrad_compress(key=w.key)},
    ),
    "natural": MethodRow(
        contrib.natural_compress,
        "`contrib.natural_compress(key=key)` | 9N/8 | no | Horvath et al. 2019",
        {"natural": lambda w: contrib.natural_compress(key=w.key)},
    ),
    "sign_vote": MethodRow(
        contrib.sign_vote_compress,
        "`contrib.sign_vote_compress()` | N/8 each way | no | Bernstein et al. 2019",
        {"sign_vote": lambda w: contrib.sign_vote_compress()},
    ),
    "signum": MethodRow(
        contrib.signum_compress,
        "`contrib.signum_compress(momentum=0.9)` | N/8 each way | no | Bernstein et al. 2018",
        {"signum": lambda w: contrib.signum_compress()},
    ),
}
