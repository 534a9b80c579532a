"""Checks before any collective that all processes are about to run the same program.

Processes with different options compile different programs. Their collectives then wait for each other for ever or,
worse, exchange words that mean different things. So the processes first compare what they are about to run, through the
key-value store of `jax.distributed`, which runs no collective and has time limits.
"""

import collections
import hashlib
import json
import re
import zlib
from typing import Any

import jax
import jaxlib
import numpy as np

from gcjax._jax_compat import KeyValueStore, shared_store
from gcjax._types import PyTree
from gcjax._version import __version__

# As long as JAX itself lets processes wait for each other at the start. A process that dies ends the wait much earlier.
TIMEOUT_SECONDS = 300
SHOWN = 60  # characters on either side of a difference

_asked: collections.Counter[str] = collections.Counter()  # checks so far, by a hash of the processes that took part


def check_agreement(mesh: jax.sharding.Mesh, **things: PyTree) -> None:
    """Raise on every process of `mesh` unless all of them call this with equal things and equal versions of JAX.

    Steps made by `gcjax.make_train_step` check themselves: before the first step the lowered program (in which the
    options of a method are constants), the shapes of the batch, and the state; again for a batch of new shapes. In a
    hand-written loop, call it once before the first step:

        gcjax.check_agreement(mesh, program=train_step.lower(params, opt_state, batch), params=params)

    It costs one trace, which the first step reuses, some milliseconds for each megabyte of program text, and a copy of
    the arrays to the host. With a single process it does nothing.

    Args:
      mesh: the devices. The processes that own them take part.
      **things: what to compare, under names of your choice: what `jax.jit(...).lower(...)` returns, or pytrees. Arrays
        are compared by dtype, shape and values; arrays over several processes by dtype and shape only; other leaves by
        their `repr`.

    Raises:
      RuntimeError: (on all processes) they differ; the message says where. Or some processes did not take part within
        300 seconds; the message names them.
      TypeError: the `repr` of a leaf holds an address and so cannot be compared.

    >>> import gcjax, jax
    >>> gcjax.check_agreement(jax.make_mesh((1,), ("data",)), learning_rate=1e-3)
    """
    compare_processes(mesh, things, TIMEOUT_SECONDS)


def compare_processes(mesh: jax.sharding.Mesh, things: dict[str, PyTree], timeout_seconds: int) -> None:
    """`check_agreement` with the time that a process waits for the others."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    store = shared_store()
    # Some TPU runtimes connect processes without jax.distributed, and then there is no store.
    if len(processes) == 1 or store is None:
        return
    group = _sha(str(processes).encode())
    _asked[group] += 1
    folder = f"gcjax/{group}/{_asked[group]}"
    notes = {"versions": [f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}", f"gcjax {__version__}"]}
    notes["mesh"] = [f"{dict(mesh.shape)} of devices {[device.id for device in mesh.devices.flat]}"]
    notes |= {name: _lines(name, thing) for name, thing in things.items()}
    own_digests = {name: _digest(lines) for name, lines in notes.items()}
    digests = _exchange(store, folder, processes, own_digests, timeout_seconds)
    first = digests[processes[0]]
    others = [process for process in processes if digests[process] != first]
    if others:
        names = [name for name in first | digests[others[0]] if first.get(name) != digests[others[0]].get(name)]
        # Any other difference explains more than the program that follows from it.
        names = [name for name in names if not _is_program(things.get(name))] or names
        mine = {name: notes.get(name, []) for name in names}
        pair = _shared_notes(store, folder, (processes[0], others[0]), mine, timeout_seconds)
        raise RuntimeError(_disagreement(processes[0], others, pair))


def _is_program(thing: PyTree) -> bool:
    return hasattr(thing, "as_text")


def _lines(name: str, thing: PyTree) -> list[str]:
    """The text that stands for a thing in the comparison."""
    if _is_program(thing):
        return thing.as_text().splitlines()
    found = jax.tree_util.tree_leaves_with_path(thing, is_leaf=lambda node: node is None)
    return [f"{name}{jax.tree_util.keystr(path)}: {_text(name, leaf)}" for path, leaf in found]


def _text(name: str, leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        kind = f"{leaf.dtype}{list(leaf.shape)}"
        if isinstance(leaf, jax.ShapeDtypeStruct) or not getattr(leaf, "is_fully_replicated", True):
            return kind
        values = np.ascontiguousarray(leaf)
        return f"{kind} with values {values} " if values.size == 1 else f"{kind} with SHA-256 {_sha(values)}"
    text = repr(leaf)
    if re.search(r" at 0x[0-9a-f]+", text):
        raise TypeError(f"{name} holds {text}, whose text differs between equal processes; pass what it is made of")
    return text


def _sha(data: Any) -> str:  # of anything with a buffer
    return hashlib.sha256(data).hexdigest()[:16]


def _digest(lines: list[str]) -> str:
    return _sha("\n".join(lines).encode())


def _exchange(
    store: KeyValueStore, folder: str, processes: list[int], digests: dict[str, str], timeout_seconds: int
) -> dict[int, dict[str, str]]:
    """Every process's digests."""
    own = jax.process_index()
    store.key_value_set(f"{folder}/digests/{own}", json.dumps(digests))
    try:
        store.wait_at_barrier(f"{folder}/barrier", 1000 * timeout_seconds, processes)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        present = {int(key.rsplit("/", 1)[1]) for key, _ in store.key_value_dir_get(f"{folder}/digests/")}
        missing = [process for process in processes if process not in present]
        raise RuntimeError(
            f"process {own} waited {timeout_seconds} seconds to compare its training step with the other processes', "
            f"but {_named(missing)} never came to that point. Each process must take the same steps: all of them, with "
            "batches of the same shapes"
        ) from error
    found = store.key_value_dir_get(f"{folder}/digests/")
    return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}


def _shared_notes(
    store: KeyValueStore, folder: str, pair: tuple[int, int], notes: dict[str, list[str]], timeout_seconds: int
) -> list[dict[str, list[str]]]:
    """The full notes of two processes, on all of them."""
    own = jax.process_index()
    if own in pair:
        store.key_value_set_bytes(f"{folder}/notes/{own}", zlib.compress(json.dumps(notes).encode()))
    found = [store.blocking_key_value_get_bytes(f"{folder}/notes/{p}", 1000 * timeout_seconds) for p in pair]
    return [json.loads(zlib.decompress(text)) for text in found]


def _disagreement(first: int, others: list[int], pair: list[dict[str, list[str]]]) -> str:
    differences = "; ".join(_difference(name, pair[0][name], pair[1][name], first, others[0]) for name in pair[0])
    return (
        f"the processes do not agree, so no step was taken: {_named(others)} would run something else than process "
        f"{first}. They differ in {differences}. Start all processes with the same options (which the program contains "
        "as constants), code, versions, batch shapes, seeds and checkpoints; to give one process's parameters to all, "
        "use jax.experimental.multihost_utils.broadcast_one_to_all"
    )


def _difference(name: str, a: list[str], b: list[str], first: int, other: int) -> str:
    """The first line that differs, cut to the surroundings of the first character that differs."""
    length = max(len(a), len(b))
    a, b = a + [""] * (length - len(a)), b + [""] * (length - len(b))
    x, y = next((x.strip(), y.strip()) for x, y in zip(a, b, strict=True) if x != y)
    place = next((i for i, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]), min(len(x), len(y)))
    window = slice(max(0, place - SHOWN), place + SHOWN)
    return f"{name}: process {first} has `{x[window]}` where process {other} has `{y[window]}`"


def _named(processes: list[int]) -> str:
    return f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
