"""CIFAR-10 from its official files, scikit-learn's digits, augmentation."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from common.cifar_pickle import read_batch
from common.cli import Problem

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_MEAN, CIFAR_STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
LAYOUTS = {
    "cifar-10-batches-py": ([f"data_batch_{i}" for i in range(1, 6)], "test_batch"),
    "cifar-10-batches-bin": ([f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"),
}
ImageData = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training images, their labels, the same to test


def load_cifar10(folder: Path) -> ImageData:
    """Read CIFAR-10.

    Args:
      folder: `cifar-10-batches-py` (python version), `cifar-10-batches-bin` (binary version) or the folder of either.

    Returns:
      Training images uint8[50000, 32, 32, 3], their labels int32[50000], 10,000 test images, their labels.

    Raises:
      Problem: the files are missing or damaged; the message says what to fetch and where to put it.
    """
    for name, (train, test) in LAYOUTS.items():
        for place in (folder / name, folder):
            if (place / train[0]).is_file():
                parts = [_read(place / file) for file in (*train, test)]
                images, labels = zip(*parts, strict=True)
                return np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]
    raise Problem(
        f"no CIFAR-10 in {str(folder)!r}: fetch the python or the binary version from {SOURCE}, unpack it there, and "
        f"give the folder that holds {' or '.join(LAYOUTS)} with --data"
    )


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[n, 32, 32, 3] and labels int32[n] of one file."""
    again = f"unpack the archive from {SOURCE} again"
    if not path.is_file():
        raise Problem(f"{str(path)!r} is missing, though other files of CIFAR-10 exist: {again}")
    if path.suffix == ".bin":
        content = np.fromfile(path, np.uint8)
        if len(content) == 0 or len(content) % 3073:
            raise Problem(f"{str(path)!r} has {len(content)} bytes, not a multiple of 3073: it is cut off, {again}")
        rows = content.reshape(-1, 3073)
        labels, pixels = rows[:, 0].tolist(), rows[:, 1:]
    else:
        try:
            pixels, labels = read_batch(path.read_bytes())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Problem(f"{str(path)!r} cannot be read ({error or type(error).__name__}): {again}") from None
    if not len(labels):
        raise Problem(f"{str(path)!r} has no images: {again}")
    for number, label in enumerate(labels):
        if type(label) is not int or not 0 <= label <= 9:
            what = (
                repr(label)[:60] if isinstance(label, int | float | str | bytes) else f"of type {type(label).__name__}"
            )
            raise Problem(f"{str(path)!r} has the label {what} for image {number}, not a whole number up to 9: {again}")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.int32)


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
