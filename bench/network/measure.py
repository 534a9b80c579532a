"""What one group of processes measures: times of rows, taken round-robin, and the bytes they move."""

import collections
import statistics
from collections.abc import Callable
from typing import NamedTuple

from bench.network import torch_workers
from bench.network.group import Group
from bench.network.links import Network, address

PORT = 9876
HEADERS = 66  # bytes of Ethernet, IP and TCP in each packet
ALONE_WITH = "keep"  # the malloc setting with which rows are also timed alone, to predict the others
WARM_UP = 4  # steps on unlimited links: afterwards the PowerSGD hook is active and "keep" has its heap
ROUNDS = 3
Tick = Callable[[str, float], None]  # called with what is to be done and about how many seconds it takes


class Task(NamedTuple):
    """What one group of processes measures.

    Attributes:
      side: "jax" or "torch".
      hosts: number of hosts.
      parameters: of the list of matrices; None for the transformer.
      malloc: name of the malloc setting.
      rows: names of rows.
      links: rates in Mbit/s; None for no limit.
      collectives: sizes in bytes of the single collectives to time.
    """

    side: str
    hosts: int
    parameters: int | None
    malloc: str
    rows: tuple[str, ...]
    links: tuple[int | None, ...]
    collectives: tuple[int, ...]

    @property
    def name(self) -> str:
        model = f"{self.parameters // 10**6}M" if self.parameters else "transformer"
        return f"{self.side} {self.hosts} x {model} {self.malloc}"

    def calls(self) -> list[tuple[str, int]]:
        """Collectives to time: kind and bytes."""
        scalar = [("scalar_max", 4)] if self.collectives else []
        kinds = ("all_reduce", "all_gather", "all_to_all")
        return scalar + [(kind, size) for kind in kinds for size in self.collectives]

    def start_estimate(self) -> float:
        """Seconds until the links are limited (start, compilation, times alone), on an idle machine with two cores."""
        per_row = 4 if self.side == "torch" else 6 if self.parameters else 15
        compilations = len(self.rows) * (1.0 if self.malloc == ALONE_WITH else 0.5)
        return self.hosts / 2 * (4 + compilations * per_row * (0.5 + (self.parameters or 0) / 20e6))

    def link_estimate(self, link: int | None) -> float:
        """Seconds of all rounds on a link, mostly those of the rows that send everything."""
        ring = 8 * (self.hosts - 1) / self.hosts * (self.parameters or 4e6)
        shares = {
            "psum float32": 1,
            "dense float32": 1,
            "dense float16": self.hosts / 4,
            "DDP float32": 1,
            "DDP float16 hook": 0.5,
        }
        sent = ring * sum(shares.get(row, 0.02) for row in self.rows) + 2 * self.hosts * sum(self.collectives)
        return ROUNDS * (8e-6 * sent / (link or 2000) + self.hosts * 0.15 * len(self.rows))

    def estimate(self) -> float:
        """Seconds of the whole task."""
        return self.start_estimate() + sum(map(self.link_estimate, self.links))


def steps_per_round(seconds: float) -> int:
    return next((steps for limit, steps in ((0.1, 5), (0.3, 3), (1.0, 2)) if seconds < limit), 1)


class Series:
    """Times of one row on one link, and the bytes of all its steps."""

    def __init__(self, group: Group, name: str):
        self.group, self.name = group, name
        self.times: list[float] = []
        self.steps = 0
        self.moved: list[collections.Counter] = []

    def _step(self) -> float:
        self.steps += 1
        return self.group.step(self.name)

    def advance(self) -> None:
        """One round of steps. The very first finds a changed link: its time counts only if steps are long."""
        seconds = statistics.median(self.times) if self.times else self._step()
        if not self.times and steps_per_round(seconds) == 1:
            self.times.append(seconds)
        else:
            self.times += [self._step() for _ in range(steps_per_round(seconds))]

    def count(self, before: list[dict], after: list[dict]) -> None:
        """Book what the hosts' counters moved on this row."""
        moved = [collections.Counter({k: a[k] - b[k] for k in a}) for a, b in zip(after, before, strict=True)]
        self.moved = [a + b for a, b in zip(self.moved, moved, strict=True)] if self.moved else moved

    def bytes(self) -> dict:
        """Bytes on the link, with and without the packets' headers: of one step, means over the hosts."""
        total = sum(self.moved, collections.Counter())
        sent, received, packets = (
            total[k] / self.steps / len(self.moved) for k in ("tx_bytes", "rx_bytes", "tx_packets")
        )
        return {
            "bytes_counted": round(sent),
            "bytes_without_headers": round(sent - HEADERS * packets),
            "bytes_received": round(received),
            "bytes_of_hosts": [round(host["tx_bytes"] / self.steps) for host in self.moved],
            "packets": round(packets, 1),
        }


