"""Runs examples as users do: as commands, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds; a slow machine must not look like a hang, and nothing may hang for ever


def run(script, *options):
    """Run an example to its end, with this checkout's gcjax and without the tests' virtual devices; its output."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    # Many steps repay the time to optimise their code.
    flags = [flag.replace("optimization_level=0", "optimization_level=1") for flag in flags]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": " ".join(flags), "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, options)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
