"""The measured costs of methods, kept in a file."""

import dataclasses
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
    return CostStore().measured(progress, names)


def cost_file() -> Path:
    """Where costs are kept by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcjax" / "costs.json"


def device_name() -> str:
    """What the costs depend on: kind of device, number of cores, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.devices()[0].device_kind}, {cores} cores, jax {jax.__version__}, gcjax {__version__}"


@dataclasses.dataclass(frozen=True)
class CostStore:
    """Costs of standard methods, kept in a file.

    Attributes:
      path: the file, JSON: device -> method -> the fields of its `Cost`.
      device: whose costs to read and write.
      measure: from a method to its cost.
    """

    path: Path = dataclasses.field(default_factory=cost_file)
    device: str = dataclasses.field(default_factory=device_name)
    measure: Callable[[Method], Cost] = measure

    def known(self, names: Iterable[str], progress: Progress | None = None) -> dict[str, Cost]:
        """The costs of these methods. Those that the file lacks are measured and kept."""
        names = list(names)
        table = {name: Cost(*cost) for name, cost in self._read().get(self.device, {}).items()}
        if missing := [name for name in names if name not in table]:
            table |= self.measured(progress, missing)
        return {name: table[name] for name in names}

    def costs_of(self, methods: Mapping[str, Method], progress: Progress | None = None) -> dict[str, Cost]:
        """The costs of these methods. Those that are not standard, by their names, are measured and not kept."""
        standard = standard_methods(DENSITY)
        costs = self.known([name for name in methods if name in standard], progress)
        return costs | {name: self.measure(method) for name, method in methods.items() if name not in standard}

    def measured(self, progress: Progress | None = None, names: Iterable[str] | None = None) -> dict[str, Cost]:
        """Measure these methods, None for all, and keep their costs. See `measure_costs`."""
        methods = standard_methods(DENSITY)
        names = list(methods if names is None else names)
        table = {}
        for done, name in enumerate(names):
            if progress:
                progress(done, len(names), name)
            table[name] = self.measure(methods[name])
        tables = self._read()
        tables[self.device] = tables.get(self.device, {}) | {name: list(cost) for name, cost in table.items()}
        self._write(tables)
        return table

    def _read(self) -> dict[str, dict[str, list[float]]]:
        if not self.path.exists():
            return {}
        try:
            tables = json.loads(self.path.read_text())
            for table in tables.values():
                for cost in table.values():
                    Cost(*map(float, cost))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is not a table of costs ({error}); delete it, and the costs will be measured again"
            ) from error
        return tables

    def _write(self, tables: dict[str, dict[str, list[float]]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(tables, indent=1) + "\n")
        draft.replace(self.path)  # atomic, also with several processes
