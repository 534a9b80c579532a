"""Virtual environments with the compilers for TPUs and GPUs, made once and kept in the user's cache folder."""

import os
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
    },
    "gpu": {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
}


class Unavailable(Exception):
    """An environment could not be made; the text says why."""


def folder(target: str) -> Path:
    """Where the environment of a target is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gcjax" / f"{target}-jax-{JAX}"


def interpreter(target: str) -> Path:
    """The Python of a target's environment, which is made on the first call: a download of more than 1 GB.

    Raises:
      Unavailable: pip could not install it.
    """
    place = folder(target)
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        for packages in PACKAGES[target]:
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = next(
                    (line for line in done.stderr.splitlines() if line.startswith("ERROR")), "no reason given"
                )
                raise Unavailable(f"the {target} compiler cannot be installed: {reason}")
        ready.touch()
    return python


def variables(target: str) -> dict[str, str]:
    """Environment variables of a child process that compiles for a target."""
    return {**os.environ, **VARIABLES[target], "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
