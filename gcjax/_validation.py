"""Checks of arguments. Values that JAX is tracing pass unchecked."""

import math
from collections.abc import Collection
from typing import Any

import jax

TRANSPORTS = ("all_gather", "two_phase", "auto")


def check_number(
    name: str,
    value: Any,  # what is being checked
    low: float,
    high: float = math.inf,
    *,
    low_included: bool = False,
    high_included: bool = True,
) -> None:
    """Raise unless `value` is a finite number in (low, high], or as `low_included` and `high_included` say.

    Args:
      name: of the argument, for the message.
      value: what the caller passed.
      low: lower bound.
      high: upper bound.
      low_included: whether `low` itself is allowed.
      high_included: whether `high` itself is allowed.

    Raises:
      TypeError: `value` is no number.
      ValueError: it lies outside the interval.
    """
    if isinstance(value, jax.core.Tracer):
        return
    try:
        x = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    above_low, below_high = x > low or (low_included and x == low), x < high or (high_included and x == high)
    if not (math.isfinite(x) and above_low and below_high):
        closed = high_included and not math.isinf(high)
        interval = f"{'[' if low_included else '('}{low:g}, {high:g}{']' if closed else ')'}"
        raise ValueError(f"{name} must be in {interval}, got {value!r}")


def check_integer(name: str, value: object, low: int, high: float = math.inf, *, multiple: int = 1) -> None:
    """Raise TypeError unless `value` is an int, ValueError unless it is in [low, high] and a multiple of `multiple`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high or value % multiple:
        interval = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise ValueError(f"{name} must be {interval}{f' and a multiple of {multiple}' * (multiple > 1)}, got {value!r}")


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_transport(transport: object) -> None:
    """Raise ValueError unless `transport` is one of `TRANSPORTS`.

    >>> import gcjax.extend as gx
    >>> gx.check_transport("udp")
    Traceback (most recent call last):
    ValueError: transport must be one of 'all_gather', 'two_phase', 'auto', got 'udp'
    """
    check_choice("transport", transport, TRANSPORTS)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_function(name: str, value: object, example: str) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, such as {example}, got {value!r}")


def check_transform(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an optax transform."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{name} must be an optax transform, such as optax.sgd(0.1) or gcjax.top_k_compress(), got {value!r}"
        )


def check_random_key(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a typed JAX random key."""
    if not isinstance(value, jax.Array) or not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} must be a key made by jax.random.key(seed), got {value!r}")


def static_share(name: str, value: Any) -> float:
    """A share in (0, 1] that fixes the size of a payload, as a float.

    Args:
      name: of the argument, for the message.
      value: what the caller passed.

    Raises:
      TypeError: `value` is no number, or is traced.
      ValueError: it lies outside the interval.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} fixes the size of the payload and cannot be traced; give a Python float, to "
            f"optax.inject_hyperparams with static_args={name!r}"
        )
    check_number(name, value, 0.0, 1.0)
    return float(value)
