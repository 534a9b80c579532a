"""Runs examples as users do: as commands, in processes of their own."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds; a slow machine must not look like a hang, and nothing may hang for ever


def environment(*, many_steps=False, **variables):
    """This process's variables with this checkout's gcjax, and without the tests' virtual devices.

    many_steps: whether optimised code repays the time to compile it.
    """
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    if many_steps:
        flags = [flag.replace("optimization_level=0", "optimization_level=1") for flag in flags]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": " ".join(flags), **variables}


def command(script, *options):
    return [sys.executable, str(ROOT / "examples" / script), *map(str, options)]


def run(script, *options, many_steps=False):
    """Run an example to its end."""
    variables = environment(many_steps=many_steps)
    return subprocess.run(command(script, *options), env=variables, capture_output=True, text=True, timeout=LIMIT)


def start(script, *options):
    """Start an example."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command(script, *options), env=environment(), text=True, **pipes)


def result(out):
    """What a training run wrote about itself."""
    return json.loads((out / "result.json").read_text())


def curve(out, name):
    """The rows of steps.csv or epochs.csv without their times."""
    rows = list(csv.DictReader((out / f"{name}.csv").read_text().splitlines()))
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
