"""What every benchmark shares: the record of where and how it ran, malloc settings, child processes, option errors."""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# glibc maps and unmaps every block above 32 MB anew, so that a fresh large array costs page faults. "keep" makes the
# heap keep what was freed, and all threads use the one heap that can grow. It helps both sides, PyTorch more; a fair
# comparison gives it to both or to none.
MALLOC = {
    "default": {},
    "keep": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "1000000000000",
        "MALLOC_TOP_PAD_": "268435456",
        "MALLOC_ARENA_MAX": "1",
    },
}


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an option."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def provenance(packages=("jax", "jaxlib", "optax", "numpy")) -> dict:
    """Machine, versions, commit and command, for a result file; without host names and paths."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "architecture": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "load_at_start": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
        "commit": _commit(),
        "source": _source_digest(),
        "command": " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *map(_without_folder, sys.argv[1:])]),
    }


def run_child(python: str, job: dict, malloc: str, variables=()) -> dict:
    """Run this same script as `python script --child JOB` in a process of its own; its last line of output is JSON."""
    every = {name for setting in MALLOC.values() for name in setting}
    environment = {k: v for k, v in os.environ.items() if k not in every} | MALLOC[malloc] | dict(variables)
    command = [python, sys.argv[0], "--child", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the job {job} with malloc setting {malloc!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str:
    """The checked-out commit, read from the files (a dirty tree shows in `source` only)."""
    if _package() != ROOT / "gcjax":
        return "unknown"  # another copy of the package is being measured
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {name}"))
    except (OSError, StopIteration):
        return "unknown"


def _package() -> Path:
    return Path(importlib.util.find_spec("gcjax").origin).resolve().parent


def _source_digest() -> str:
    """Short SHA-256 over the sources of the package that is imported: tells runs apart whatever the commit says."""
    package = _package()
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _without_folder(argument: str) -> str:
    return Path(argument).name if "/" in argument else argument
