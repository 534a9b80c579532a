"""Predicted steps: what every method takes in a setting, as numbers, as a table and as advice."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from gcjax._comm.simulated import Transfer, arriving_bytes, ring_bytes
from gcjax._planner.network import Link, Setting, as_link, rate_text, seconds_text

DENSE = "dense float32"
WORTH_IT = 0.03  # a smaller saving is not worth a compressor
MEASURED_HOSTS = 4  # the most of a measurement that predictions were compared with
MUCH = 10e9  # bytes: a worker that gathers more may run out of memory
_SLOWEST, _FASTEST = 1e3, 1e15  # bits per second, between which the break-even is searched


class Candidate(NamedTuple):
    """A method, as the model sees it.

    Attributes:
      method: its name.
      transfers: what one update sends between the hosts.
      compute: seconds of compressing and decoding.
      squares: whether it takes `sum_grad_squared`.
    """

    method: str
    transfers: tuple[Transfer, ...]
    compute: float
    squares: bool

    def step_seconds(self, setting: Setting) -> float:
        """Seconds of a whole step."""
        return setting.step_seconds(self.transfers, self.squares, self.compute)


class Prediction(NamedTuple):
    """The predicted step of one method.

    Attributes:
      method: its name.
      transport: the collectives that carry its bytes.
      wire_bytes: bytes that a host sends, and receives, over the link in a step.
      arriving_bytes: bytes that every worker receives into its memory in a step.
      compute: seconds of compressing and decoding.
      wire: seconds of the exchange.
      step: seconds of the whole step.
      speedup: seconds of a dense float32 step / seconds of this one.
      break_even: speed of the link, in bits per second, above which the dense step is faster. 0 if it always is, inf
        if it never is.
      transfers: the collectives of one update.
      squares: whether the method takes `sum_grad_squared`.
    """

    method: str
    transport: str
    wire_bytes: float
    arriving_bytes: int
    compute: float
    wire: float
    step: float
    speedup: float
    break_even: float
    transfers: tuple[Transfer, ...]
    squares: bool

    @property
    def gathers_much(self) -> bool:
        """Whether a worker may run out of memory."""
        return self.arriving_bytes > MUCH


class Plan(NamedTuple):
    """What `plan` returns. `str(plan)` is a table and a sentence of advice.

    Attributes:
      rows: the prediction of each method, the fastest first.
      dense: the prediction of the dense float32 mean.
      best: the fastest other method.
      half: seconds of a step with a plain float16 all-reduce, without gcjax.
      setting: what was predicted for.
    """

    rows: tuple[Prediction, ...]
    dense: Prediction
    best: Prediction
    half: float
    setting: Setting

    def at(self, link: Link | str | float) -> "Plan":
        """The same for another link between the hosts, such as "10Gbit" (with the same latency) or a `Link`."""
        candidates = [Candidate(row.method, row.transfers, row.compute, row.squares) for row in self.rows]
        return predict(candidates, self.setting._replace(link=as_link("link", link, self.setting.link.latency)))

    @property
    def advice(self) -> str:
        """Whether to compress, and with which method, in one sentence."""
        best, dense = self.best, self.dense
        if self.setting.hosts == 1:
            return "Do not compress: nothing crosses the link."
        saved = 1 - best.step / dense.step
        if saved < WORTH_IT:
            saves = f"saves {100 * saved:.1f} % of the step" if saved > 0 else f"is slower than {DENSE}"
            return f"Do not compress: the best, {best.method}, {saves}."
        half = f"a plain float16 all-reduce {seconds_text(self.half)}"
        times = f"{best.method} takes {seconds_text(best.step)} a step, {DENSE} {seconds_text(dense.step)}"
        if best.step > (1 - WORTH_IT) * self.half:
            return f"A float16 all-reduce will do: {times}, {half}."
        return (
            f"{times}, which is {best.speedup:.1f} times as long, and {half}. The prediction does not include what a "
            "method does to the accuracy, and so to the number of steps."
        )

    def __str__(self) -> str:
        setting = self.setting
        inside = f" in {setting.hosts} hosts of {setting.inner_workers}" if setting.inner_workers > 1 else ""
        head = (
            f"{setting.parameters:,} parameters, {setting.workers:,} workers{inside}, "
            f"{rate_text(setting.link.bits_per_second)}, step without exchange {seconds_text(setting.step_time)}"
        )
        titles = ("method", "transport", "wire MB", "compute ms", "wire ms", "step ms", "speed-up", "pays below")
        cells = [titles, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in cells
        ]
        much = any(row.gathers_much for row in self.rows)
        notes = [f"*: every worker gathers more than {MUCH / 1e9:.0f} GB."] if much else []
        if setting.hosts > MEASURED_HOSTS:
            notes.append(f"Extrapolated: predictions were compared with measurements of up to {MEASURED_HOSTS} hosts.")
        return "\n".join([head, "", *(line.rstrip() for line in lines), *notes, "", self.advice])


def predict(candidates: Iterable[Candidate], setting: Setting) -> Plan:
    """The plan for these methods. One of them must be `DENSE`."""
    candidates = list(candidates)
    base = next(candidate for candidate in candidates if candidate.method == DENSE)
    rows = sorted((_prediction(candidate, base, setting) for candidate in candidates), key=lambda row: row.step)
    dense = next(row for row in rows if row.method == DENSE)
    best = next((row for row in rows if row is not dense), dense)
    halved = tuple(t._replace(bytes=t.bytes // 2) for t in base.transfers)
    half = base._replace(transfers=halved).step_seconds(setting)
    return Plan(tuple(rows), dense, best, half, setting)


def _prediction(candidate: Candidate, dense: Candidate, setting: Setting) -> Prediction:
    step = candidate.step_seconds(setting)
    return Prediction(
        method=candidate.method,
        transport=_transport(candidate.transfers, setting.hosts),
        wire_bytes=sum(ring_bytes(transfer, setting.hosts) for transfer in candidate.transfers),
        arriving_bytes=sum(arriving_bytes(transfer, setting.hosts) for transfer in candidate.transfers),
        compute=candidate.compute,
        wire=setting.exchange_seconds(candidate.transfers) + setting.inner_mean_seconds(candidate.squares),
        step=step,
        speedup=dense.step_seconds(setting) / step,
        break_even=_break_even(candidate, dense, setting),
        transfers=candidate.transfers,
        squares=candidate.squares,
    )


def _break_even(candidate: Candidate, dense: Candidate, setting: Setting) -> float:
    """Speed of the link at which the method and the dense mean take equally long, by bisection of its logarithm."""

    def pays(bits_per_second: float) -> bool:
        there = setting._replace(link=setting.link._replace(bits_per_second=bits_per_second))
        return candidate.step_seconds(there) < dense.step_seconds(there)

    if not pays(_SLOWEST):
        return 0.0
    if pays(_FASTEST):
        return math.inf
    low, high = _SLOWEST, _FASTEST
    while high > 1.0001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _transport(transfers: tuple[Transfer, ...], hosts: int) -> str:
    """The collectives, without those that carry next to nothing."""
    total = sum(transfer.bytes for transfer in transfers)
    kinds = [transfer.kind for transfer in transfers if transfer.bytes > total / 1e3]
    return " + ".join(dict.fromkeys(kinds)) if hosts > 1 else "none"


def _cells(row: Prediction) -> tuple[str, ...]:
    return (
        row.method,
        row.transport + "*" * row.gathers_much,
        f"{row.wire_bytes / 1e6:,.3g}" if row.wire_bytes < 1e9 else f"{row.wire_bytes / 1e6:,.0f}",
        f"{1e3 * row.compute:,.1f}",
        f"{1e3 * row.wire:,.1f}",
        f"{1e3 * row.step:,.1f}",
        f"{row.speedup:.2f}",
        "" if row.method == DENSE else rate_text(row.break_even),
    )
