"""Small files in the two official layouts of CIFAR-10, with random images."""

import pickle

import numpy as np

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 16, 3072), np.uint8)
LABELS = RNG.integers(0, 10, (6, 16))


def write_python(folder):
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, pixels, labels in zip(names, PIXELS, LABELS, strict=True):
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=3))
    return folder


def write_binary(folder):
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for name, pixels, labels in zip(names, PIXELS, LABELS, strict=True):
        np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tofile(folder / name)
    return folder
