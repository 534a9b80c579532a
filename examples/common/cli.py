"""What all command lines share: errors of one line, bounded numbers. Without JAX, so that launchers start at once."""

import argparse
import math


class Problem(Exception):
    """Something that the user can mend, in one line."""


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def above_zero(number):
    """A parser of finite numbers above zero, `number` being int or float."""

    def parse(text):
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            kind = "a whole number" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {kind} above 0, got {text!r}")
        return value

    return parse


def from_zero(text: str) -> float:
    """A finite number, 0 or above."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or above, got {text!r}")
    return value
