"""Benchmarks at their smallest: that they run, and print a table."""

import subprocess
import sys
from pathlib import Path

from selection import cases

ROOT = Path(__file__).parents[2]


@cases(
    ("command", "said"),
    [
        ("bench.wire --quick", "| 10,000,000 | 1/100 |"),
        ("bench.methods --quick --only top_k --repeats 3", "| top_k"),
    ],
    default=1,
)
def test_it_runs(command, said):
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
