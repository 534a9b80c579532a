"""What all command lines share: one-line errors, bounded numbers, progress bars, tables. It does not import JAX."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

Number = TypeVar("Number", int, float)


class Problem(Exception):
    """An error that the user can fix. Its message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help shows the defaults."""

    def __init__(self, doc: str):
        """Make a parser for the script with this docstring, whose first paragraph becomes the description."""
        super().__init__(description=doc.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit status. A `Problem`, a file error or Ctrl-C ends it with one line."""
    try:
        return command() or 0
    except Problem as problem:
        status, message = 2, str(problem)
    except OSError as error:
        status, message = 1, str(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return status


def above_zero(number: type[Number]) -> Callable[[str], Number]:
    """A parser of finite numbers above zero, whole ones where `number` is int."""
    return _bounded(number, lambda value: 0 < value < math.inf, "above 0")


def from_zero(number: type[Number]) -> Callable[[str], Number]:
    """A parser of finite numbers of zero or above, whole ones where `number` is int."""
    return _bounded(number, lambda value: 0 <= value < math.inf, "of 0 or above")


def _bounded(number: type[Number], fits: Callable[[Number], bool], bound: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = number(text)
        except ValueError:
            value = number(-1)
        if not fits(value):
            kind = "a whole number" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {kind} {bound}, got {text!r}")
        return value

    return parse


def progress_bar(**options: Any) -> tqdm:
    """A bar on stdout; a line every 30 seconds where that is no terminal, for logs."""
    seconds = 0.1 if sys.stdout.isatty() else 30.0
    return tqdm(file=sys.stdout, mininterval=seconds, maxinterval=max(seconds, 10.0), **options)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
