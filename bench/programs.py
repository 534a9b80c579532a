"""What a recorded training run executes: a digest of its programs, before XLA compiles them, and of its batches.

A run of hours need not be measured again because a file changed that it does not use. It is current while its training
step, its preparation of a batch and its initialisation lower to the same StableHLO, and its first two epochs have the
same batches in the same order. How it reads and evaluates images is not looked at.
"""

import ast
import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from bench.machine import ROOT

_EXAMPLES = ROOT / "examples"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digests(commands: Sequence[str]) -> list[str]:
    """Short SHA-256 of each of these runs of examples/cifar10.py, given by its options without --data and --out."""
    if not commands:
        return []
    path = os.pathsep.join([str(ROOT), str(_EXAMPLES)])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.programs"], input=json.dumps(list(commands)), env=env, stdout=subprocess.PIPE,
        text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def without_docstrings(source: str) -> str:
    """Python code as far as it runs: without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            body[:1] = [ast.Pass()]
    return ast.unparse(tree)


def _digest(command: str) -> str:
    import cifar10
    import jax
    import numpy as np
    from common import training

    args = cifar10.parse_options(["--data", "none", *shlex.split(command)])
    mesh = training.use_devices(args.workers)
    sizes = (50_000 if args.images is None else args.images, 10_000)
    # CIFAR-10 as to its shapes: no memory for the images, and labels that tell batches apart
    labels = np.random.default_rng(0).integers(10, size=max(sizes), dtype=np.int32)
    data = [x for n in sizes for x in (np.broadcast_to(np.uint8(0), (n, 32, 32, 3)), labels[:n])]
    task = cifar10.make_task(args, data)
    step, state = training.make_step(task, args, mesh)
    prepare = training.prepare_on_workers(task.prepare, mesh)
    key = jax.random.key(0)
    [batch] = training.place_batches([tuple(x[: args.workers * args.batch] for x in data[:2])], mesh)
    parts = [
        jax.jit(task.init).lower(key).as_text(),
        prepare.lower(key, batch).as_text(),
        step.lower(state, prepare(key, batch)).as_text(),
        *(str(labels.tolist()) for epoch in range(2) for _, labels in task.batches(epoch, 0)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


if __name__ == "__main__":
    print(json.dumps([_digest(command) for command in json.load(sys.stdin)]))
