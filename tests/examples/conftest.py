"""Makes the examples importable, and small data for them."""

import importlib.util
import pickle
import sys

import numpy as np
import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "examples"))

NEEDED = ("flax", "orbax", "matplotlib", "PIL", "sklearn", "tqdm")  # of gcjax[examples]
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with CIFAR-10's files, 32 images in each; an image folder of two classes; a text."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (folder / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = rng.integers(0, 10, 32)
        pixels = (25 * labels[:, None] + rng.integers(0, 20, (32, 3072))).astype(
            np.uint8
        )  # the label is the brightness
        batch = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x"}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, protocol=2))
    for part, count in (("train", 16), ("val", 5)):
        for number, name in enumerate(("ant", "bee")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = (120 * number + rng.integers(0, 100, (20, 24, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.{('JPEG', 'png', 'jpg', 'webp')[i % 4]}")
    (folder / "text.txt").write_text("".join(f"{n} and one is {n + 1};\n" for n in range(300)))
    return folder
