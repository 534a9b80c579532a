"""examples/imagenet.py and image folders: decoding, worker processes, rows of each process, scores, errors."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")
import cifar10  # noqa: E402
import imagenet  # noqa: E402
from common import folders, options  # noqa: E402
from common.cli import Problem  # noqa: E402
from common.decode import decode  # noqa: E402
from common.images import normalise  # noqa: E402
from PIL.JpegImagePlugin import JpegImageFile  # noqa: E402

RNG = np.random.default_rng(0)
CLASSES = ["ant", "bee", "cat"]
OPTIONS = ["--model", "resnet6", "--size", "16", "--workers", "2", "--batch", "6", "--method", "top_k(density=0.1)"]


def write(path, width=24, height=20, pixels=None):
    """A smooth random image, or the pixels given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = Image.fromarray(RNG.integers(0, 256, (3, 4, 3), np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC) if pixels is None else Image.fromarray(pixels)
    image.save(path)
    return str(path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """8 images of each of 3 classes to train on, 5 held out, of the four endings."""
    folder = tmp_path_factory.mktemp("images")
    for name in CLASSES:
        for i in range(8):
            write(folder / "train" / name / f"{i}.{('JPEG', 'png', 'jpg', 'webp')[i % 4]}")
        for i in range(5):
            write(folder / "val" / name / f"{i}.png")
        (folder / "train" / name / "readme.txt").write_text("not an image")
    (folder / "train" / ".cache").mkdir()
    return folder


# Decoding.


def test_the_square_in_the_middle_is_exact(tmp_path):
    pixels = RNG.integers(0, 256, (32, 48, 3), np.uint8)
    path = write(tmp_path / "a.png", pixels=pixels)
    np.testing.assert_array_equal(decode(path, 32), pixels[:, 8:40])
    with Image.open(path) as image:
        truth = image.resize((12, 12), Image.Resampling.BILINEAR, (10, 2, 38, 30))
    np.testing.assert_array_equal(decode(path, 12, margin=7 / 8), truth)


def test_crops_are_of_the_area_and_shape_they_should_be_and_half_are_mirrored(tmp_path):
    x, y = np.meshgrid(np.arange(240), np.arange(180))
    path = write(tmp_path / "ramp.png", pixels=np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))  # colour tells place
    areas, ratios, mirrored, lefts = [], [], [], []
    for seed in range(300):
        pixels = decode(path, 8, seed=(1, seed)).astype(float)
        assert not pixels[..., 2].any()
        across, down = (pixels[0, 6, 0] - pixels[0, 1, 0]) * 8 / 5, (pixels[6, 0, 1] - pixels[1, 0, 1]) * 8 / 5
        areas.append(abs(across) * down / (240 * 180))
        ratios.append(abs(across) / down)
        mirrored.append(across < 0)
        lefts.append(pixels[0, :, 0].min() / 240)
    assert 0.07 < min(areas) < 0.13
    assert 0.8 < max(areas) < 1.02
    # Means of a million draws of which those that do not fit are drawn again; 300 are within 4 standard errors.
    assert abs(np.mean(areas) - 0.432) < 0.05
    assert abs(np.mean(np.log(ratios)) - 0.031) < 0.04
    assert abs(np.mean(lefts) - 0.219) < 0.05
    assert 0.72 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.37
    assert 0.4 < np.mean(mirrored) < 0.6


def test_an_image_in_which_no_crop_fits_gives_the_square_in_the_middle(tmp_path):
    pixels = RNG.integers(0, 256, (200, 4, 3), np.uint8)
    path = write(tmp_path / "thin.png", pixels=pixels)
    middle = pixels[98:102]
    for seed in range(4):
        found = decode(path, 4, seed=(seed,))
        assert (found == middle).all() or (found == middle[:, ::-1]).all()


def test_a_large_jpeg_is_decoded_at_a_reduced_scale_to_nearly_the_same(tmp_path, monkeypatch):
    path, decoded = write(tmp_path / "a.jpg", 500, 375), []
    full = np.asarray(Image.open(path).resize((48, 48), Image.Resampling.BILINEAR, (62.5, 0, 437.5, 375)), int)
    draft = JpegImageFile.draft

    def spy(image, *arguments):
        draft(image, *arguments)
        decoded.append(image.size)

    monkeypatch.setattr(JpegImageFile, "draft", spy)
    assert np.abs(decode(path, 48) - full).mean() < 1
    assert decoded == [(125, 94)]  # at a quarter; an eighth would be less than 48 pixels


def test_grey_and_transparent_images_become_rgb(tmp_path):
    grey = RNG.integers(0, 256, (8, 8), np.uint8)
    np.testing.assert_array_equal(decode(write(tmp_path / "grey.jpg", pixels=np.full((8, 8), 7, np.uint8)), 8), 7)
    np.testing.assert_array_equal(decode(write(tmp_path / "grey.png", pixels=grey), 8), np.stack([grey] * 3, -1))
    four = RNG.integers(0, 256, (8, 8, 4), np.uint8)
    np.testing.assert_array_equal(decode(write(tmp_path / "four.png", pixels=four), 8), four[..., :3])


# Folders.


def test_images_are_listed_by_class_and_name(tree):
    train, held_out, classes = folders.find_images(tree)
    assert classes == CLASSES
    assert [Path(path).name for path in train.paths[:3]] == ["0.JPEG", "1.png", "2.jpg"]
    assert [Path(path).parent.name for path in held_out.paths] == [name for name in CLASSES for _ in range(5)]
    np.testing.assert_array_equal(train.labels, np.repeat([0, 1, 2], 8))
    np.testing.assert_array_equal(held_out.labels, np.repeat([0, 1, 2], 5))


def test_a_small_set_is_loaded_whole_mixed_and_always_in_the_same_order(tree):
    images, labels, test, test_labels = folders.load_folder(tree, 16)
    assert images.shape == (24, 16, 16, 3)
    assert images.dtype == np.uint8
    assert set(labels[:8]) == {0, 1, 2}
    for pixels, numbers, listed in zip(
        (images, test), (labels, test_labels), folders.find_images(tree)[:2], strict=True
    ):
        found = {(image.tobytes(), int(label)) for image, label in zip(pixels, numbers, strict=True)}
        assert found == {(decode(p, 16).tobytes(), int(n)) for p, n in zip(listed.paths, listed.labels, strict=True)}
    np.testing.assert_array_equal(folders.load_folder(tree, 16)[0], images)


def test_cifar10_trains_on_an_image_folder(tree, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cifar10, "train", lambda task, args: seen.append(task) or sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["cifar10.py", "--data", str(tree), "--workers", "2", "--batch", "4"])
    with pytest.raises(SystemExit):
        cifar10.main()
    images, labels = next(seen[0].batches(0))
    assert (seen[0].steps, images.shape, labels.dtype) == (3, (8, 32, 32, 3), np.int32)
    assert jax.eval_shape(seen[0].init, jax.random.key(0))[0]["Dense_0"]["bias"].shape == (3,)


def remove(path):
    for inner in path.iterdir():
        remove(inner) if inner.is_dir() else inner.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: remove(folder), "no folder '.*set': fetch images .*image-net.*train/CLASS"),
        (lambda folder: remove(folder / "train"), "no folder 'train': lay images out as train/CLASS"),
        (lambda folder: remove(folder / "test"), "no folder 'val': lay images out as train/CLASS.* test for val"),
        (lambda folder: [remove(folder / "test" / c) for c in "ab"], "'.*test' has no folders of classes"),
        (lambda folder: (folder / "train" / "b" / "0.png").unlink(), "no jpg, png or webp in '.*train.b'"),
        (lambda folder: remove(folder / "test" / "b"), "the class 'b' is in '.*train' but not in '.*test'"),
        (lambda folder: remove(folder / "train" / "a"), "the class 'a' is in '.*test' but not in '.*train'"),
    ],
)
def test_a_folder_that_is_not_laid_out_right_gives_one_line(spoil, message, tmp_path):
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
def test_worker_processes_give_what_decoding_here_gives_in_order(processes, tree, monkeypatch):
    paths = folders.find_images(tree)[0].paths
    requests = [[[paths[(5 * batch + row) % 24], (7, batch, row)] for row in range(5)] for batch in range(7)]
    requests += [[[path, None] for path in paths[:5]]]
    if processes == 3:
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as where there is none
    with folders.Decoders(processes, rows=5, size=16, ahead=3) as decoders:
        for _ in range(2):
            found = list(decoders.batches(requests, margin=0.5))
            truth = [[decode(path, 16, seed, margin=0.5) for path, seed in request] for request in requests]
            np.testing.assert_array_equal(found, truth)
    assert all(worker.poll() is not None for worker in decoders.workers)


