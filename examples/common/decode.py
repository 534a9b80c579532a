"""Decoding of images: a function, and as a program a worker process of `common.folders.Decoders`.

Worker processes import this file alone, so it must not import JAX.
"""

import json
import math
import mmap
import signal
import sys
from collections.abc import Sequence

import numpy as np
from PIL import Image

MOST_PIXELS = 50_000_000
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def decode(path: str, size: int, seed: Sequence[int] | None = None, margin: float = 1.0) -> np.ndarray:
    """Decode an image file, crop it and resize the crop to a square.

    Args:
      path: the file.
      size: pixels of the result's sides.
      seed: of a random crop and of whether it is mirrored, see `random_crop`. None for the central square.
      margin: side of the central square as a share of the image's shorter side.

    Returns:
      uint8[size, size, 3], RGB.

    Raises:
      ValueError: it has more than `MOST_PIXELS` pixels, which take 4 bytes each at worst; or more than 8 bits a
        channel.
    """
    with Image.open(path) as image:  # reads no pixels yet
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")
        rng = None if seed is None else np.random.default_rng(seed)
        crop = central_square(width, height, margin) if rng is None else random_crop(rng, width, height)
        left, top, right, bottom = crop
        # Decodes a JPEG, and only a JPEG, at 1/2, 1/4 or 1/8, such that the crop still has at least `size` pixels.
        image.draft(None, (width * size / (right - left), height * size / (bottom - top)))
        across, down = image.size[0] / width, image.size[1] / height
        box = left * across, top * down, min(right * across, image.size[0]), min(bottom * down, image.size[1])
        if image.mode[0] in "IF":  # which Pillow would cut off at 255
            raise ValueError(f"has the mode {image.mode}, of more than 8 bits; convert it to 8 bits")
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        pixels = np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR, box))
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels


def central_square(width: int, height: int, margin: float) -> Box:
    """The square in the middle of an image, its side `margin` times the shorter side."""
    side = margin * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_crop(rng: np.random.Generator, width: int, height: int) -> Box:
    """A crop of 8 to 100 % of the area, 3:4 to 4:3, as in Szegedy et al. 2015 (arXiv 1409.4842)."""
    for _ in range(10):
        area = rng.uniform(0.08, 1) * width * height
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, top, left + across, top + down
    return central_square(width, height, 1.0)


def serve(descriptor: int, shape: list[int]) -> None:
    """Answer requests on standard input by decoding into shared memory, until the input ends.

    A request is a line of JSON: slot, first row, margin, and [path, seed or null] for each row. The answer is a line
    too: null, or an error message. As the input ends with the parent, no worker outlives it.

    Args:
      descriptor: file descriptor of the shared memory.
      shape: of the memory, [slots, rows, size, size, 3].
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes, SIGTERM may; the parent reports it
        signal.signal(number, signal.SIG_IGN)
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
