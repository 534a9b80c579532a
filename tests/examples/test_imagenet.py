"""examples/imagenet.py: the rows of each process, scores, options, the command."""

import concurrent.futures
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import imagenet
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import folders
from common.cli import Problem
from common.decode import decode
from common.images import normalise
from pictures import CLASSES

OPTIONS = ["--model", "resnet6", "--size", "16", "--workers", "2", "--batch", "6", "--method", "top_k(density=0.1)"]


class Recorded:
    """In place of Decoders: a batch is the requests for it."""

    def batches(self, requests, margin):
        for request in requests:
            yield np.array([[path, str(seed), str(margin)] for path, seed in request])


def task_on(image_tree, *options, decoders=None):
    args = imagenet.parse_options(["--data", str(image_tree), *OPTIONS, *options])
    return imagenet.make_task(args, *folders.find_images(image_tree), decoders or Recorded()), args


def test_batches_follow_from_seed_epoch_and_image(image_tree):
    task, _ = task_on(image_tree, "--seed", "3")
    (first, labels), (second, _) = task.batches(5)
    ((last, _),) = task.batches(5, 1)
    np.testing.assert_array_equal(last, second)
    assert task.steps == 2
    paths = folders.find_images(image_tree)[0].paths
    rows = np.concatenate([first, second])
    assert sorted(rows[:, 0]) == paths
    for path, seed, margin in rows:
        assert (seed, margin) == (str((3, 5, paths.index(path))), "1.0")
    assert [CLASSES[label] for label in labels] == [Path(path).parent.name for path in first[:, 0]]
    np.testing.assert_array_equal(next(task_on(image_tree, "--seed", "3")[0].batches(5))[0], first)
    assert (next(task.batches(6))[0][:, 0] != first[:, 0]).any()
    assert (next(task_on(image_tree)[0].batches(5))[0][:, 0] != first[:, 0]).any()


def test_each_process_loads_the_rows_of_its_own_workers(image_tree, monkeypatch):
    options = ("--workers", "4", "--batch", "2")
    whole = list(task_on(image_tree, *options)[0].batches(0))
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=w // 2) for w in range(4)])
    parts = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(list(task_on(image_tree, *options)[0].batches(0)))
    assert len(whole) == len(parts[0]) == 3
    for (images, labels), *both in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([part[0] for part in both]), images)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in both]), labels)


def test_scores_count_every_held_out_image_once(image_tree):
    args = imagenet.parse_options(["--data", str(image_tree), *OPTIONS, "--workers", "2", "--batch", "4"])
    train, held_out, _ = folders.find_images(image_tree)
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


def test_too_few_images_give_one_line(image_tree):
    with pytest.raises(Problem, match="--workers 5 times --batch 6 is more than the 24 training images"):
        task_on(image_tree, "--workers", "5")


# The command.


def train(tree, out, *options):
    return commands.run("imagenet.py", "--data", tree, "--out", out, *OPTIONS, *options)


def test_it_trains_on_a_folder_of_images(image_tree, tmp_path):
    done = train(image_tree, tmp_path / "run", "--epochs", "1", "--decoders", "2", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    found = commands.result(tmp_path / "run")
    assert found["steps"] == 2
    assert 0 <= found["epochs"][0]["accuracy"] <= found["epochs"][0]["top_5_accuracy"] == 1
    assert found["compression_ratio"] > 5
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert "accuracy" in done.stdout


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_curves(image_tree, tmp_path):
    options = ("--schedule", "constant", "--method", "variance(alpha=1)", "--learning-rate", "0.01")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(image_tree, whole, *options, "--epochs", "2").returncode == 0
    assert train(image_tree, cut, *options, "--epochs", "1").returncode == 0
    done = train(image_tree, cut, *options, "--epochs", "2", "--resume", "--allow", "epochs", "--decoders", "3")
    assert done.returncode == 0, done.stderr
    assert commands.curve(whole, "epochs") == commands.curve(cut, "epochs")


def train_on_two(tree, out, *options, then=lambda processes: None):
    """Two processes of one worker each, which `then` may disturb."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        join = ("--coordinator", f"localhost:{held.getsockname()[1]}", "--processes", "2", "--decoders", "1")
    options = ("--data", tree, "--out", out, *OPTIONS, *options, *join)
    started = [commands.start("imagenet.py", *options, "--process", str(i)) for i in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ends = [pool.submit(process.communicate, timeout=commands.LIMIT) for process in started]
        then(started)
        written = [end.result() for end in ends]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, written, strict=True)
    ]


@pytest.mark.full
def test_two_processes_train_as_one(image_tree, tmp_path):
    both = train_on_two(image_tree, tmp_path / "two", "--epochs", "1")
    assert [done.returncode for done in both] == [0, 0], both
    assert "accuracy" in both[0].stdout
    assert "accuracy" not in both[1].stdout  # gloo prints as well
    assert train(image_tree, tmp_path / "one", "--epochs", "1").returncode == 0
    two, one = (commands.result(tmp_path / name)["epochs"][0] for name in ("two", "one"))
    same = ("accuracy", "top_5_accuracy", "sent", "wire_bytes")  # the loss is that of the process's own workers
    assert [two[name] for name in same] == [one[name] for name in same]


@pytest.mark.full
def test_after_sigterm_two_processes_go_on_bit_for_bit(image_tree, tmp_path):
    options, cut = ("--epochs", "15", "--checkpoint-every", "3"), tmp_path / "cut"

    def terminate(processes):
        while not (cut / "epochs.csv").exists() and processes[1].poll() is None:
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)

    both = train_on_two(image_tree, cut, *options, then=terminate)
    assert [done.returncode for done in both] == [128 + signal.SIGTERM] * 2, both
    assert len({re.search(r"^imagenet.py: SIGTERM: ended after step \d+", done.stderr, re.M)[0] for done in both}) == 1
    assert 2 < len(commands.curve(cut, "steps")) < 30
    for out, more in ((cut, ["--resume"]), (tmp_path / "whole", [])):
        both = train_on_two(image_tree, out, *options, *more)
        assert [done.returncode for done in both] == [0, 0], both
    for name in ("steps", "epochs"):
        assert commands.curve(cut, name) == commands.curve(tmp_path / "whole", name)


@pytest.mark.full
def test_an_unreadable_image_ends_all_processes(image_tree, tmp_path):
    shutil.copytree(image_tree, tmp_path / "tree")
    for path in (tmp_path / "tree" / "train" / "ant").iterdir():
        path.write_bytes(b"damaged")
    both = train_on_two(tmp_path / "tree", tmp_path / "run", "--epochs", "1")
    assert all(done.returncode for done in both)
    assert any("is not an image that can be read" in done.stderr for done in both)
