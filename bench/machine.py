"""What the benchmarks share: the machine, malloc settings, child processes, options."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

# By default glibc maps every block above 32 MB afresh, so a large new array costs page faults. With "keep" the heap
# keeps freed memory, and all threads use the one heap that can grow. Both sides gain, PyTorch more: for a fair
# comparison both get the same setting.
MALLOC = {
    "default": {},
    "keep": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "1000000000000",
        "MALLOC_TOP_PAD_": "268435456",
        "MALLOC_ARENA_MAX": "1",
    },
}

TORCH_HELP = "interpreter that has torch (default: this one)"


class Parser(argparse.ArgumentParser):
    """Reports a bad option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def interpreter(path: str) -> str:
    """An argparse type: the path of a Python interpreter."""
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is not an executable file; give the path of a Python interpreter")
    return os.path.abspath(path)


def describe() -> dict:
    """The machine, without host name and paths."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load_at_start": load(),
    }


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def find_torch(python: str | None) -> str | None:
    """An interpreter that can import torch, this one by default. None, with a message, if it cannot."""
    python = python or sys.executable
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return python
    print("torch cannot be imported: its rows are skipped (--torch-python names another interpreter)", file=sys.stderr)
    return None


def environment(malloc: str, **more: str) -> dict[str, str]:
    """This process's environment with one of the `MALLOC` settings, and more variables."""
    cleared = {name for setting in MALLOC.values() for name in setting}
    return {name: value for name, value in os.environ.items() if name not in cleared} | MALLOC[malloc] | more


def run_child(module: str, python: str, job: dict, malloc: str, variables: Mapping[str, str] | None = None) -> dict:
    """Run `python -m module --child JOB` in a process of its own and return the JSON of its last line of output."""
    command = [python, "-m", module, "--child", json.dumps(job)]
    env = environment(malloc, **(variables or {}))
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the job {job} with malloc setting {malloc!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_example(script: str, arguments: list[str], core: int | None = None) -> subprocess.CompletedProcess:
    """Run a script of the examples with this checkout's gcjax, on one core if given."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, preexec_fn=pin
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
