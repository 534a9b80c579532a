"""Image folders: train/CLASS/* and val/CLASS/* (or test/CLASS/*), whole or streamed from worker processes."""

import collections
import contextlib
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.cli import Problem
from common.decode import decode

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
LAYOUT = "lay images out as train/CLASS/*.jpg and val/CLASS/*.jpg (png and webp do too, and test for val)"


class Images(NamedTuple):
    """paths: files, by class and name.  labels: int32, the classes' numbers, which go by name."""

    paths: list[str]
    labels: np.ndarray


def find_images(folder: Path) -> tuple[Images, Images, list[str]]:
    """Images to train on, images held out, names of the classes. Raises Problem, saying what is wrong."""
    if not folder.is_dir():
        raise Problem(
            f"--data: there is no folder {str(folder)!r}: fetch images (ImageNet: https://image-net.org) and {LAYOUT}"
        )
    held_out = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    for name, found in (("train", (folder / "train").is_dir()), ("val", held_out)):
        if not found:
            raise Problem(f"--data: {str(folder)!r} has no folder {name!r}: {LAYOUT}")
    train, other = _by_class(folder / "train"), _by_class(held_out)
    if wrong := sorted(train.keys() ^ other.keys()):
        where, lacks = (folder / "train", held_out) if wrong[0] in train else (held_out, folder / "train")
        raise Problem(f"--data: the class {wrong[0]!r} is in {str(where)!r} but not in {str(lacks)!r}: {LAYOUT}")
    return _listed(train), _listed(other), list(train)


def _by_class(folder: Path) -> dict[str, list[str]]:
    """Class to its image files, both sorted."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise Problem(f"--data: {str(folder)!r} has no folders of classes: {LAYOUT}")
    found = {}
    for name in names:
        with os.scandir(folder / name) as entries:
            found[name] = sorted(e.path for e in entries if os.path.splitext(e.name)[1].lower() in ENDINGS)
        if not found[name]:
            raise Problem(f"--data: no jpg, png or webp in {str(folder / name)!r}: fill this class or delete it")
    return found


def _listed(by_class: dict[str, list[str]]) -> Images:
    paths = [path for files in by_class.values() for path in files]
    counts = [len(files) for files in by_class.values()]
    return Images(paths, np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def load_folder(folder: Path, size: int):
    """Small sets, whole: training images uint8[n, size, size, 3] and labels int32[n], held-out images and labels.

    Each image is the square in the middle of its file, resized. The order is random, always the same, so that the first
    images are of all classes. Raises Problem.
    """
    parts = []
    for images in find_images(folder)[:2]:
        order = np.random.default_rng(0).permutation(len(images.paths))
        pixels = np.empty((len(order), size, size, 3), np.uint8)
        for row, number in enumerate(order):
            path = images.paths[number]
            try:
                pixels[row] = decode(path, size)
            except Exception as error:  # Pillow raises many kinds for a damaged file
                raise Problem(f"--data: {path!r} is not an image that can be read ({error})") from None
        parts += [pixels, images.labels[order]]
    return parts


class Decoders:
    """Worker processes that decode batches of images ahead of their use, into memory that they share with this one.

    processes: their number.  rows: images in a batch.  size: pixels of their sides.  ahead: batches in work at a time,
    which need `rows * size * size * 3` bytes each. Every process decodes the same rows of each batch; being batches
    ahead evens out which of them takes longer.
    """

    def __init__(self, processes: int, rows: int, size: int, ahead: int = 4):
        shape = (ahead, rows, size, size, 3)
        with _memory() as file:
            os.ftruncate(file.fileno(), math.prod(shape))
            self.slots = np.frombuffer(mmap.mmap(file.fileno(), math.prod(shape)), np.uint8).reshape(shape)
            # Programs of their own rather than `multiprocessing`: that would import JAX in each of them.
            program = Path(__file__).with_name("decode.py")
            command = [sys.executable, "-P", str(program), str(file.fileno()), json.dumps(shape)]
            self.parts = np.array_split(np.arange(rows), min(processes, rows))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": [file.fileno()]}
            self.workers = [subprocess.Popen(command, **pipes) for _ in self.parts]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()
            worker.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # it had not read all of what was asked
                worker.stdin.close()

    def batches(self, requests: Iterable[list], margin: float = 1.0) -> Iterator[np.ndarray]:
        """uint8[rows, size, size, 3] for each request, `[path, seed]` for each row; see `common.decode.decode`."""
        waiting: collections.deque[int] = collections.deque()
        for number, images in enumerate(requests):
            if len(waiting) == len(self.slots):
                yield self._collect(waiting.popleft())
            slot = number % len(self.slots)
            for worker, part in zip(self.workers, self.parts, strict=True):
                self._ask(worker, [slot, int(part[0]), margin, [images[row] for row in part]])
            waiting.append(slot)
        while waiting:
            yield self._collect(waiting.popleft())

    def _ask(self, worker, request) -> None:
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            raise self._died(worker) from None

    def _collect(self, slot: int) -> np.ndarray:
        for worker in self.workers:
            answer = worker.stdout.readline()
            if not answer:
                raise self._died(worker)
            if problem := json.loads(answer):
                raise Problem(f"--data: {problem}")
        return self.slots[slot].copy()  # the slot is filled anew before the batch is used up

    def _died(self, worker) -> Problem:
        return Problem(
            f"a process that decodes images has died (exit status {worker.wait()}; -9 is often lack of memory): start "
            "again with --resume, with fewer --decoders or a smaller --batch if it happens again"
        )


def _memory():
    """A file in memory, which only its descriptor names."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("images"), "w+b")
    return tempfile.TemporaryFile()
