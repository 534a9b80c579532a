"""The network model: the seconds that a collective takes over a link. Also the units of links, times and sizes.

A collective of m bytes between p workers, over links of latency a and b bytes per second, takes the shorter of:

    all-reduce   recursive doubling, ceil(log2 p) (a + m / b); or halving and doubling, 2 ceil(log2 p) a +
                 2 (p - 1) / p m / b: a ring moves the same bytes in 2 (p - 1) rounds
    all-gather   recursive doubling, ceil(log2 p) a + (p - 1) m / b
    all-to-all   pairwise, (p - 1) a + (p - 1) / p m / b; or Bruck's algorithm, ceil(log2 p) (a + m / 2 b)

**Source.** Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
doi 10.1177/1094342005051521, tables of section 4; exact there for powers of two. Links carry both directions at once.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from gcjax._comm.simulated import Transfer, arriving_bytes
from gcjax._validation import check_number

EFFICIENCY = 1448 / 1514  # TCP's payload in a full Ethernet frame: 0.956
PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
SPEEDS = {
    prefix + unit: factor * (8 if unit == "B/s" else 1)
    for prefix, factor in PREFIXES.items()
    for unit in ("bit", "bit/s", "bps", "b/s", "B/s")
    if prefix != "B"
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
_NUMBER = r"\s*(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*"


class Link(NamedTuple):
    """A network link.

    Attributes:
      bits_per_second: line rate, each way.
      latency: seconds that an empty message takes.
      efficiency: share of the rate that is left for the content. The default is for TCP over Ethernet.

    >>> import gcjax
    >>> link = gcjax.Link(bits_per_second=1e9, latency=50e-6)
    >>> costs = {"dense float32": gcjax.Cost(0, 1e-9, 0)}
    >>> plan = gcjax.plan("1M", 8, link, 0.01, methods=[], costs=costs)
    >>> round(plan.best.wire, 3)  # seconds
    0.059
    """

    bits_per_second: float
    latency: float
    efficiency: float = EFFICIENCY

    def seconds(self, transfer: Transfer, workers: int) -> float:
        """Seconds of one collective between workers that each have such a link."""
        if workers == 1:
            return 0.0
        a, m, rounds = self.latency, 8 * transfer.bytes / (self.bits_per_second * self.efficiency), _log2(workers)
        rest = (workers - 1) / workers
        if transfer.kind == "all_gather":
            return rounds * a + (workers - 1) * m
        if transfer.kind == "all_to_all":
            return min((workers - 1) * a + rest * m, rounds * (a + m / 2))
        return min(rounds * (a + m), 2 * (rounds * a + rest * m))


def _log2(workers: int) -> int:
    return (workers - 1).bit_length()


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

    def exchange_seconds(self, transfers: Iterable[Transfer]) -> float:
        """Seconds of the collectives between hosts, one after the other. The inner workers each move a part."""
        transfers = list(transfers)
        seconds = sum(self.link.seconds(transfer, self.hosts) for transfer in transfers)
        if self.inner_link is not None and self.hosts > 1:
            parts = [arriving_bytes(t, self.hosts) // self.inner_workers for t in transfers if t.kind != "maximum"]
            gathers = (Transfer("all_gather", part) for part in parts)
            seconds += sum(self.inner_link.seconds(gather, self.inner_workers) for gather in gathers)
        return seconds

    def inner_mean_seconds(self, squares: bool) -> float:
        """Seconds of the dense mean within a host, of the gradient and, with `squares`, of `sum_grad_squared`."""
        if self.inner_link is None:
            return 0.0
        return self.inner_link.seconds(Transfer("all_reduce", 4 * self.parameters), self.inner_workers) * (1 + squares)

    def step_seconds(self, transfers: Iterable[Transfer], squares: bool, compute: float) -> float:
        """Seconds of a whole step, `compute` of them for compressing and decoding."""
        return self.step_time + compute + self.inner_mean_seconds(squares) + self.exchange_seconds(transfers)


def as_link(name: str, value: Link | str | float, latency: float) -> Link:
    """A `Link` from bits per second or a text like "10Gbit", with that latency. A `Link` is checked and returned.

    Args:
      name: of the argument, for the message.
      value: what the user passed.
      latency: seconds.

    Raises:
      ValueError: a text that is not understood, or a value out of range.
      TypeError: neither a `Link`, a text nor a number.
    """
    if isinstance(value, Link):
        check_number(f"{name}.bits_per_second", value.bits_per_second, 0)
        check_number(f"{name}.latency", value.latency, 0, low_included=True)
        check_number(f"{name}.efficiency", value.efficiency, 0, 1)
        return value
    good = 'such as "1Gbit", "100Mbit" or "50GB/s"'
    return Link(_amount(name, value, "a speed", good, SPEEDS), latency)


def as_seconds(name: str, value: str | float) -> float:
    """Seconds from a number of seconds or a text like "300ms". Raises as `as_link`."""
    good = 'such as "0.3s", "300ms", "50us" or a number of seconds'
    return _amount(name, value, "a time", good, TIMES, zero=True)


def as_count(name: str, value: str | float) -> int:
    """A whole number from a number or a text like "25.6M". Raises as `as_link`."""
    good = 'such as "25.6M" or 25_600_000'
    count = _amount(name, value, "a number", good, PREFIXES)
    if count < 1 or round(count, 3) != round(count):
        raise ValueError(f"{name} must be a whole number {good}, got {value!r}")
    return round(count)


def _amount(name: str, value: str | float, kind: str, good: str, units: dict[str, float], zero: bool = False) -> float:
    """A positive number, or zero if allowed, from a number or from a text with one of the units."""
    if isinstance(value, str):
        found = re.fullmatch(_NUMBER + f"({'|'.join(units)})", value)
        if not found:
            raise ValueError(f"{name} must be {kind} {good}, got {value!r}")
        amount = float(found[1]) * units[found[2]]
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {good}, got {value!r}")
    else:
        amount = float(value)
    if not math.isfinite(amount) or amount < 0 or (amount == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'at least' if zero else 'above'} 0, {good}, got {value!r}")
    return amount


def rate_text(bits_per_second: float) -> str:
    """A speed as text: "25 Gbit"."""
    if bits_per_second in (0, math.inf):
        return "never" if bits_per_second == 0 else "always"
    prefix = next(p for p in ("T", "G", "M", "k", "") if bits_per_second >= PREFIXES[p] or not p)
    return f"{bits_per_second / PREFIXES[prefix]:.3g} {prefix}bit"


def seconds_text(seconds: float) -> str:
    """A time as text: "1.25 s"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
