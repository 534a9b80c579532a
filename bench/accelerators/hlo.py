"""What a compiled program costs, read from its text: cycles, collectives, sorts, scatters, conditionals and loops."""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<result>.*?)(?P<opcode>[a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      opcode: as XLA prints it, without "-start".
      shapes: (dtype, number of elements) of each array of the result.
      cycles: the compiler's estimate, 0 where it gives none.
      body: computation of a loop's body; "" for other instructions.
      trips: known trip count of a loop; None where it is unknown, and for other instructions.
      branches: computations of a conditional, in order.
      called: computations of a call or fusion.
      line: as printed, without comments.
    """

    opcode: str
    shapes: list[tuple[str, int]]
    cycles: int
    body: str
    trips: int | None
    branches: list[str]
    called: list[str]
    line: str

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
    lines: dict[str, dict[str, re.Match]] = {}  # computation -> instruction -> its line
    entry = name = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            lines[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif name and (match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
            lines[name][match["name"]] = match
    if not entry:
        raise ValueError("the text has no ENTRY computation")
    found = {name: [_instruction(match, lines, name) for match in body.values()] for name, body in lines.items()}
    return Program(found, entry)


def _instruction(match: re.Match, lines: dict[str, dict[str, re.Match]], computation: str) -> Instruction:
    opcode, line = match["opcode"], match.string
    estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
    listed = re.search(r"branch_computations=\{(.*?)\}", line)
    branches = [b.strip().lstrip("%") for b in listed[1].split(",")] if listed else []
    for side in ("true_computation", "false_computation"):
        branches += re.findall(rf"{side}=%?([\w.\-]+)", line)
    shapes = re.findall(r"([a-z][a-z0-9]*)\[([0-9,]*)\]", match["result"])
    if opcode in ("all-gather-start", "all-to-all-start"):  # the result holds the operands too, in front
        shapes = shapes[len(shapes) // 2 :]
    elif opcode == "collective-permute-start":  # operand, result, and on some backends counters
        shapes = shapes[1:2]
    return Instruction(
        opcode=opcode.removesuffix("-start"),
        shapes=[(dtype, math.prod(map(int, dims.split(","))) if dims else 1) for dtype, dims in shapes],
        cycles=int(estimate[1]) if estimate else 0,
        body=_named("body", line),
        trips=_trips(match, lines, computation) if opcode == "while" else None,
        branches=branches,
        called=_CALLED.findall(line),
        line=line,
    )


def _trips(loop: re.Match, lines: dict[str, dict[str, re.Match]], computation: str) -> int | None:
    """How often a loop runs: as the compiler says, or read from a counter that goes up by one to a constant.

    The TPU compiler knows the counts and does not print them.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.string):
        return int(known[1])
    condition, body = (lines.get(_named(part, loop.string), {}) for part in ("condition", "body"))
    compared = _root(condition)
    if compared is None or compared["opcode"] != "compare" or "direction=LT" not in compared.string:
        return None
    counter, limit = (_source(operand, condition) for operand in _operands(compared))
    start = _source(_operands(loop)[0], lines[computation])
    after = _root(body)
    if counter is None or counter["opcode"] != "get-tuple-element" or start is None or after is None:
        return None
    position = int(_named("index", counter.string))
    begin = _source(_operands(start)[position], lines[computation]) if start["opcode"] == "tuple" else None
    step = _source(_operands(after)[position], body) if after["opcode"] == "tuple" else None
    if step is None or step["opcode"] != "add":
        return None
    before, one = (_source(operand, body) for operand in _operands(step))
    same = before is not None and before["opcode"] == "get-tuple-element"
    if not same or int(_named("index", before.string)) != position or _constant(one) != 1:
        return None
    first, last = _constant(begin), _constant(limit)
    return None if first is None or last is None else max(last - first, 0)


def _root(computation: dict[str, re.Match]) -> re.Match | None:
    return next((match for match in computation.values() if match.string.lstrip().startswith("ROOT")), None)


def _operands(match: re.Match) -> list[str]:
    """Names of the operands; a constant's is its value."""
    inside = match.string[match.end() :].split(")", 1)[0]
    return [operand.split()[-1].lstrip("%") for operand in inside.split(",") if operand.strip()]


def _source(name: str, computation: dict[str, re.Match]) -> re.Match | None:
    """The instruction that makes a value, behind copies of it."""
    match = computation.get(name)
    while match is not None and match["opcode"] in ("copy", "bitcast"):
        match = computation.get(_operands(match)[0])
    return match


def _constant(match: re.Match | None) -> int | None:
    """The value of an integer constant; None for anything else."""
    whole = match is not None and match["opcode"] == "constant" and re.fullmatch(r"-?\d+", _operands(match)[0])
    return int(whole[0]) if whole else None


def _named(attribute: str, line: str) -> str:
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", line)
    return found[1] if found else ""


def cycles(program: Program, most_costly: bool, name: str | None = None) -> int:
    """Estimated cycles of one run: of every conditional the most costly branch, or the cheapest.

    A loop counts its body as often as its known trip count says. Where that is unknown it counts once, and the sum is
    only a lower bound: `counts` says how many such loops there are.
    """
    total = 0
    for instruction in program.computations[name or program.entry]:
        if instruction.opcode == "while":
            trips = 1 if instruction.trips is None else instruction.trips
            total += trips * cycles(program, most_costly, instruction.body)
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
        "unknown_loops": sum(i.opcode == "while" and i.trips is None for i in every),
        "large_loops": sum(i.elements >= large for i in every if i.opcode == "while"),
    }
