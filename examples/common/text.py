"""Text as numbers, for language models of characters."""

from pathlib import Path

import numpy as np

from common.cli import Problem


def load_text(path: Path, context: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Read a text file.

    Args:
      path: a file in UTF-8.
      context: characters of a sequence.

    Returns:
      int32[n], the characters to train on; int32[m], the last tenth, to validate; the alphabet that they number.

    Raises:
      Problem: the file is not UTF-8, or its last tenth is too short for one sequence of `context` + 1.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise Problem(f"--text: {str(path)!r} is not UTF-8 (at byte {error.start})") from None
    if len(text) < 10 * (context + 1):
        raise Problem(f"--text: {str(path)!r} has only {len(text)} characters; it needs {10 * (context + 1)}")
    alphabet, numbers = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    numbers, cut = numbers.astype(np.int32), len(text) * 9 // 10
    return numbers[:cut], numbers[cut:], "".join(map(chr, alphabet))


def windows(numbers: np.ndarray, context: int) -> np.ndarray:
    """Consecutive sequences of `context` + 1 numbers, each starting with the last number of the one before."""
    count = (len(numbers) - 1) // context
    return np.lib.stride_tricks.sliding_window_view(numbers, context + 1)[: count * context : context]
