"""What methods cost to compute on this device: measured once, kept in a file, read as a function of size and workers.

Seconds of one update are taken as `fixed + per_parameter * parameters + per_byte * arriving bytes`, the latter as the
method's own messages say, so that neither workers nor density need terms of their own.
"""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gcjax  # only for its version
from gcjax._comm.simulated import Transfer, arriving_bytes, model_of, simulated_workers, transfers_of
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

# Parameters and workers. A vector of 8 million has 32 MB; glibc maps larger ones anew each time, and the cost bends up.
MEASURED = ((1_000_000, 2), (12_000_000, 2), (12_000_000, 8))
DENSITY = 0.01  # at which sparse methods are measured
REPEATS = 4


class Method(NamedTuple):
    """make(parameters) -> a transform without axis names.  sparse: sends a share of the entries that can be chosen.

    squares: takes `sum_grad_squared`.
    """

    make: Callable
    sparse: bool = False
    squares: bool = False


class Cost(NamedTuple):
    """Seconds of one update: `fixed + per_parameter * parameters + per_byte * arriving bytes`."""

    fixed: float
    per_parameter: float
    per_byte: float

    def seconds(self, parameters: int, messages: tuple[Transfer, ...], workers: int) -> float:
        return self.fixed + self.per_parameter * parameters + self.per_byte * _arriving(messages, workers)


def _arriving(messages, workers: int) -> int:
    return sum(arriving_bytes(message, workers) for message in messages)


def standard_methods(density: float) -> dict[str, Method]:
    """Every public method, by the name under which its cost is kept. Payloads have just the slots that they need."""
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


def measure_costs(progress: Callable[[int, int, str], None] | None = None, names=None) -> dict[str, Cost]:
    """Measure on this device what the methods cost to compute, and keep it for `plan` in a file.

    Takes a minute or two. The file is `gcjax/costs.json` in `$XDG_CACHE_HOME` or `~/.cache`; it has a table for each
    kind of device, number of cores and versions of jax and gcjax. Measure on an idle machine, under the malloc settings
    that you train with.

    Args:
      progress: called before each method with how many are done, how many there are and its name.
      names: methods to measure, all by default; what the file knows of the others stays.
    """
    methods = standard_methods(DENSITY)
    table = {}
    for done, name in enumerate(names := list(methods if names is None else names)):
        if progress:
            progress(done, len(names), name)
        table[name] = measure(methods[name])
    tables = _read_tables()
    tables[_device()] = tables.get(_device(), {}) | {name: list(cost) for name, cost in table.items()}
    _write_tables(tables)
    return table


def known_costs(names, progress=None) -> dict[str, Cost]:
    """The costs of standard methods on this device; those that the file does not have are measured."""
    table = {name: Cost(*cost) for name, cost in _read_tables().get(_device(), {}).items()}
    if missing := [name for name in names if name not in table]:
        table |= measure_costs(progress, missing)
    return {name: table[name] for name in names}


def measure(method: Method, settings=MEASURED) -> Cost:
    """The cost of one method, measured for each (parameters, workers) of `settings`."""
    points = []
    for parameters, workers in settings:
        params = model_of(parameters)
        messages = transfers_of(method.make(parameters), params, workers, method.squares)
        points.append((parameters, _arriving(messages, workers), update_seconds(method, params, workers)))
    return fit(points)


def fit(points) -> Cost:
    """The cost, no part of it negative, that comes closest to all (parameters, arriving bytes, seconds).

    In seconds, not in proportion: what counts is the error of a whole step, so the large models decide.
    """
    seconds = np.asarray([s for *_, s in points])
    columns = np.asarray([(1, n, m) for n, m, _ in points])
    best, best_error = np.zeros(3), np.inf
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        scale = np.linalg.norm(columns[:, used], axis=0)
        if not scale.all():
            continue  # nothing ever arrives
        found = np.linalg.lstsq(columns[:, used] / scale, seconds)[0] / scale
        error = float(np.linalg.norm(columns[:, used] @ found - seconds))
        if (found >= 0).all() and error < 0.999 * best_error:  # of equals the one with the fewest parts
            best, best_error = np.zeros(3), error
            best[list(used)] = found
    return Cost(*map(float, best))


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcjax" / "costs.json"


def _device() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.devices()[0].device_kind}, {cores} cores, jax {jax.__version__}, gcjax {gcjax.__version__}"


def _read_tables() -> dict[str, dict[str, list[float]]]:
    path = _cache_file()
    if not path.exists():
        return {}
    try:
        tables = json.loads(path.read_text())
        for table in tables.values():
            for cost in table.values():
                Cost(*map(float, cost))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of costs ({error}); delete it, and it will be measured anew"
        ) from error
    return tables


def _write_tables(tables) -> None:
    path = _cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(tables, indent=1) + "\n")
    draft.replace(path)  # whole or not at all, also with several processes


def update_seconds(method: Method, params, workers: int, density=DENSITY, repeats=REPEATS) -> float:
    """Seconds of one update on this device, the least of `repeats`, every time from the same state.

    The gradient is normal, the squares such that a share `density` of the entries is clear.
    """
    entries = sum(x.size for x in jax.tree.leaves(params))
    tx = method.make(entries)
    squares = max(NormalDist().inv_cdf(1 - density / 2), 1e-6) ** 2

    @jax.jit
    def start(key):
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        gradient = treedef.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
        extra = {"sum_grad_squared": jax.tree.map(lambda x: jnp.full(x.shape, squares), params)}
        return gradient, tx.init(gradient), extra if method.squares else {}

    def update(gradient, state, extra, zeros):
        with simulated_workers(workers, zeros, []):
            return tx.update(gradient, state, **extra)

    *fresh, extra = start(jax.random.key(1))
    zeros = jnp.zeros(workers, jnp.int32)
    step = jax.jit(update, donate_argnums=(0, 1)).lower(*fresh, extra, zeros).compile()
    # In the buffers of the last run, as fresh ones cost more than the arithmetic.
    refill = jax.jit(
        lambda old, new: jax.tree.map(lambda a, b: (a * 0 + b).astype(b.dtype), old, new), donate_argnums=0
    )
    used = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(fresh)
    times = []
    for _ in range(repeats):
        arguments = jax.block_until_ready(refill(used, fresh))
        begin = time.perf_counter()
        used = list(jax.block_until_ready(step(*arguments, extra, zeros)))
        times.append(time.perf_counter() - begin)
    return min(times)
