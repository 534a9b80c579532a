"""Speeds, times and counts as text, such as "1Gbit", "300ms" and "25.6M": read and written."""

import math
import re

PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
SPEEDS = {
    prefix + unit: factor * (8 if unit == "B/s" else 1)
    for prefix, factor in PREFIXES.items()
    for unit in ("bit", "bit/s", "bps", "b/s", "B/s")
    if prefix != "B"
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
_NUMBER = r"\s*(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*"


def as_speed(name: str, value: str | float) -> float:
    """Bits per second from their number or a text like "10Gbit".

    Args:
      name: of the argument, for the message.
      value: what the user passed.

    Raises:
      ValueError: a text that is not understood, or a value out of range.
      TypeError: neither a text nor a number.
    """
    return _amount(name, value, 'a speed such as "1Gbit", "100Mbit" or "50GB/s"', SPEEDS)


def as_seconds(name: str, value: str | float) -> float:
    """Seconds from their number or a text like "300ms". Raises as `as_speed`."""
    return _amount(name, value, 'a time such as "0.3s", "300ms", "50us" or a number of seconds', TIMES, zero=True)


def as_count(name: str, value: str | float) -> int:
    """A whole number from a number or a text like "25.6M". Raises as `as_speed`."""
    good = 'a whole number such as "25.6M" or 25_600_000'
    count = _amount(name, value, good, PREFIXES)
    if count < 1 or round(count, 3) != round(count):
        raise ValueError(f"{name} must be {good}, got {value!r}")
    return round(count)


def _amount(name: str, value: str | float, good: str, units: dict[str, float], zero: bool = False) -> float:
    """A positive number, or zero if allowed, from a number or from a text with one of the units."""
    if isinstance(value, str):
        found = re.fullmatch(_NUMBER + f"({'|'.join(units)})", value)
        if not found:
            raise ValueError(f"{name} must be {good}, got {value!r}")
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
