"""Virtual environments with the compilers for TPUs and GPUs, made once and kept in the user's cache folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from bench.machine import ROOT

JAX = "0.10.2"
PACKAGES = {  # target -> arguments of each call of pip
    "tpu": [[f"jax[tpu]=={JAX}", "optax"]],
    "gpu": [
        [f"jax=={JAX}", f"jaxlib=={JAX}", "optax"],
        ["--no-deps", f"jax-cuda12-plugin=={JAX}", f"jax-cuda12-pjrt=={JAX}", "nvidia-cuda-nvcc-cu12"],
    ],
}
VARIABLES = {  # target -> what the compiler needs to start without a device
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",  # tests and users set some for CPUs
    },
    "gpu": {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
}


_NO_DOWNLOAD = re.compile(r"connection broken|ConnectionPool|HTTP error|Timeout|from versions: none|No space left")


class Unavailable(Exception):
    """An environment could not be downloaded; the text says why."""


def folder(target: str) -> Path:
    """Where the environment of a target is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gcjax" / f"{target}-jax-{JAX}"


def interpreter(target: str) -> Path:
    """The Python of a target's environment, which is made on the first call: a download of more than 1 GB.

    Raises:
      Unavailable: pip could not download it.
      RuntimeError: pip failed for another reason.
    """
    place = folder(target)
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        for packages in PACKAGES[target]:
            options = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints" / "jax-0.10.txt")]
            command = [str(python), "-m", "pip", "install", *options, *packages]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode and not _NO_DOWNLOAD.search(done.stderr):
                raise RuntimeError(f"pip cannot install the {target} compiler:\n{done.stderr}")
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise Unavailable(f"the {target} compiler cannot be downloaded: {errors[0] if errors else done.stderr}")
        ready.touch()
    return python


def variables(target: str) -> dict[str, str]:
    """Environment variables of a child process that compiles for a target."""
    return {**os.environ, **VARIABLES[target], "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
