"""The network model: the seconds that a collective takes over a link.

A collective of m bytes between p workers, over links of latency a and b bytes per second, takes the shorter of:

    all-reduce   recursive doubling, ceil(log2 p) (a + m / b); or halving and doubling, 2 ceil(log2 p) a +
                 2 (p - 1) / p m / b: a ring moves the same bytes in 2 (p - 1) rounds
    all-gather   recursive doubling, ceil(log2 p) a + (p - 1) m / b
    all-to-all   pairwise, (p - 1) a + (p - 1) / p m / b; or Bruck's algorithm, ceil(log2 p) (a + m / 2 b)

**Source.** Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
doi 10.1177/1094342005051521, tables of section 4; exact there for powers of two. Links carry both directions at once.
"""

from typing import NamedTuple

from gcjax._comm.simulated import Transfer
from gcjax._units import as_speed
from gcjax._validation import check_number

EFFICIENCY = 1448 / 1514  # TCP's payload in a full Ethernet frame: 0.956


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
        a, m = self.latency, 8 * transfer.bytes / (self.bits_per_second * self.efficiency)
        rounds, rest = (workers - 1).bit_length(), (workers - 1) / workers
        if transfer.kind == "all_gather":
            return rounds * a + (workers - 1) * m
        if transfer.kind == "all_to_all":
            return min((workers - 1) * a + rest * m, rounds * (a + m / 2))
        return min(rounds * (a + m), 2 * (rounds * a + rest * m))


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
    if not isinstance(value, Link):
        return Link(as_speed(name, value), latency)
    check_number(f"{name}.bits_per_second", value.bits_per_second, 0)
    check_number(f"{name}.latency", value.latency, 0, low_included=True)
    check_number(f"{name}.efficiency", value.efficiency, 0, 1)
    return value
