"""What a compiled program costs, read from its text: cycles, collectives, sorts, scatters, conditionals and loops."""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?)([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      opcode: as XLA prints it, without "-start".
      shapes: (dtype, number of elements) of each array of the result.
      cycles: the compiler's estimate, 0 where it gives none.
      body: computation of a loop's body; "" for other instructions.
      trips: known trip count of a loop; 1 where it is unknown.
      branches: computations of a conditional, in order.
      called: computations of a call or fusion.
    """

    opcode: str
    shapes: list[tuple[str, int]]
    cycles: int
    body: str
    trips: int
    branches: list[str]
    called: list[str]

    @property
    def elements(self) -> int:
        """Elements of the result, of all its arrays together."""
        return sum(size for _, size in self.shapes)


class Program(NamedTuple):
    """The computations of a module by name, and the name of the entry."""

    computations: dict[str, list[Instruction]]
    entry: str


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
            computations[name].append(_instruction(match, line))
    if not entry:
        raise ValueError("the text has no ENTRY computation")
    return Program(computations, entry)


def _instruction(match: re.Match, line: str) -> Instruction:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    body = re.search(r"body=%?([\w.\-]+)", line)
    listed = re.search(r"branch_computations=\{(.*?)\}", line)
    branches = [b.strip().lstrip("%") for b in listed[1].split(",")] if listed else []
    for side in ("true_computation", "false_computation"):
        branches += re.findall(rf"{side}=%?([\w.\-]+)", line)
    shapes = re.findall(r"([a-z][a-z0-9]*)\[([0-9,]*)\]", match[2])
    if match[3] == "all-gather-start":  # its result holds the operands too, in front
        shapes = shapes[len(shapes) // 2 :]
    elif match[3] == "collective-permute-start":  # operand, result, and on some backends counters
        shapes = shapes[1:2]
    return Instruction(
        opcode=match[3].removesuffix("-start"),
        shapes=[(dtype, math.prod(map(int, dims.split(","))) if dims else 1) for dtype, dims in shapes],
        cycles=int(cycles[1]) if cycles else 0,
        body=body[1] if body else "",
        trips=int(trips[1]) if trips else 1,
        branches=branches,
        called=_CALLED.findall(line),
    )


def cycles(program: Program, most_costly: bool, name: str | None = None) -> int:
    """Estimated cycles of one run: of every conditional the most costly branch, or the cheapest.

    A loop counts its body as often as its known trip count says, once where that is unknown.
    """
    total = 0
    for instruction in program.computations[name or program.entry]:
        if instruction.opcode == "while":
            total += instruction.trips * cycles(program, most_costly, instruction.body)
        elif instruction.branches:
            choose = max if most_costly else min
            total += choose(cycles(program, most_costly, branch) for branch in instruction.branches)
        elif instruction.opcode == "call":
            total += sum(cycles(program, most_costly, called) for called in instruction.called)
        else:
            total += instruction.cycles
    return total


def counts(program: Program, large: int) -> dict[str, int]:
    """How often the program has what accelerators are slow at, wherever it stands; and the collectives' result bytes.

    Args:
      program: the compiled program.
      large: elements from which on an all-reduce, or what a loop carries, counts as large.
    """
    every = [instruction for body in program.computations.values() for instruction in body]
    moved = [i for i in every if i.opcode in COLLECTIVES]
    return {
        "collectives": len(moved),
        "collective_bytes": sum(BYTES.get(dtype, 4) * size for i in moved for dtype, size in i.shapes),
        "large_all_reduces": sum(i.elements >= large for i in moved if i.opcode == "all-reduce"),
        "sorts": sum(i.opcode == "sort" for i in every),
        "scatters": sum(i.opcode == "scatter" for i in every),
        "conditionals": sum(i.opcode == "conditional" for i in every),
        "loops": sum(i.opcode == "while" for i in every),
        "large_loops": sum(i.elements >= large for i in every if i.opcode == "while"),
    }
