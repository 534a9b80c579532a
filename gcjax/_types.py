"""Type aliases that every package uses."""

from typing import Any

import jax
import jax.typing

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
PyTree = Any
AxisNames = str | tuple[str, ...] | None
