"""What a recorded training run executes: a digest of its programs, before XLA compiles them, and of its batches.

A run of hours need not be measured again because a file changed that it does not use. It is current while its training
step, its preparation of a batch and its initialisation lower to the same StableHLO, and its first two epochs have the
same batches in the same order. Not looked at: how it reads and evaluates images, and with which values the optimiser's
state begins.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import ROOT

_EXAMPLES = ROOT / "examples"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digests(result: str, commands: Sequence[str]) -> list[str]:
    """Short SHA-256 of each of these runs of a result's example.

    Args:
      result: its name in `provenance.SOURCES`: one of the tables of training runs.
      commands: each run's options, without those that name its data and its folder.

    Returns:
      "" for a run whose options there are no longer: it is of no program.
    """
    if not commands:
        return []
    path = os.pathsep.join([str(ROOT), str(_EXAMPLES)])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.programs"],
        input=json.dumps([result, *commands]),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
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


def digest(result: str, command: str) -> str:
    """One of `digests`, in this process."""
    parts = _of_gossip if result in ("local", "local-text") else _of_char_lm if result == "char_lm" else _of_cifar10
    from common.cli import Problem

    try:
        return hashlib.sha256("\n".join(parts(result, shlex.split(command))).encode()).hexdigest()[:12]
    except (Problem, SystemExit):  # the parser's, for an option that it does not know
        return ""


def _of_cifar10(result: str, options: list[str]) -> Iterator[str]:
    import cifar10

    args = cifar10.parse_options(["--data", "none", *options])
    data = _like_cifar10(args.images)
    task = cifar10.make_task(args, data)
    yield from _of_task(task, args, tuple(x[: args.workers * args.batch] for x in data[:2]))
    yield from (str(labels.tolist()) for _, labels in itertools.islice(task.batches(0), 2 * task.steps))


def _of_char_lm(result: str, options: list[str]) -> Iterator[str]:
    import char_lm
    from common.text import load_text

    args = char_lm.parse_options(["--text", "none", *options])
    with _like_tiny_shakespeare() as path:
        task = char_lm.make_task(args, *load_text(path, args.context))
    yield from _of_task(task, args, next(task.batches(0)))
    yield from (str(sequences.tolist()) for sequences in itertools.islice(task.batches(0), 2 * task.steps))


def _of_task(task: Any, args: argparse.Namespace, batch: Any) -> Iterator[str]:
    """A task's initialisation, preparation of a batch and step."""
    import jax
    from common import training

    mesh = training.use_devices(args.workers)
    step, state = training.make_step(task, args, mesh)
    prepare = training.prepare_on_workers(task.prepare or (lambda key, batch: batch), mesh)
    key = jax.random.key(0)
    [batch] = training.place_batches([batch], mesh)
    yield jax.jit(task.init).lower(key).as_text()
    yield prepare.lower(key, batch).as_text()
    yield step.lower(state, prepare(key, batch)).as_text()


def _of_gossip(result: str, options: list[str]) -> Iterator[str]:
    import gossip
    import jax
    from common import training, workloads

    if result == "local":
        args = gossip.parse_options(["--data", "none", *options])
        workload = workloads.image_workload(_like_cifar10())
    else:
        args = gossip.parse_options(["--text", "none", *options])
        with _like_tiny_shakespeare() as path:
            workload = workloads.text_workload(path)
    [name] = args.algorithms
    step, state, order, place = gossip.prepare(name, 0, workload, args, training.use_devices(args.workers))
    yield jax.jit(workload.init).lower(jax.random.key(0)).as_text()
    yield step.lower(state, place(order(0)[0])).as_text()
    yield from (str(numbers.tolist()) for epoch in range(2) for numbers in order(epoch))


def _like_cifar10(images: int | None = None) -> list[np.ndarray]:
    """CIFAR-10 as to its shapes: no memory for the images, and labels that tell batches apart."""
    sizes = (50_000 if images is None else images, 10_000)
    labels = np.random.default_rng(0).integers(10, size=max(sizes), dtype=np.int32)
    return [x for n in sizes for x in (np.broadcast_to(np.uint8(0), (n, 32, 32, 3)), labels[:n])]


@contextlib.contextmanager
def _like_tiny_shakespeare() -> Iterator[Path]:
    """A file as long as Tiny Shakespeare, with as many different characters."""
    numbers = np.random.default_rng(0).integers(65, size=1_115_394, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes((numbers + ord("0")).tobytes())
        yield path


if __name__ == "__main__":
    chosen, *texts = json.load(sys.stdin)
    print(json.dumps([digest(chosen, text) for text in texts]))
