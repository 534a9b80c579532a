"""What a compiled program puts on the wire, read from its text."""

import collections
import itertools
import math
import re
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Collective(NamedTuple):
    """kind, dtype and elements of the result; ring_bytes: what a worker sends; branch: of a conditional, "" outside."""

    kind: str
    dtype: str
    elements: int
    ring_bytes: float
    branch: str


def collectives(text: str, workers: int) -> list[Collective]:
    """All collectives of an HLO module. Raises on a kind whose bytes are not known here."""
    found = []
    branch = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):  # a computation begins
            branch = "" if line.startswith("ENTRY") else line.split()[0]
        line = re.sub(r"/\*.*?\*/", "", line)  # long tuples have their indices in comments
        match = re.search(rf"= (\(?[a-z0-9]+\[[^=]*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
        if not match:
            continue
        shapes = re.findall(r"([a-z0-9]+)\[([0-9,]*)\]", match[1])
        kind = match[2]
        for dtype, dims in shapes:
            elements = math.prod(int(d) for d in dims.split(",")) if dims else 1
            size = elements * BYTES[dtype]
            if kind == "all-gather":
                ring = size * (workers - 1) / workers
            elif kind == "all-reduce":
                ring = size * 2 * (workers - 1) / workers
            elif kind == "all-to-all":  # one element per worker in the result's tuple, or a single array
                ring = size * (workers - 1) / workers
            else:
                raise ValueError(f"no rule for {kind}: {line}")
            found.append(Collective(kind, dtype, elements, ring, branch))
    return found


def totals(found: list[Collective]) -> list[float]:
    """Bytes that a step may move: all outside of branches, and one branch for each kind of collective in branches."""
    branches: dict[str, collections.Counter] = {}
    for c in found:
        if c.branch:
            branches.setdefault(c.kind, collections.Counter())[c.branch] += c.ring_bytes
    always = sum(c.ring_bytes for c in found if not c.branch)
    return [always + sum(choice) for choice in itertools.product(*(moved.values() for moved in branches.values()))]


def along(text, mesh, axes):
    """The lines of a program without those collectives that do not run along `axes`."""
    numbers = np.arange(mesh.size).reshape(list(mesh.shape.values()))
    last = [list(mesh.shape).index(axis) for axis in axes]
    rows = np.moveaxis(numbers, last, range(-len(last), 0)).reshape(-1, np.prod([mesh.shape[axis] for axis in axes]))
    wanted = {frozenset(row) for row in rows.tolist()}
    lines = [line for line in text.splitlines() if replica_groups(line) in (None, wanted)]
    return "\n".join(lines)


def replica_groups(line):
    """The sets of devices that exchange something in a line of a program, None where it has none."""
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        groups = [map(int, group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        groups = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    else:
        return None
    return {frozenset(group) for group in groups}
