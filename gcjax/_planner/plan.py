"""The planner: what a training step takes with every method on a given network.

**Source.** The cost model of Tsuzuku, Imachi, Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning" (arXiv 1802.06058), for rings, extended by latencies, by other algorithms (`_comm/link.py`), by two
levels of network and by the cost of compressing and decoding.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from gcjax._comm.link import Link, as_link
from gcjax._comm.simulated import model_of, transfers_of
from gcjax._planner.costs import Progress, costs_of
from gcjax._planner.measuring import Cost, Method, standard_methods
from gcjax._planner.prediction import DENSE, MEASURED_HOSTS, Plan, Prediction, Setting, Update, ranked
from gcjax._types import PyTree
from gcjax._units import as_count, as_seconds
from gcjax._validation import check_integer, check_number

INNER_LATENCY = 5e-6
MOST_HOSTS = 1024


def plan(
    params_or_size: PyTree | str | float,
    workers: int,
    link: Link | str | float,
    step_time: str | float,
    *,
    density: float = 0.01,
    latency: str | float = 50e-6,
    inner_workers: int = 1,
    inner_link: Link | str | float | None = None,
    methods: Mapping[str, Method] | Sequence[str] | None = None,
    costs: Mapping[str, Cost | tuple[float, float, float]] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Predict the time of a training step with every method, to see which one pays, if any.

    The transfers are read from the methods themselves, traced for that many workers. A step is the sum of `step_time`,
    of the seconds of compressing and decoding, as measured on this device, and of those of the transfers. All workers
    are taken to be equally fast and payloads to be full; accuracy is not in the model. Predictions were compared with
    measurements of up to 4 hosts: beyond, the plan says that it extrapolates, and it refuses more than 1,024 hosts.

    Args:
      params_or_size: the parameters, a pytree of arrays or `jax.ShapeDtypeStruct`s; or their number, such as 25_600_000
        or "25.6M", which assumes matrices of 1000 x 1000, larger ones above 256M parameters.
      workers: number of data-parallel workers, on at most 1,024 hosts.
      link: each worker's link, or each host's with `inner_workers`: "1Gbit", "100Mbit", "50GB/s", a number of bits per
        second, or a `gcjax.Link`.
      step_time: seconds of a step on one worker without any exchange, or "300ms".
      density: share of the entries that sparse methods send, in (0, 1].
      latency: seconds that an empty message takes, or "50us"; over TCP 20 to 500 microseconds.
      inner_workers: workers on each host. The mean is taken over their `inner_link` first (`inner_axis_name`); they
        then share the work of one worker over the link between the hosts.
      inner_link: as `link`, with a latency of 5 microseconds.
      methods: names of those to compare ("variance", "top_k (two_phase)", "power_sgd rank 2" as in the table, but
        without densities), None for all; or a `gcjax.Method` by its name. Of several capacities, the largest counts.
      costs: a `gcjax.Cost` by the method's name, without its density; None for those of this device, by
        `gcjax.measure_costs` if they are not known yet.
      progress: passed to `gcjax.measure_costs` if costs are measured.

    Returns:
      A `Plan`. `str` of it is a table and a sentence of advice.

    Raises:
      ValueError: values out of range or not understood, `inner_workers` that does not divide `workers`, unknown
        methods, or a damaged file of costs.
      TypeError: arguments of other types.

    >>> import gcjax
    >>> costs = {"dense float32": gcjax.Cost(0, 1e-9, 0), "top_k": gcjax.Cost(0, 2e-9, 1e-9)}
    >>> found = gcjax.plan("25.6M", 16, "1Gbit", 0.3, methods=["top_k"], costs=costs)
    >>> print(found.best.method, round(found.best.speedup, 1))
    top_k 1/100 3.6
    """
    check_number("density", density, 0.0, 1.0)
    _check_workers(workers, inner_workers, inner_link)
    params = _as_params(params_or_size)
    setting = Setting(
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        workers=workers,
        link=as_link("link", link, as_seconds("latency", latency)),
        step_time=as_seconds("step_time", step_time),
        inner_workers=inner_workers,
        inner_link=None if inner_link is None else as_link("inner_link", inner_link, INNER_LATENCY),
    )
    chosen = _chosen(methods, standard_methods(density))
    if costs is None:
        costs = costs_of(chosen, progress)
    if missing := set(chosen) - set(costs):
        raise ValueError(f"costs has no entry for {', '.join(sorted(missing))}; it has {', '.join(sorted(costs))}")
    updates = {}
    for name, method in chosen.items():
        transfers = transfers_of(method.make(setting.parameters), params, setting.hosts, method.squares)
        compute = Cost(*costs[name]).seconds(setting.parameters, transfers, setting.hosts)
        updates[name] = Update(transfers, compute, method.squares)
    return ranked(
        Prediction(_with_density(name, density) if chosen[name].sparse else name, update, updates[DENSE], setting)
        for name, update in updates.items()
    )


def _check_workers(workers: int, inner_workers: int, inner_link: Link | str | float | None) -> None:
    check_integer("workers", workers, 1)
    check_integer("inner_workers", inner_workers, 1)
    if workers % inner_workers:
        raise ValueError(f"inner_workers must divide workers, got {inner_workers} and {workers}")
    if (hosts := workers // inner_workers) > MOST_HOSTS:
        raise ValueError(
            f"a plan is for at most {MOST_HOSTS:,} hosts, got {hosts:,}: predictions were compared with measurements "
            f"of up to {MEASURED_HOSTS} hosts only"
        )
    if (inner_workers > 1) != (inner_link is not None):
        raise ValueError(f"inner_workers and inner_link go together, got {inner_workers} and {inner_link!r}")


def _as_params(params_or_size: PyTree | str | float) -> PyTree:
    if isinstance(params_or_size, (np.ndarray, np.generic, jax.Array)) and params_or_size.ndim == 0:
        params_or_size = params_or_size.item()
    if isinstance(params_or_size, (str, int, float)):
        return model_of(as_count("params", params_or_size))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params_or_size)


def _chosen(methods: Mapping[str, Method] | Iterable[str] | None, standard: dict[str, Method]) -> dict[str, Method]:
    """The methods to compare, the dense mean first."""
    if methods is None:
        return standard
    if not isinstance(methods, Mapping):
        if unknown := set(methods) - set(standard):
            raise ValueError(f"no method {', '.join(sorted(unknown))}; there are {', '.join(standard)}")
        methods = {name: standard[name] for name in methods}
    return {DENSE: standard[DENSE]} | dict(methods)


def _with_density(name: str, density: float) -> str:
    """ "top_k (two_phase)" -> "top_k 1/100 (two_phase)"."""
    whole = round(1 / density)
    share = f"1/{whole}" if math.isclose(1 / density, whole, rel_tol=1e-9) else f"{density:g}"
    method, bracket, rest = name.partition(" (")
    return f"{method} {share}{bracket}{rest}"
