"""Checks of arguments. A value that JAX is tracing cannot be looked at and passes."""

import math

import jax


def number(name: str, value, low: float, high: float = math.inf, *, low_included=False, why: str = "") -> None:
    """Raise ValueError unless low < value <= high (low <= value with `low_included`) and value is finite."""
    if isinstance(value, jax.core.Tracer):
        return
    try:
        x = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    if not math.isfinite(x) or x > high or x < low or (x == low and not low_included):
        interval = f"{'[' if low_included else '('}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        raise ValueError(f"{name} must be in {interval}, got {value!r}{'; ' + why if why else ''}")


def choice(name: str, value, allowed: tuple) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def flag(name: str, value) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def random_key(name: str, value) -> None:
    """Raise TypeError unless `value` is a typed JAX random key."""
    if not isinstance(value, jax.Array) or not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} must be a key made by jax.random.key(seed), got {value!r}")
