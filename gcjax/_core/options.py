"""The options that made a state: recorded in its arrays, and compared with those of the transform that has it.

Checkpointers such as Orbax restore arrays by their names. They fill a state of other options without a word where the
names and shapes agree, and leave out the arrays that it does not have.
"""

import dataclasses
import json
import re
import zlib
from typing import Any

import jax
import numpy as np

from gcjax._core.owned import shared_among
from gcjax._core.per_worker import OTHER_OPTIONS
from gcjax._types import Array, PyTree


def meaning(buckets: PyTree) -> dict[str, str]:
    """The options that give the arrays of a state their meaning.

    They do not depend on the process, on the versions of Python and JAX, or on the number of workers.

    Args:
      buckets: one worker's state of each bucket, of arrays or of their shapes.

    Returns:
      From the name of each static field to its text, and from that of each array to its shape.
    """
    found: dict[str, str] = {}

    def note(name: str, node: Any) -> None:
        for field in dataclasses.fields(node) if dataclasses.is_dataclass(node) else ():
            if field.metadata.get("static"):
                found[f"{name}.{field.name}"] = re.sub(" at 0x[0-9a-f]+", "", repr(getattr(node, field.name)))
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        for keys, child in children:
            if child is node:
                found[name] = str(np.shape(node))
            elif (
                len(children) == 1 and not isinstance(node, tuple | list | dict) and not dataclasses.is_dataclass(node)
            ):
                note(name, child)  # a wrapper, as NNX puts around every array
            else:
                note(f"{name}.{_text_of(keys[0])}", child)

    note("buckets", shared_among(buckets, 1))
    return found


def _text_of(key: Any) -> str:
    """A key of a path of JAX, which may write it in another way one day."""
    return str(next(getattr(key, name) for name in ("name", "idx", "key") if hasattr(key, name)))


def checksum(options: dict[str, str]) -> int:
    """Of a `meaning`: from 0 to 2**32 - 1."""
    return zlib.crc32(json.dumps(options, sort_keys=True).encode())


def check_options(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise ValueError if another transform made the state: its options would be used, silently.

    Args:
      ours: the `meaning` of a new state of this transform.
      theirs: that of the state that it has.
    """
    for name in ours | theirs:
        own, other = ours.get(name, "absent"), theirs.get(name, "absent")
        if own != other:
            raise ValueError(
                "the state was initialised by a transform with other options, such as another transport or feedback: "
                f"its {name} is {_short(other)}, that of this transform {_short(own)}. {OTHER_OPTIONS}"
            )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_checksum(options: dict[str, str], recorded: Array) -> None:
    """Raise ValueError if the arrays of a state were made by other options than the rest of it.

    Args:
      options: the `meaning` of the state.
      recorded: the checksum in its arrays, one or several.
    """
    here = checksum(options)
    for saved in np.unique(np.asarray(recorded)):
        if saved != here:
            raise ValueError(
                "the arrays of this state were made with other options than the state, such as another transport or "
                f"feedback, or by another version of gcjax: their options have the checksum {saved:#010x}, its own "
                f"{here:#010x}. A checkpoint of other options was restored into it. {OTHER_OPTIONS}"
            )
