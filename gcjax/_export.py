"""Lets `jax.export` serialise functions of gcjax's states: how the static fields of their nodes become bytes and back.

Not by pickle, which would let an exported file run any code when it is loaded.
"""

import dataclasses
import functools
import json
import pkgutil
import sys
from typing import Any

from jax import export

from gcjax._core.owned import Owned
from gcjax._core.per_worker import PerWorker


@functools.cache  # a name can be registered once, also if the package is reloaded
def register_states() -> None:
    """Register every NamedTuple of the package, and every dataclass that is a node of a state, with `jax.export`."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "gcjax"]
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__}
    for cls in sorted(classes, key=_name):
        if hasattr(cls, "_fields"):
            export.register_namedtuple_serialization(cls, serialized_name=_name(cls))
        elif cls in (PerWorker, Owned) or (dataclasses.is_dataclass(cls) and cls.__name__.endswith("State")):
            export.register_pytree_node_serialization(
                cls, serialized_name=_name(cls), serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
            )


def to_bytes(static: Any) -> bytes:
    """Static fields as JSON.

    Raises:
      TypeError: a value of a sort that is not known here.
    """
    return json.dumps(_encoded(static)).encode()


def from_bytes(text: bytes) -> Any:
    """The inverse of `to_bytes`. Modules that are named must have been imported."""
    return _decoded(json.loads(text))


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _encoded(x: Any) -> Any:
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if type(x) is tuple:
        return [_encoded(item) for item in x]
    if hasattr(x, "_fields"):
        return {"class": _name(type(x)), "fields": [_encoded(item) for item in x]}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {"class": _name(type(x)), "fields": [_encoded(getattr(x, f.name)) for f in dataclasses.fields(x)]}
    if callable(x) and getattr(x, "__qualname__", "<").isidentifier():
        return {"function": _name(x)}
    raise TypeError(f"cannot export a state with the static field {x!r}; make it a function of a module or a dataclass")


def _decoded(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(_decoded(item) for item in x)
    if not isinstance(x, dict):
        return x
    name = x.get("function") or x["class"]
    if name.split(":")[0] not in sys.modules:
        raise ValueError(f"the exported function uses {name}, whose module has not been imported; import it first")
    found = pkgutil.resolve_name(name)
    if "function" in x:
        return found
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise ValueError(f"the exported function names {name}, which is neither a dataclass nor a NamedTuple")
    return found(*map(_decoded, x["fields"]))