def test_a_batch_that_was_handed_out_is_not_overwritten(tree):
    path = folders.find_images(tree)[0].paths[0]
    with folders.Decoders(1, rows=1, size=8, ahead=1) as decoders:
        batches = decoders.batches([[[path, (i,)]] for i in range(3)])
        first = next(batches)
        kept = first.copy()
        list(batches)
    np.testing.assert_array_equal(first, kept)


def test_a_worker_process_that_dies_ends_the_training_with_one_line(tree):
    request = [[path, None] for path in folders.find_images(tree)[0].paths[:2]]
    with folders.Decoders(2, rows=2, size=8, ahead=1) as decoders:
        batches = decoders.batches([request] * 50)
        next(batches)
        decoders.workers[1].kill()
        with pytest.raises(Problem, match=r"a process that decodes images has died \(exit status -9.*--resume"):
            list(batches)


def test_a_worker_process_that_dies_while_it_is_waited_for_ends_the_wait(tree):
    request = [[path, None] for path in folders.find_images(tree)[0].paths[:2]]
    with folders.Decoders(2, rows=2, size=8) as decoders:
        decoders.workers[0].send_signal(signal.SIGSTOP)
        threading.Timer(0.2, decoders.workers[0].kill).start()
        with pytest.raises(Problem, match="a process that decodes images has died"):
            list(decoders.batches([request]))


