"""Text files as sequences of characters."""

from pathlib import Path

import numpy as np

from common.cli import Problem


def load_text(path: Path, context: int) -> tuple[np.ndarray, np.ndarray, str]:
    """The characters of a UTF-8 file as numbers.

    Args:
      path: the file.
      context: characters of a sequence, without the one to predict last.

    Returns:
      The first 90 % of the characters and the last 10 %, int32 numbers in the alphabet, and the sorted alphabet.

    Raises:
      Problem: the file cannot be read, is not UTF-8, or a part is too short for one sequence of `context` + 1.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise Problem(f"--text: cannot read {str(path)!r} ({error.strerror}); give any text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise Problem(
            f"--text: {str(path)!r} is not UTF-8 (at byte {error.start}); save it as UTF-8, or give another file"
        ) from None
    needed = 10 * (context + 1)
    if len(text) < needed:
        found = f"has only {len(text)} characters" if text else "is empty"
        raise Problem(
            f"--text: {str(path)!r} {found}; --context {context} needs {needed}, so that a tenth holds one sequence"
        )
    alphabet, numbers = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    numbers, cut = numbers.astype(np.int32), len(text) * 9 // 10
    return numbers[:cut], numbers[cut:], "".join(map(chr, alphabet))


def windows(numbers: np.ndarray, context: int) -> np.ndarray:
    """Consecutive sequences of `context` + 1 numbers, each starting with the last number of the one before."""
    count = (len(numbers) - 1) // context
    return np.lib.stride_tricks.sliding_window_view(numbers, context + 1)[: count * context : context]
