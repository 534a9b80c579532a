"""Decoding of images: a function, and as a program a worker process of `common.folders.Decoders`.

Worker processes import this file alone, so it must not import JAX.
"""

import json
import math
import mmap
import signal
import sys

import numpy as np
from PIL import Image


def decode(path: str, size: int, seed=None, margin: float = 1.0) -> np.ndarray:
    """An image file as uint8[size, size, 3], RGB.

    seed: whole numbers that decide on a random crop (8 to 100 % of the area, 3:4 to 4:3) and whether it is mirrored, as
      in Szegedy et al. 2015 (arXiv 1409.4842); None for the square in the middle, `margin` times the shorter side.
    """
    with Image.open(path) as image:
        width, height = image.size
        rng = None if seed is None else np.random.default_rng(seed)
        left, top, right, bottom = middle(width, height, margin) if rng is None else crop(rng, width, height)
        # Only a JPEG can be decoded at 1/2, 1/4 or 1/8; the crop still has at least `size` pixels then.
        image.draft(None, (width * size / (right - left), height * size / (bottom - top)))
        across, down = image.size[0] / width, image.size[1] / height
        box = left * across, top * down, min(right * across, image.size[0]), min(bottom * down, image.size[1])
        coloured = image if image.mode == "RGB" else image.convert("RGB")
        pixels = np.asarray(coloured.resize((size, size), Image.Resampling.BILINEAR, box))
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels


def middle(width: int, height: int, margin: float):
    side = margin * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def crop(rng, width: int, height: int):
    for _ in range(10):
        area = rng.uniform(0.08, 1) * width * height
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, top, left + across, top + down
    return middle(width, height, 1.0)


def serve(descriptor: int, shape: list[int]) -> None:
    """Decode what standard input asks for into shared memory; an answer for each line: null, or what went wrong.

    A line: slot, first row, margin, and [path, seed or null] for each row. The end of the input ends the process,
    so that none outlives its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent tells
    slots = np.frombuffer(mmap.mmap(descriptor, math.prod(shape)), np.uint8).reshape(shape)
    for line in sys.stdin:
        slot, first, margin, images = json.loads(line)
        answer = None
        for row, (path, seed) in enumerate(images, first):
            try:
                slots[slot, row] = decode(path, shape[2], seed, margin)
            except Exception as error:  # Pillow raises many kinds for a damaged file
                answer = f"{path!r} is not an image that can be read ({error})"
                break
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