def test_worker_processes_end_when_their_parent_does(tree):
    decoders = folders.Decoders(1, rows=1, size=8)
    decoders.workers[0].stdin.close()
    assert decoders.workers[0].wait(timeout=20) == 0
    decoders.__exit__()


# The task.


class Recorded:
    """In place of Decoders: a batch is the requests for it."""

    def batches(self, requests, margin):
        for request in requests:
            yield np.array([[path, str(seed), str(margin)] for path, seed in request])


def task_on(tree, *options, decoders=None):
    args = imagenet.parse_options(["--data", str(tree), *OPTIONS, *options])
    return imagenet.make_task(args, *folders.find_images(tree), decoders or Recorded()), args


def test_batches_follow_from_seed_epoch_and_image(tree):
    task, _ = task_on(tree, "--seed", "3")
    (first, labels), (second, _) = task.batches(5)
    assert task.steps == 2
    paths = folders.find_images(tree)[0].paths
    rows = np.concatenate([first, second])
    assert sorted(rows[:, 0]) == paths
    for path, seed, margin in rows:
        assert (seed, margin) == (str((3, 5, paths.index(path))), "1.0")
    assert [CLASSES[label] for label in labels] == [Path(path).parent.name for path in first[:, 0]]
    np.testing.assert_array_equal(next(task_on(tree, "--seed", "3")[0].batches(5))[0], first)
    assert (next(task.batches(6))[0][:, 0] != first[:, 0]).any()
    assert (next(task_on(tree)[0].batches(5))[0][:, 0] != first[:, 0]).any()


def test_each_process_loads_the_rows_of_its_own_workers(tree, monkeypatch):
    options = ("--workers", "4", "--batch", "2")
    whole = list(task_on(tree, *options)[0].batches(0))
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=w // 2) for w in range(4)])
    parts = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(list(task_on(tree, *options)[0].batches(0)))
    assert len(whole) == len(parts[0]) == 3
    for (images, labels), *both in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([part[0] for part in both]), images)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in both]), labels)


def test_scores_count_every_held_out_image_once(tree):
    args = imagenet.parse_options(["--data", str(tree), *OPTIONS, "--workers", "2", "--batch", "4"])
    train, held_out, _ = folders.find_images(tree)
    classes = [str(i) for i in range(12)]  # more than five, so that the five likeliest are not all
    model = imagenet.networks.IMAGENET["resnet6"](classes=12)
    with folders.Decoders(1, rows=8, size=16) as decoders:
        task = imagenet.make_task(args, train, held_out, classes, decoders)
        params, state = jax.jit(task.init, compiler_options={"xla_backend_optimization_level": 0})(jax.random.key(1))
        params["Dense_0"]["bias"] = jnp.arange(12) % 4 / 4.0
        scores = task.evaluate(jax.device_get(params), jax.device_get(state))
        always = {**params, "Dense_0": {**params["Dense_0"], "bias": 1e6 * (jnp.arange(12) == 2)}}
        last_class = task.evaluate(jax.device_get(always), jax.device_get(state))
    pixels = np.stack([decode(path, 16, margin=224 / 256) for path in held_out.paths])
    inputs = normalise(pixels, imagenet.MEAN, imagenet.STD)
    logits = jax.jit(lambda x: model.apply({"params": params, "batch_stats": state}, x, train=False))(inputs)
    places = np.argsort(-np.asarray(logits), axis=-1)
    one, five = ((places[:, :k] == held_out.labels[:, None]).any(1).mean() for k in (1, 5))
    assert scores == {"accuracy": pytest.approx(one), "top_5_accuracy": pytest.approx(five)}
    assert 0 < five < 1
    assert last_class["accuracy"] == pytest.approx(5 / 15)  # the last batch is filled up; that counts for nothing


