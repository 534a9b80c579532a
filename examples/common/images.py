"""Images: CIFAR-10 from its official files, scikit-learn's digits, folders of JPEGs; augmentation."""

import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from common.cli import Problem

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_MEAN, CIFAR_STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
CIFAR_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
ImageData = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training images, their labels, the same to test


def load_cifar10(folder: Path) -> ImageData:
    """Read CIFAR-10.

    Args:
      folder: `cifar-10-batches-py` (python version), or the folder that holds it.

    Returns:
      Training images uint8[50000, 32, 32, 3], their labels int32[50000], 10,000 test images, their labels.

    Raises:
      Problem: the files are missing or damaged; the message says what to fetch and where to put it.
    """
    inside = folder / "cifar-10-batches-py"
    parts = [_read_cifar10((inside if inside.is_dir() else folder) / name) for name in CIFAR_FILES]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, and refuses to call anything else: a file from a stranger could otherwise run any code."""

    def find_class(self, module: str, name: str) -> object:
        arrays = module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype")
        if arrays or (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_cifar10(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[n, 32, 32, 3] and labels int32[n] of one file."""
    try:
        with open(path, "rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), np.array(batch[b"labels"], np.int32)
    except Exception as error:  # a damaged pickle raises many kinds
        raise Problem(
            f"cannot read {str(path)!r} ({error}): fetch the python version of CIFAR-10 from {SOURCE}, unpack it, and "
            "give the folder with --data"
        ) from None


def load_digits() -> ImageData:
    """scikit-learn's digits, as `load_cifar10`: float32[n, 8, 8, 1] from 0 to 1, in a fixed split."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    digits = datasets.load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return train, train_labels, test, test_labels


def find_images(folder: Path) -> tuple[list[Path], np.ndarray, list[str]]:
    """The images of a folder laid out as CLASS/*.jpg (or jpeg, png, webp).

    Returns:
      Files, sorted by class and name; int32[n], the number of each file's class; the sorted names of the classes.

    Raises:
      Problem: there are none.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [
        (path, number)
        for number, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise Problem(f"--data: there are no images in {str(folder)!r}: lay them out as CLASS/*.jpg in it")
    paths, labels = zip(*found, strict=True)
    return list(paths), np.array(labels, np.int32), names


def load_image(path: Path, size: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Decode an image file, cut out a square and resize it to uint8[size, size, 3].

    Args:
      path: the file.
      size: pixels of the result's sides.
      rng: draws a square of 8 to 100 % of the largest one's area, and mirrors half of them. None for the square in the
        middle whose sides are 7/8 of the shorter side, as in evaluation.

    Raises:
      Problem: it cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise Problem(f"--data: {str(path)!r} is not an image that can be read ({error})") from None
    side = min(image.size) * (7 / 8 if rng is None else math.sqrt(rng.uniform(0.08, 1)))
    left, top = ((length - side) * (0.5 if rng is None else rng.random()) for length in image.size)
    square = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    pixels = np.asarray(square)
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels


def flip_and_crop(key: jax.Array, images: jax.Array, padding: int = 4) -> jax.Array:
    """Mirror each image [n, h, w, c] with probability 1/2, pad it with zeros and crop it at random to its old size."""
    flips, crops = jax.random.split(key)
    n, height, width, channels = images.shape
    mirrored = jax.random.bernoulli(flips, 0.5, (n, 1, 1, 1))
    images = jnp.where(mirrored, images[:, :, ::-1], images)
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    corners = jax.random.randint(crops, (n, 2), 0, 2 * padding + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

    return jax.vmap(crop)(images, corners)


def normalise(images: np.ndarray | jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Pixels from 0 to 255, as float32 of about mean 0 and deviation 1 in each channel."""
    return (images.astype(jnp.float32) / 255 - jnp.array(mean)) / jnp.array(std)
