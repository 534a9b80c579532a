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


class Uninitialised:
    def __reduce__(self):
        return np.ndarray, ((16, 3072), "u1")


def batch(pixels, labels=(1,) * 16):
    return pickle.dumps({b"data": pixels, b"labels": list(labels) if isinstance(labels, tuple) else labels}, protocol=2)


def python_2(pixels, labels):
    """A batch as Python 2 wrote the official files."""
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85q\x05U\x01b\x87q\x06Rq\x07"
    shape = b"(K\x01K" + bytes([len(pixels)]) + b"M\x00\x0c\x86"
    dtype = b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    data = b"T" + pixels.size.to_bytes(4, "little") + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(bytes([ord("K"), label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(U\x04dataq\x02" + array + shape + dtype + data + b"U\x06labelsq\x09" + numbers + b"u."


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("data_batch_3", None, "missing"),
        ("data_batch_3", pickle.dumps({b"data": PIXELS[0], b"labels": [1] * 16})[:900], "cannot be read"),
        ("data_batch_3", b"<html>not found</html>", "cannot be read"),
        ("data_batch_3", pickle.dumps(Payload()), "it names posix.system"),
        ("data_batch_3", b"\x80\x02]r\xf0\xff\xff?.", "it has no data and labels"),  # pickle would take 12.7 GB for it
        ("data_batch_3", b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "cannot be read"),
        ("data_batch_3", b"\x80\x02" + b"]" * 200_010 + b".", "it has more than 200,000 parts"),
        ("data_batch_3", batch(Uninitialised()), "it calls numpy.ndarray"),
        ("data_batch_3", batch(PIXELS[0].astype(np.float32)), "not of the type uint8"),
        ("data_batch_3", batch(PIXELS[0].astype(np.int16)), "not of the type uint8"),
        ("data_batch_3", batch(PIXELS[0].tolist()), "its data no array"),
        ("test_batch", batch(PIXELS[0][:7]), "16 labels, and images of another number or size"),
        ("test_batch", batch(PIXELS[0][:, :7]), "16 labels, and images of another number or size"),
        ("test_batch", batch(PIXELS[0], [10] * 16), "the label 10 for image 0"),
        ("test_batch", batch(PIXELS[0], [1] * 15 + [2.7]), "the label 2.7 for image 15"),
        ("test_batch", batch(PIXELS[0], [1] * 15 + [float("nan")]), "the label nan for image 15"),
        ("test_batch", batch(PIXELS[0], [1] * 15 + ["cat"]), "the label 'cat' for image 15"),
        ("test_batch", batch(PIXELS[0], [[]] * 16), "the label of type list for image 0"),
        ("test_batch", batch(PIXELS[0], np.ones(16, int)), "its labels are no list"),
        ("test_batch", pickle.dumps({b"data": PIXELS[0][:0], b"labels": []}), "has no images"),
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


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_way_to_write_the_arrays_is_read(protocol, order, tmp_path):
    folder = write_python(tmp_path)
    content = {b"batch_label": b"x", b"labels": LABELS[5].tolist(), b"data": np.asarray(PIXELS[5], order=order)}
    content[b"filenames"] = [f"{i}.png".encode() for i in range(400)]  # long memos
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    _, _, test, labels = images.load_cifar10(tmp_path)
    np.testing.assert_array_equal(test.transpose(0, 3, 1, 2).reshape(16, 3072), PIXELS[5])
    np.testing.assert_array_equal(labels, LABELS[5])


def test_the_official_files_are_read(tmp_path):
    folder = write_python(tmp_path)
    content = python_2(PIXELS[5], LABELS[5])
    assert (pickle.loads(content, encoding="bytes")[b"data"] == PIXELS[5]).all()
    (folder / "test_batch").write_bytes(content)
    _, _, test, labels = images.load_cifar10(tmp_path)
    np.testing.assert_array_equal(test.transpose(0, 3, 1, 2).reshape(16, 3072), PIXELS[5])
    np.testing.assert_array_equal(labels, LABELS[5])


def test_a_short_binary_file_and_a_missing_folder_are_named(tmp_path):
    folder = write_binary(tmp_path)
    with open(folder / "data_batch_2.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(Problem, match=r"data_batch_2.bin.* has 5000 bytes"):
        images.load_cifar10(tmp_path)
    (folder / "data_batch_2.bin").write_bytes(bytes([200]) + bytes(3072))
    with pytest.raises(Problem, match=r"data_batch_2.bin.* has the label 200 for image 0"):
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