def test_too_few_images_for_the_workers_give_one_line(tree):
    with pytest.raises(Problem, match="--workers 5 times --batch 6 is more than the 24 training images"):
        task_on(tree, "--workers", "5")


def test_steps_of_the_learning_rate_and_warm_up():
    rate = options.learning_rate("steps", 0.2, 90 * 10, 90, warmup_epochs=5)
    found = [float(rate(step)) for step in (0, 24, 49, 50, 299, 301, 599, 601, 799, 801, 899)]
    truth = [0.2 / 50, 0.1, 0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002]
    np.testing.assert_allclose(found, truth, rtol=1e-5)
    assert float(options.learning_rate("constant", 0.2, 100, 10)(0)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--processes", "2"], "--coordinator, --processes and --process go together"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "--process must be from 0 to 1.*got 2"),
        (["--warmup-epochs", "-1"], "--warmup-epochs: must be a number, 0 or above, got '-1'"),
        (["--warmup-epochs", "x"], "--warmup-epochs: must be a number, 0 or above, got 'x'"),
        (["--size", "0"], "--size.*'0'"),
    ],
)
def test_bad_options_give_one_line(given, message, capsys):
    with pytest.raises(SystemExit):
        imagenet.parse_options(["--data", "x", *given])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


# The command.


def run(tree, out, *options):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / "imagenet.py"), "--data", str(tree), "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": path}
    return subprocess.run([*command, *OPTIONS, *options], env=environment, capture_output=True, text=True, timeout=300)


def test_it_trains_on_a_tree_of_images(tree, tmp_path):
    done = run(tree, tmp_path / "run", "--epochs", "1", "--decoders", "2", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 2
    assert 0 <= result["epochs"][0]["accuracy"] <= result["epochs"][0]["top_5_accuracy"] == 1
    assert result["compression_ratio"] > 5
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert "accuracy" in done.stdout


@pytest.mark.full
def test_a_run_that_was_cut_goes_on_to_the_same_end(tree, tmp_path):
    options = ("--schedule", "constant", "--method", "variance(alpha=1)", "--learning-rate", "0.01")
    assert run(tree, tmp_path / "whole", *options, "--epochs", "2").returncode == 0
    assert run(tree, tmp_path / "cut", *options, "--epochs", "1").returncode == 0
    done = run(tree, tmp_path / "cut", *options, "--epochs", "2", "--resume", "--decoders", "3")
    assert done.returncode == 0, done.stderr
    whole, cut = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut"))
    for a, b in zip(whole["epochs"], cut["epochs"], strict=True):
        assert {name: x for name, x in a.items() if name != "seconds"} == {n: x for n, x in b.items() if n != "seconds"}


def run_two(tree, out, *options):
    """Two processes of one worker each."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        join = ("--coordinator", f"localhost:{held.getsockname()[1]}", "--processes", "2", "--decoders", "1")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = [pool.submit(run, tree, out, *options, *join, "--process", str(i)) for i in range(2)]
        return [one.result() for one in started]


@pytest.mark.full
def test_two_processes_train_as_one(tree, tmp_path):
    both = run_two(tree, tmp_path / "two", "--epochs", "1")
    assert [done.returncode for done in both] == [0, 0], both
    assert "accuracy" in both[0].stdout
    assert "accuracy" not in both[1].stdout  # gloo prints, too
    assert run(tree, tmp_path / "one", "--epochs", "1").returncode == 0
    two, one = (json.loads((tmp_path / name / "result.json").read_text())["epochs"][0] for name in ("two", "one"))
    same = ("accuracy", "top_5_accuracy", "sent", "wire_bytes")  # the loss is that of the process's own workers
    assert [two[name] for name in same] == [one[name] for name in same]


@pytest.mark.full
def test_a_process_with_an_unreadable_image_leaves_at_once(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "tree")
    for path in (tmp_path / "tree" / "train" / "ant").iterdir():
        path.write_bytes(b"damaged")
    both = run_two(tmp_path / "tree", tmp_path / "run", "--epochs", "1")
    assert all(done.returncode for done in both)
    assert any("is not an image that can be read" in done.stderr for done in both)


@pytest.mark.full
def test_a_missing_folder_gives_one_line(tmp_path):
    done = run(tmp_path / "none", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith("imagenet.py: --data: there is no folder")
    assert done.stderr.count("\n") == 1
