"""Predicted steps: what every method takes in a setting, as numbers, as a table and as advice."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from gcjax._comm.link import Link, as_link
from gcjax._comm.simulated import Transfer, arriving_bytes, ring_bytes
from gcjax._units import rate_text, seconds_text

DENSE = "dense float32"
WORTH_IT = 0.03  # a smaller saving is not worth a compressor
MEASURED_HOSTS = 4  # the most of a measurement that predictions were compared with
MUCH = 10e9  # bytes: a worker that gathers more may run out of memory
_SLOWEST, _FASTEST = 1e3, 1e15  # bits per second, between which the break-even is searched


class Setting(NamedTuple):
    """What a step is predicted for.

    Attributes:
      parameters: number of parameters of the model.
      workers: number of all workers.
      link: of each host to the others.
      step_time: seconds of a step without the exchange.
      inner_workers: workers on each host.
      inner_link: between the workers of a host; None for one worker.
    """

    parameters: int
    workers: int
    link: Link
    step_time: float
    inner_workers: int
    inner_link: Link | None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.workers // self.inner_workers


class Update(NamedTuple):
    """An update of one method.

    Attributes:
      transfers: the collectives between the hosts, one after the other.
      compute: seconds of compressing and decoding.
      squares: whether the method takes `sum_grad_squared`.
    """

    transfers: tuple[Transfer, ...]
    compute: float
    squares: bool

    def wire_seconds(self, setting: Setting) -> float:
        """Seconds of the exchange between the hosts, and within each host."""
        hosts, inner = setting.hosts, setting.inner_workers
        seconds = sum(setting.link.seconds(transfer, hosts) for transfer in self.transfers)
        if setting.inner_link is None:
            return seconds
        # The dense mean of the gradient and of its squares; then each inner worker moves a part of the message.
        inside = [Transfer("all_reduce", 4 * setting.parameters)] * (1 + self.squares)
        if hosts > 1:
            parts = [arriving_bytes(t, hosts) // inner for t in self.transfers if t.kind != "maximum"]
            inside += [Transfer("all_gather", part) for part in parts]
        return seconds + sum(setting.inner_link.seconds(transfer, inner) for transfer in inside)

    def step_seconds(self, setting: Setting) -> float:
        """Seconds of a whole step."""
        return setting.step_time + self.compute + self.wire_seconds(setting)


class Prediction(NamedTuple):
    """The predicted step of one method.

    Attributes:
      method: its name.
      update: its update.
      dense: that of the dense float32 mean.
      setting: what is predicted for.
    """

    method: str
    update: Update
    dense: Update
    setting: Setting

    @property
    def transport(self) -> str:
        """The collectives that carry its bytes, without those that carry next to nothing."""
        total = sum(transfer.bytes for transfer in self.update.transfers)
        kinds = [transfer.kind for transfer in self.update.transfers if transfer.bytes > total / 1e3]
        return " + ".join(dict.fromkeys(kinds)) if self.setting.hosts > 1 else "none"

    @property
    def wire_bytes(self) -> float:
        """Bytes that a host sends, and receives, over the link in a step."""
        return sum(ring_bytes(transfer, self.setting.hosts) for transfer in self.update.transfers)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that every worker receives into its memory in a step."""
        return sum(arriving_bytes(transfer, self.setting.hosts) for transfer in self.update.transfers)

    @property
    def compute(self) -> float:
        """Seconds of compressing and decoding."""
        return self.update.compute

    @property
    def wire(self) -> float:
        """Seconds of the exchange."""
        return self.update.wire_seconds(self.setting)

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.update.step_seconds(self.setting)

    @property
    def speedup(self) -> float:
        """Seconds of a dense float32 step / seconds of this one."""
        return self.dense.step_seconds(self.setting) / self.step

    @property
    def break_even(self) -> float:
        """Speed of the link, in bits per second, above which the dense step is faster.

        It is 0 if the dense step always is faster, inf if it never is. Found by bisection of the logarithm.
        """
        low, high = _SLOWEST, _FASTEST
        if not self._pays(low):
            return 0.0
        if self._pays(high):
            return math.inf
        while high > 1.0001 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._pays(middle) else (low, middle)
        return low

    def _pays(self, bits_per_second: float) -> bool:
        setting = self.setting._replace(link=self.setting.link._replace(bits_per_second=bits_per_second))
        return self.update.step_seconds(setting) < self.dense.step_seconds(setting)


class Plan(NamedTuple):
    """What `plan` returns. `str(plan)` is a table and a sentence of advice.

    Attributes:
      rows: the prediction of each method, the fastest first.
      setting: what was predicted for.
    """

    rows: tuple[Prediction, ...]
    setting: Setting

    @property
    def dense(self) -> Prediction:
        """The prediction of the dense float32 mean."""
        return next(row for row in self.rows if row.method == DENSE)

    @property
    def best(self) -> Prediction:
        """The fastest other method."""
        return next((row for row in self.rows if row.method != DENSE), self.dense)

    @property
    def half(self) -> float:
        """Seconds of a step with a plain float16 all-reduce, without gcjax."""
        update = self.dense.update
        halved = tuple(transfer._replace(bytes=transfer.bytes // 2) for transfer in update.transfers)
        return update._replace(transfers=halved).step_seconds(self.setting)

    def at(self, link: Link | str | float) -> "Plan":
        """The same for another link between the hosts, such as "10Gbit" (with the same latency) or a `Link`."""
        setting = self.setting._replace(link=as_link("link", link, self.setting.link.latency))
        return ranked([row._replace(setting=setting) for row in self.rows])

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
        cells = [titles, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in cells
        ]
        much = any(row.arriving_bytes > MUCH for row in self.rows)
        notes = [f"*: every worker gathers more than {MUCH / 1e9:.0f} GB."] if much else []
        if setting.hosts > MEASURED_HOSTS:
            notes.append(f"Extrapolated: predictions were compared with measurements of up to {MEASURED_HOSTS} hosts.")
        return "\n".join([head, "", *(line.rstrip() for line in lines), *notes, "", self.advice])


def ranked(rows: Iterable[Prediction]) -> Plan:
    """The plan of these predictions, all for one setting. One of them must be of `DENSE`."""
    rows = sorted(rows, key=lambda row: row.step)
    return Plan(tuple(rows), rows[0].setting)


def _cells(row: Prediction) -> tuple[str, ...]:
    return (
        row.method,
        row.transport + "*" * (row.arriving_bytes > MUCH),
        f"{row.wire_bytes / 1e6:,.3g}" if row.wire_bytes < 1e9 else f"{row.wire_bytes / 1e6:,.0f}",
        f"{1e3 * row.compute:,.1f}",
        f"{1e3 * row.wire:,.1f}",
        f"{1e3 * row.step:,.1f}",
        f"{row.speedup:.2f}",
        "" if row.method == DENSE else rate_text(row.break_even),
    )
