"""The measured costs of methods, kept in a file."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax

from gcjax._planner.measuring import DENSITY, Cost, Method, measure, standard_methods
from gcjax._version import __version__

Progress = Callable[[int, int, str], None]


def measure_costs(progress: Progress | None = None, names: Iterable[str] | None = None) -> dict[str, Cost]:
    """Measure what the methods cost to compute on this device, and keep it for `plan` in a file.

    Takes a minute or two. The file is `gcjax/costs.json` in `$XDG_CACHE_HOME` or `~/.cache`. It has a table for each
    kind of device, number of cores and versions of jax and gcjax. Measure on an idle machine, under the malloc settings
    that you train with.

    Args:
      progress: called before each method with the number of methods done, the number of all methods and its name.
      names: methods to measure; None for all. The file keeps what it knows of the others.

    Returns:
      The costs by the method's name.
    """
    standard = standard_methods(DENSITY)
    names = list(standard if names is None else names)
    costs = {}
    for done, name in enumerate(names):
        if progress:
            progress(done, len(names), name)
        costs[name] = measure(standard[name])
    tables = _read()
    _write(tables | {device_name(): tables.get(device_name(), {}) | costs})
    return costs


def costs_of(methods: Mapping[str, Method], progress: Progress | None = None) -> dict[str, Cost]:
    """The costs of these methods on this device.

    Those of standard methods, by their names, are read from the file, or measured and kept there. Others are measured
    and not kept.
    """
    standard = standard_methods(DENSITY)
    kept = _read().get(device_name(), {})
    if missing := [name for name in methods if name in standard and name not in kept]:
        kept |= measure_costs(progress, missing)
    return {name: kept[name] if name in standard else measure(method) for name, method in methods.items()}


def cost_file() -> Path:
    """Where costs are kept, as JSON: device -> method -> the fields of its `Cost`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcjax" / "costs.json"


def device_name() -> str:
    """What the costs depend on: kind of device, number of cores, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.devices()[0].device_kind}, {cores} cores, jax {jax.__version__}, gcjax {__version__}"


def _read() -> dict[str, dict[str, Cost]]:
    path = cost_file()
    if not path.exists():
        return {}
    try:
        return {
            device: {name: Cost(*map(float, cost)) for name, cost in table.items()}
            for device, table in json.loads(path.read_text()).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of costs ({error}); delete it, and the costs will be measured again"
        ) from error


def _write(tables: dict[str, dict[str, Cost]]) -> None:
    path = cost_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(tables, indent=1) + "\n")
    draft.replace(path)  # atomic, also with several processes
