"""What a compiled program costs, read from its text: cycles, collectives, sorts, scatters, conditionals and loops."""

import re

from gcjax._hlo import BYTES, COLLECTIVES, Instruction, Program
from gcjax._hlo import parse as parse

_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


def _cycles(instruction: Instruction) -> int:
    """The compiler's estimate, 0 where it gives none."""
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.line)
    return int(estimate[1]) if estimate else 0


def _branches(instruction: Instruction) -> list[str]:
    """The computations of a conditional, in order."""
    listed = re.search(r"branch_computations=\{(.*?)\}", instruction.line)
    branches = [branch.strip().lstrip("%") for branch in listed[1].split(",")] if listed else []
    for side in ("true_computation", "false_computation"):
        branches += re.findall(rf"{side}=%?([\w.\-]+)", instruction.line)
    return branches


def _trips(loop: Instruction, program: Program) -> int | None:
    """How often a loop runs: as the compiler says, or read from a counter that goes up by one to a constant.

    None where neither is known. The TPU compiler knows the counts and does not print them.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(known[1])
    around = next(body for body in program.computations.values() if loop in body)
    condition, body = (program.computations.get(_named(part, loop.line), []) for part in ("condition", "body"))
    compared = _root(condition)
    if compared is None or compared.opcode != "compare" or "direction=LT" not in compared.line:
        return None
    counter, limit = (_source(operand, condition) for operand in compared.operands)
    start, after = _source(loop.operands[0], around), _root(body)
    if counter is None or counter.opcode != "get-tuple-element" or start is None or after is None:
        return None
    position = int(_named("index", counter.line))
    begin = _source(start.operands[position], around) if start.opcode == "tuple" else None
    step = _source(after.operands[position], body) if after.opcode == "tuple" else None
    if step is None or step.opcode != "add":
        return None
    before, one = (_source(operand, body) for operand in step.operands)
    same = before is not None and before.opcode == "get-tuple-element"
    if not same or int(_named("index", before.line)) != position or _constant(one) != 1:
        return None
    first, last = _constant(begin), _constant(limit)
    return None if first is None or last is None else max(last - first, 0)


def _root(computation: list[Instruction]) -> Instruction | None:
    return next((instruction for instruction in computation if instruction.is_root), None)


def _source(name: str, computation: list[Instruction]) -> Instruction | None:
    """The instruction that makes a value, behind copies of it."""
    by_name = {instruction.name: instruction for instruction in computation}
    found = by_name.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = by_name.get(found.operands[0])
    return found


def _constant(found: Instruction | None) -> int | None:
    """The value of an integer constant; None for anything else."""
    whole = found is not None and found.opcode == "constant" and re.fullmatch(r"-?\d+", found.operands[0])
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
            trips = _trips(instruction, program)
            total += (1 if trips is None else trips) * cycles(program, most_costly, _named("body", instruction.line))
        elif branches := _branches(instruction):
            choose = max if most_costly else min
            total += choose(cycles(program, most_costly, branch) for branch in branches)
        elif instruction.opcode == "call":
            total += sum(cycles(program, most_costly, called) for called in _CALLED.findall(instruction.line))
        else:
            total += _cycles(instruction)
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
        "unknown_loops": sum(i.opcode == "while" and _trips(i, program) is None for i in every),
        "large_loops": sum(i.elements >= large for i in every if i.opcode == "while"),
    }
