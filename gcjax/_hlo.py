"""Compiled programs, read from the text that XLA prints: instructions, and the bytes that collectives move."""

import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?(?P<name>[\w.\-]+) = (?P<result>.*?)(?P<opcode>[a-z][a-z0-9\-]*)\(")
# Axes of a mesh, and along which of them: mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}
_OF_MESH = (
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'[^':]*',?)*)\}[, ]?"
)
Groups = set[frozenset[int]]  # the devices that exchange something with each other


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str  # of its result
    opcode: str  # as XLA prints it, without "-start"
    shapes: list[tuple[str, int]]  # (dtype, number of elements) of each array of the result
    operands: list[str]  # their names; of a constant its value
    is_root: bool  # whether its result is the computation's
    line: str  # as printed, without comments

    @property
    def elements(self) -> int:
        """Elements of the result, of all its arrays together."""
        return sum(size for _, size in self.shapes)


class Program(NamedTuple):
    """The computations of a module by name, and the name of the entry."""

    computations: dict[str, list[Instruction]]
    entry: str


class Collective(NamedTuple):
    """One array that a collective moves."""

    kind: str  # of `COLLECTIVES`
    dtype: str  # as XLA prints it
    elements: int
    groups: Groups | None  # the devices that exchange it; None for a permutation
    ring_bytes: float  # sent by a worker, with the algorithms of a ring
    computation: str  # its name; "" for the entry, so that other names are mostly branches of a conditional


def parse(text: str) -> Program:
    """Parse the text of a compiled HLO module."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
            computations[name].append(_instruction(match))
    if not entry:
        raise ValueError("the text has no ENTRY computation")
    return Program(computations, entry)


def _instruction(match: re.Match[str]) -> Instruction:
    opcode, line = match["opcode"], match.string
    shapes = re.findall(r"([a-z][a-z0-9]*)\[([0-9,]*)\]", match["result"])
    if opcode in ("all-gather-start", "all-to-all-start"):  # the result holds the operands too, in front
        shapes = shapes[len(shapes) // 2 :]
    elif opcode == "collective-permute-start":  # operand, result, and on some backends counters
        shapes = shapes[1:2]
    inside = line[match.end() :].split(")", 1)[0]
    return Instruction(
        name=match["name"],
        opcode=opcode.removesuffix("-start"),
        shapes=[(dtype, math.prod(map(int, dims.split(","))) if dims else 1) for dtype, dims in shapes],
        operands=[operand.split()[-1].lstrip("%") for operand in inside.split(",") if operand.strip()],
        is_root=match[1] is not None,
        line=line,
    )


def replica_groups(line: str) -> Groups | None:
    """The sets of devices that exchange something in a line of a program; None where it names none.

    Raises:
      ValueError: they are printed in a form that is not known here.
    """
    if "replica_groups=" not in line:
        return None
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return {frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])}
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        groups = _counted(iota[2], iota[3]).reshape(_numbers(iota[1]))
    elif axes := re.search(_OF_MESH, line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes[1])}
        devices = _counted(axes[2] or str(math.prod(sizes.values())), axes[3]).reshape(list(sizes.values()))
        along = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", axes[4])]
        size = math.prod(devices.shape[axis] for axis in along)
        groups = np.moveaxis(devices, along, range(-len(along), 0)).reshape(-1, size)
    else:
        raise ValueError(f"these replica groups are printed in an unknown form: {line.strip()[:300]}")
    return {frozenset(group) for group in groups.tolist()}


def _numbers(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",")]


def _counted(shape: str, order: str | None) -> np.ndarray:
    """Devices counted along `shape`, with its axes in another order."""
    devices = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return devices.transpose(_numbers(order)) if order else devices


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled program, one for each array of their results.

    Raises:
      ValueError: on a collective whose bytes are not known here.
    """
    program = parse(text)
    found = []
    for name, computation in program.computations.items():
        for instruction in computation:
            if instruction.opcode in COLLECTIVES:
                groups = replica_groups(instruction.line)
                for dtype, elements in instruction.shapes:
                    moved = elements * BYTES[dtype] * _sent_share(instruction, groups)
                    place = "" if name == program.entry else name
                    found.append(Collective(instruction.opcode, dtype, elements, groups, moved, place))
    return found


def _sent_share(instruction: Instruction, groups: Groups | None) -> float:
    """The share of the bytes of the result that a worker sends."""
    if instruction.opcode == "collective-permute":
        return 1.0
    if not groups or instruction.opcode not in ("all-gather", "all-to-all", "all-reduce"):
        raise ValueError(f"no rule for the bytes of {instruction.line.strip()[:300]}")
    size = max(map(len, groups))
    return (2 if instruction.opcode == "all-reduce" else 1) * (size - 1) / size


def totals(found: Iterable[Collective]) -> list[float]:
    """Bytes that a step may move: all outside of branches, and one branch for each kind of collective in branches."""
    always, branches = 0.0, dict[str, dict[str, float]]()
    for c in found:
        if c.computation:
            choices = branches.setdefault(c.kind, {})
            choices[c.computation] = choices.get(c.computation, 0.0) + c.ring_bytes
        else:
            always += c.ring_bytes
    return [always + sum(choice) for choice in itertools.product(*(moved.values() for moved in branches.values()))]
