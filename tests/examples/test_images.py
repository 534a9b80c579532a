"""examples/common/images.py: the files of CIFAR-10, augmentation."""

import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cifar_files import LABELS, PIXELS, RNG, write_binary, write_python
from common import images
from common.cli import Problem


@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("inside", [False, True])
def test_both_layouts_are_read_from_the_folder_or_its_parent(write, inside, tmp_path):
    folder = write(tmp_path)
    train, labels, test, test_labels = images.load_cifar10(folder if inside else tmp_path)
    assert train.shape == (80, 32, 32, 3)
    np.testing.assert_array_equal(labels, LABELS[:5].reshape(-1))
    np.testing.assert_array_equal(test_labels, LABELS[5])
    for image, pixels in zip((*train, *test), PIXELS.reshape(-1, 3, 32, 32), strict=True):
        for channel in range(3):
            np.testing.assert_array_equal(image[:, :, channel], pixels[channel])


class Payload:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("data_batch_3", None, "missing"),
        ("data_batch_3", pickle.dumps({b"data": PIXELS[0], b"labels": [1] * 16})[:900], "cannot be read"),
        ("data_batch_3", b"<html>not found</html>", "cannot be read"),
        ("data_batch_3", pickle.dumps(Payload()), "posix.system"),
        ("test_batch", pickle.dumps({b"data": PIXELS[0][:7], b"labels": [1] * 16}), r"\(7, 3072\) and 16 labels"),
        ("test_batch", pickle.dumps({b"data": PIXELS[0], b"labels": [10] * 16}), "labels from 10 to 10"),
    ],
)
def test_a_broken_file_is_named_with_its_source(file, content, said, tmp_path):
    folder = write_python(tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(Problem, match=said) as raised:
        images.load_cifar10(tmp_path)
    assert file in str(raised.value)
    assert images.SOURCE in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_short_binary_file_and_a_missing_folder_are_named(tmp_path):
    folder = write_binary(tmp_path)
    with open(folder / "data_batch_2.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(Problem, match=r"data_batch_2.bin.* has 5000 bytes"):
        images.load_cifar10(tmp_path)
    with pytest.raises(Problem, match="fetch the python or the binary version"):
        images.load_cifar10(tmp_path / "nothing")


def test_augmentation_gives_random_crops_half_of_them_mirrored():
    x = RNG.normal(size=(64, 5, 5, 2)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    crops = [padded[:, i : i + 5, j : j + 5] for i in range(5) for j in range(5)]
    # Mirrored before padding, so a mirrored crop is a crop of the mirrored image.
    candidates = np.stack([*crops, *[crop[:, :, ::-1] for crop in crops]], axis=1)
    found = []
    for seed in range(2):
        y = np.asarray(images.flip_and_crop(jax.random.key(seed), jnp.asarray(x), padding=2))
        equal = (candidates == y[:, None]).all(axis=(2, 3, 4))
        assert (equal.sum(axis=1) == 1).all()
        found.append(equal.argmax(axis=1))
        assert len(set(found[-1])) > 20
        assert 16 < (found[-1] >= 25).sum() < 48
    assert (found[0] != found[1]).any()
