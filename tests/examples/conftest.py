"""Makes the examples importable, and their images."""

import importlib.util
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "examples"))

NEEDED = ("flax", "orbax", "matplotlib", "PIL", "sklearn", "tqdm")  # of gcjax[examples]
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def image_tree(tmp_path_factory):
    """A folder with 8 training and 5 held-out images of each of 3 classes, with all four endings."""
    from pictures import CLASSES, write

    folder = tmp_path_factory.mktemp("images")
    for name in CLASSES:
        for i in range(8):
            write(folder / "train" / name / f"{i}.{('JPEG', 'png', 'jpg', 'webp')[i % 4]}")
        for i in range(5):
            write(folder / "val" / name / f"{i}.png")
        (folder / "train" / name / "readme.txt").write_text("not an image")
    (folder / "train" / ".cache").mkdir()
    return folder
