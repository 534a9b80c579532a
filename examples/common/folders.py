"""Image folders (train/CLASS/* and val/CLASS/* or test/CLASS/*), loaded whole or decoded by worker processes."""

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
from typing import IO, NamedTuple

import numpy as np

from common.cli import Problem
from common.decode import decode

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
LAYOUT = "lay images out as train/CLASS/*.jpg and val/CLASS/*.jpg (or *.png, *.webp; test works for val)"


class Images(NamedTuple):
    """Labelled image files.

    Attributes:
      paths: files, sorted by class and name.
      labels: int32[n], number of each image's class in the sorted class names.
    """

    paths: list[str]
    labels: np.ndarray


def find_images(folder: Path) -> tuple[Images, Images, list[str]]:
    """Images to train on, held-out images, names of the classes.

    Raises:
      Problem: the folder is not laid out as expected.
    """
    if not folder.is_dir():
        raise Problem(
            f"--data: there is no folder {str(folder)!r}: fetch images (ImageNet: https://image-net.org) and {LAYOUT}"
        )
    held_out = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or held_out is None:
        missing = "val" if (folder / "train").is_dir() else "train"
        raise Problem(f"--data: {str(folder)!r} has no folder {missing!r}: {LAYOUT}")
    train, other = _files_by_class(folder / "train"), _files_by_class(held_out)
    if unmatched := sorted(train.keys() ^ other.keys()):
        name = unmatched[0]
        where, lacks = (folder / "train", held_out) if name in train else (held_out, folder / "train")
        raise Problem(f"--data: the class {name!r} is in {str(where)!r} but not in {str(lacks)!r}: {LAYOUT}")
    return _listed(train), _listed(other), list(train)


def _files_by_class(folder: Path) -> dict[str, list[str]]:
    """From each class to its image files, both sorted."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise Problem(f"--data: {str(folder)!r} has no class folders: {LAYOUT}")
    found = {}
    for name in names:
        with os.scandir(folder / name) as entries:
            found[name] = sorted(e.path for e in entries if os.path.splitext(e.name)[1].lower() in ENDINGS)
        if not found[name]:
            raise Problem(f"--data: no jpg, png or webp in {str(folder / name)!r}: add images or delete the folder")
    return found


def _listed(files_by_class: dict[str, list[str]]) -> Images:
    paths = [path for files in files_by_class.values() for path in files]
    counts = [len(files) for files in files_by_class.values()]
    return Images(paths, np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def load_folder(folder: Path, size: int) -> list[np.ndarray]:
    """Load a small data set into memory.

    Args:
      folder: an image folder.
      size: each image is the central square of its file, resized to `size` pixels.

    Returns:
      Training images uint8[n, size, size, 3], their labels int32[n], held-out images, their labels. The order is a
      fixed random one, so that the first images are of all classes.

    Raises:
      Problem: the folder is not laid out as expected, or an image cannot be read.
    """
    train, held_out, _ = find_images(folder)
    parts = []
    for images in (train, held_out):
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
    """Worker processes that decode batches of images ahead of their use, into memory that they share with this process.

    Each worker decodes the same rows of every batch. Being several batches ahead evens out their speeds.
    """

    def __init__(self, processes: int, rows: int, size: int, ahead: int = 4):
        """Start the workers.

        Args:
          processes: number of workers.
          rows: images of a batch.
          size: pixels of their sides.
          ahead: batches in flight, each of which takes `rows * size * size * 3` bytes.
        """
        shape = (ahead, rows, size, size, 3)
        with _memory_file() as file:
            os.ftruncate(file.fileno(), math.prod(shape))
            self.slots = np.frombuffer(mmap.mmap(file.fileno(), math.prod(shape)), np.uint8).reshape(shape)
            # Separate programs, because `multiprocessing` would import JAX in each worker.
            program = Path(__file__).with_name("decode.py")
            command = [sys.executable, "-P", str(program), str(file.fileno()), json.dumps(shape)]
            self.parts = np.array_split(np.arange(rows), min(processes, rows))
            self.workers = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[file.fileno()]
                )
                for _ in self.parts
            ]

    def __enter__(self) -> "Decoders":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()
            worker.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # the worker had not read all requests
                worker.stdin.close()

    def batches(self, requests: Iterable[list], margin: float = 1.0) -> Iterator[np.ndarray]:
        """Decode batch after batch.

        Args:
          requests: for each batch a list with `[path, seed]` for each row, see `common.decode.decode`.
          margin: see there.

        Yields:
          uint8[rows, size, size, 3].

        Raises:
          Problem: an image cannot be read, or a worker died.
        """
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

    def _ask(self, worker: subprocess.Popen, request: list) -> None:
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
        return self.slots[slot].copy()  # the slot is filled again before the batch is used up

    def _died(self, worker: subprocess.Popen) -> Problem:
        return Problem(
            f"a process that decodes images has died (exit status {worker.wait()}; -9 is often lack of memory): start "
            "again with --resume; if it recurs, with fewer --decoders or a smaller --batch"
        )


def _memory_file() -> IO[bytes]:
    """A file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("images"), "w+b")
    return tempfile.TemporaryFile()
