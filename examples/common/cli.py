"""What all command lines share: one-line errors, bounded numbers. Without JAX, so that launchers start at once."""

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

Number = TypeVar("Number", int, float)


class Problem(Exception):
    """An error that the user can fix. Its message is one line.

    Attributes:
      status: exit status for it.
    """

    status = 2


class Stopped(Problem):
    """SIGTERM came, and training has ended in good order."""

    status = 128 + signal.SIGTERM


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command to its end; return its exit status. What the user can mend is one line, and so is Ctrl-C."""
    try:
        return command() or 0
    except Problem as problem:
        status, message = problem.status, str(problem)
    except OSError as error:  # of a file that cannot be read or written
        status, message = 1, str(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return status


def make_folder(folder: Path) -> None:
    """Make the folder for results. Raises Problem if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"--out: cannot make the folder {str(folder)!r} ({error.strerror})") from None


def above_zero(number: type[Number]) -> Callable[[str], Number]:
    """A parser of finite numbers above zero, whole ones where `number` is int."""

    def parse(text: str) -> Number:
        try:
            value = number(text)
        except ValueError:
            value = number(0)
        if not 0 < value < math.inf:
            kind = "a whole number" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {kind} above 0, got {text!r}")
        return value

    return parse


def from_zero(text: str) -> float:
    """Parse a finite number, 0 or above."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or above, got {text!r}")
    return value


def seed(text: str) -> int:
    """Parse a whole number of 32 bits, 0 or above."""
    if not (text.isdecimal() and int(text) < 1 << 32):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {(1 << 32) - 1}, got {text!r}")
    return int(text)


def progress_bar(**options: Any) -> tqdm:
    """A bar on stdout; a line every 30 seconds where that is no terminal, for logs."""
    seconds = 0.1 if sys.stdout.isatty() else 30.0
    return tqdm(file=sys.stdout, mininterval=seconds, maxinterval=max(seconds, 10.0), **options)