def measure(task: Task, command: list[str], tick: Tick) -> dict:
    """All rows of a task on all its links, as `versions`, `rows`, `collectives` and `alone`."""
    with Network(task.hosts) as network, Group(network, task.hosts, command, task.malloc) as group:
        start = {"hosts": task.hosts, "address": f"{address(0)}:{PORT}", "parameters": task.parameters or 0}
        found: dict = {"versions": group.ask("join", each="host", **start)[0], "rows": [], "collectives": []}
        rows = [*task.rows, torch_workers.WITHOUT] if task.side == "torch" else list(task.rows)
        parameters = {}
        for row in rows:
            tick(f"{row}, warm-up", task.start_estimate() / len(rows))
            parameters[row] = prepare(group, task, row)
            for _ in range(WARM_UP):
                group.step(row)
        plain = task.side == "jax" and task.parameters and task.malloc == ALONE_WITH
        found["alone"] = [measure_alone(group, task, row) for row in rows] if plain else []
        calls = {}
        for kind, size in task.calls():
            prepared = group.ask("prepare_collective", name=f"{kind} {size}", kind=kind, size=size)
            calls[f"{kind} {size}"] = {"kind": kind, **prepared[0]}
        for link in task.links:
            network.limit(link)
            series = {name: Series(group, name) for name in (*rows, *calls)}
            run_rounds(group, task, link, series, tick)
            same = {"hosts": task.hosts, "link_mbit": link, "malloc": task.malloc}
            model = "matrices" if task.parameters else "transformer"
            for row in rows:
                what = same | {"parameters": parameters[row], "model": model, "side": task.side, "row": row}
                sent = reported(group, row)
                found["rows"].append(what | summary(series[row].times) | series[row].bytes() | sent)
            for name, call in calls.items():
                counted = {"bytes_counted": series[name].bytes()["bytes_counted"]}
                found["collectives"].append(same | call | summary(series[name].times) | counted)
    return found


def run_rounds(group: Group, task: Task, link: int | None, series: dict[str, Series], tick: Tick) -> None:
    """Run rows and collectives round-robin, and count the bytes that each moves."""
    for _ in range(ROUNDS):
        counters = group.counters()
        for name, one in series.items():
            text = "no limit" if link is None else f"{link} Mbit/s"
            tick(f"{text}, {name}", task.link_estimate(link) / ROUNDS / len(series))
            one.advance()
            before, counters = counters, group.counters()
            one.count(before, counters)


def prepare(group: Group, task: Task, row: str) -> int:
    """Make a row ready on all hosts and return the number of its model's parameters."""
    if task.parameters is None:
        return group.ask("prepare_training", row=row)[0]["parameters"]
    group.ask("prepare", row=row)
    return task.parameters


def measure_alone(group: Group, task: Task, row: str) -> dict:
    """The time of a row with all hosts busy at once, each as a single worker."""
    group.ask("prepare", row=row, alone=True)
    seconds = [group.step(row, alone=True) for _ in range(WARM_UP)][-1]
    times = [group.step(row, alone=True) for _ in range(ROUNDS * steps_per_round(seconds))]
    group.ask("drop", row=row, alone=True)
    same = {"hosts": task.hosts, "parameters": task.parameters, "malloc": task.malloc, "row": row}
    return same | summary(times)


def reported(group: Group, row: str) -> dict:
    """What a host sends in one step, as the library reports it; for PyTorch by the formula of ring all-reduces."""
    return max(group.ask("report", row=row), key=lambda report: report.get("overflow", 0))


def summary(times: list[float]) -> dict:
    return {"ms": round(1e3 * statistics.median(times), 3), "ms_min": round(1e3 * min(times), 3), "steps": len(times)}
