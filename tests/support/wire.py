"""What a compiled program puts on the wire, read from its text."""

import re

import numpy as np


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
