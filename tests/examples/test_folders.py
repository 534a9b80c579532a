"""examples/common/folders.py: image folders, and the worker processes that decode them."""

import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from common import folders
from common.cli import Problem
from common.decode import decode
from pictures import CLASSES, write


def test_images_are_listed_by_class_and_name(image_tree):
    train, held_out, classes = folders.find_images(image_tree)
    assert classes == CLASSES
    assert [Path(path).name for path in train.paths[:3]] == ["0.JPEG", "1.png", "2.jpg"]
    assert [Path(path).parent.name for path in held_out.paths] == [name for name in CLASSES for _ in range(5)]
    np.testing.assert_array_equal(train.labels, np.repeat([0, 1, 2], 8))
    np.testing.assert_array_equal(held_out.labels, np.repeat([0, 1, 2], 5))


def test_a_small_set_is_loaded_in_a_fixed_mixed_order(image_tree):
    images, labels, test, test_labels = folders.load_folder(image_tree, 16)
    assert images.shape == (24, 16, 16, 3)
    assert images.dtype == np.uint8
    assert set(labels[:8]) == {0, 1, 2}
    for pixels, numbers, listed in zip(
        (images, test), (labels, test_labels), folders.find_images(image_tree)[:2], strict=True
    ):
        found = {(image.tobytes(), int(label)) for image, label in zip(pixels, numbers, strict=True)}
        assert found == {(decode(p, 16).tobytes(), int(n)) for p, n in zip(listed.paths, listed.labels, strict=True)}
    np.testing.assert_array_equal(folders.load_folder(image_tree, 16)[0], images)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no folder '.*set': fetch images .*image-net.*train/CLASS"),
        (lambda folder: shutil.rmtree(folder / "train"), "no folder 'train': lay images out as train/CLASS"),
        (lambda folder: shutil.rmtree(folder / "test"), "no folder 'val': lay images out .* test works for val"),
        (lambda folder: [shutil.rmtree(folder / "test" / c) for c in "ab"], "'.*test' has no class folders"),
        (lambda folder: (folder / "train" / "b" / "0.png").unlink(), "no jpg, png or webp in '.*train.b'"),
        (lambda folder: shutil.rmtree(folder / "test" / "b"), "the class 'b' is in '.*train' but not in '.*test'"),
        (lambda folder: shutil.rmtree(folder / "train" / "a"), "the class 'a' is in '.*test' but not in '.*train'"),
    ],
)
def test_a_bad_folder_gives_one_line(spoil, message, tmp_path):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        write(tmp_path / "set" / name / "0.png")
    folders.find_images(tmp_path / "set")
    spoil(tmp_path / "set")
    with pytest.raises(Problem, match=message) as raised:
        folders.find_images(tmp_path / "set")
    assert "\n" not in str(raised.value)


def test_an_unreadable_image_is_named(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / part / "a" / "0.png")
    bad = tmp_path / "train" / "a" / "1.jpg"
    whole = Path(write(tmp_path / "whole.jpg", 100, 80)).read_bytes()
    for content in (b"", b"not an image", whole[: len(whole) // 2]):
        bad.write_bytes(content)
        with pytest.raises(Problem, match=r"1\.jpg' is not an image that can be read \(") as raised:
            folders.load_folder(tmp_path, 8)
        assert "\n" not in str(raised.value)
        with folders.Decoders(1, 1, 8) as decoders, pytest.raises(Problem, match=r"1\.jpg' is not an image"):
            list(decoders.batches([[[str(bad), None]]]))


# Worker processes.


@pytest.mark.parametrize("processes", [1, 3])
def test_workers_decode_in_order(processes, image_tree, monkeypatch):
    paths = folders.find_images(image_tree)[0].paths
    requests = [[[paths[(5 * batch + row) % 24], (7, batch, row)] for row in range(5)] for batch in range(7)]
    requests += [[[path, None] for path in paths[:5]]]
    if processes == 3:
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as on systems without it
    with folders.Decoders(processes, rows=5, size=16, ahead=3) as decoders:
        for _ in range(2):
            found = list(decoders.batches(requests, margin=0.5))
            truth = [[decode(path, 16, seed, margin=0.5) for path, seed in request] for request in requests]
            np.testing.assert_array_equal(found, truth)
    assert all(worker.poll() is not None for worker in decoders.workers)


def test_a_yielded_batch_is_not_overwritten(image_tree):
    path = folders.find_images(image_tree)[0].paths[0]
    with folders.Decoders(1, rows=1, size=8, ahead=1) as decoders:
        batches = decoders.batches([[[path, (i,)]] for i in range(3)])
        first = next(batches)
        kept = first.copy()
        list(batches)
    np.testing.assert_array_equal(first, kept)


def test_a_dead_worker_ends_training_with_one_line(image_tree):
    request = [[path, None] for path in folders.find_images(image_tree)[0].paths[:2]]
    with folders.Decoders(2, rows=2, size=8, ahead=1) as decoders:
        batches = decoders.batches([request] * 50)
        next(batches)
        decoders.workers[1].kill()
        with pytest.raises(Problem, match=r"a process that decodes images has died \(exit status -9.*--resume"):
            list(batches)


def test_a_worker_dying_during_a_wait_ends_the_wait(image_tree):
    request = [[path, None] for path in folders.find_images(image_tree)[0].paths[:2]]
    with folders.Decoders(2, rows=2, size=8) as decoders:
        decoders.workers[0].send_signal(signal.SIGSTOP)
        threading.Timer(0.2, decoders.workers[0].kill).start()
        with pytest.raises(Problem, match="a process that decodes images has died"):
            list(decoders.batches([request]))


def test_workers_end_with_their_parent(image_tree):
    decoders = folders.Decoders(1, rows=1, size=8)
    decoders.workers[0].stdin.close()
    assert decoders.workers[0].wait(timeout=20) == 0
    decoders.__exit__()
