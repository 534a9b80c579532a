"""What bench/network.py measures with one group of processes: times of rows by turns, and the bytes they move."""

import collections
import statistics
from typing import NamedTuple

import _network_torch
from _network_group import Group
from _network_links import Network, address

PORT = 9876
HEADERS = 66  # bytes of Ethernet, IP and TCP in each packet
ALONE_WITH = "keep"  # the malloc setting with which rows are also timed alone, to predict the others
WARM_UP = 4  # steps, without a limit on the links: the PowerSGD hook has begun, and "keep" has its heap
ROUNDS = 3


class Task(NamedTuple):
    """What one group of processes measures.

    side: "jax" or "torch".  parameters: of the list of matrices, None for the transformer.  links: Mbit/s, None for no
    limit.  collectives: sizes in bytes.
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
        """Seconds until the links are limited: start, compilation, times alone. Of an idle machine with two cores."""
        per_row = 4 if self.side == "torch" else 6 if self.parameters else 15
        compilations = len(self.rows) * (1.0 if self.malloc == ALONE_WITH else 0.5)
        return self.hosts / 2 * (4 + compilations * per_row * (0.5 + (self.parameters or 0) / 20e6))

    def link_estimate(self, link: int | None) -> float:
        """Seconds of all rounds on a link: mostly those of the rows that send everything."""
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
        """One round of steps. The first step of all finds the link changed; it only counts in time if it is long."""
        seconds = statistics.median(self.times) if self.times else self._step()
        if not self.times and steps_per_round(seconds) == 1:
            self.times.append(seconds)
        else:
            self.times += [self._step() for _ in range(steps_per_round(seconds))]

    def count(self, before: list[dict], after: list[dict]) -> None:
        """Take what the hosts' counters moved as this row's."""
        moved = [collections.Counter({k: a[k] - b[k] for k in a}) for a, b in zip(after, before, strict=True)]
        self.moved = [a + b for a, b in zip(self.moved, moved, strict=True)] if self.moved else moved

    def bytes(self) -> dict:
        """Of one step and host, the mean over the hosts: bytes on the link, and those less the packets' headers."""
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


def measure(task: Task, command: list[str], tick) -> dict:
    """All rows of a task on all its links. `tick(text, seconds)` is called before work of about so many seconds."""
    with Network(task.hosts) as network, Group(network, task.hosts, command, task.malloc) as group:
        start = {"hosts": task.hosts, "address": f"{address(0)}:{PORT}", "parameters": task.parameters or 0}
        found: dict = {"versions": group.ask("join", each="host", **start)[0], "rows": [], "collectives": []}
        rows = [*task.rows, _network_torch.WITHOUT] if task.side == "torch" else list(task.rows)
        parameters = {}
        for row in rows:
            tick(f"{row}, warm-up", task.start_estimate() / len(rows))
            parameters[row] = prepare(group, task, row)
            for _ in range(WARM_UP):
                group.step(row)
        plain = task.side == "jax" and task.parameters and task.malloc == ALONE_WITH
        found["alone"] = [alone(group, task, row) for row in rows] if plain else []
        calls = {}
        for kind, size in task.calls():
            prepared = group.ask("prepare_collective", name=f"{kind} {size}", kind=kind, size=size)
            calls[f"{kind} {size}"] = {"kind": kind, **prepared[0]}
        for link in task.links:
            network.limit(link)
            series = rounds(group, task, link, {name: Series(group, name) for name in (*rows, *calls)}, tick)
            same = {"hosts": task.hosts, "link_mbit": link, "malloc": task.malloc}
            model = "matrices" if task.parameters else "transformer"
            for row in rows:
                what = same | {"parameters": parameters[row], "model": model, "side": task.side, "row": row}
                said = sent(group, task, row)
                found["rows"].append(what | summary(series[row].times) | series[row].bytes() | said)
            for name, call in calls.items():
                counted = {"bytes_counted": series[name].bytes()["bytes_counted"]}
                found["collectives"].append(same | call | summary(series[name].times) | counted)
    return found


def rounds(group: Group, task: Task, link: int | None, series: dict[str, Series], tick) -> dict[str, Series]:
    """Rows and collectives by turns, with the bytes that each of them moves."""
    for _ in range(ROUNDS):
        counters = group.counters()
        for name, one in series.items():
            text = "no limit" if link is None else f"{link} Mbit/s"
            tick(f"{text}, {name}", task.link_estimate(link) / ROUNDS / len(series))
            one.advance()
            before, counters = counters, group.counters()
            one.count(before, counters)
    return series


def prepare(group: Group, task: Task, row: str) -> int:
    """Make a row ready on all hosts; the model's parameters."""
    if task.parameters is None:
        return group.ask("prepare_training", row=row)[0]["parameters"]
    group.ask("prepare", row=row)
    return task.parameters


def alone(group: Group, task: Task, row: str) -> dict:
    """The time of a row on all hosts at once, each by itself."""
    group.ask("prepare", row=row, alone=True)
    seconds = [group.step(row, alone=True) for _ in range(WARM_UP)][-1]
    times = [group.step(row, alone=True) for _ in range(ROUNDS * steps_per_round(seconds))]
    group.ask("drop", row=row, alone=True)
    same = {"hosts": task.hosts, "parameters": task.parameters, "malloc": task.malloc, "row": row}
    return same | summary(times)


def sent(group: Group, task: Task, row: str) -> dict:
    """What a host sent in one step: by the library's own report, for PyTorch by the formula of ring all-reduces."""
    if task.side == "jax":
        return max(group.ask("report", row=row), key=lambda report: report["overflow"])
    if row == _network_torch.WITHOUT:
        return {"wire_bytes": 0.0}
    return {"wire_bytes": _network_torch.wire_bytes(row, task.parameters or 0, task.hosts)}


def summary(times: list[float]) -> dict:
    return {"ms": round(1e3 * statistics.median(times), 3), "ms_min": round(1e3 * min(times), 3), "steps": len(times)}
