"""examples/cifar10.py and what it shares with the other examples: files, options, augmentation, squares, resuming."""

import argparse
import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gcjax

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")
images = pytest.importorskip("common.images")
from common import options, training  # noqa: E402
from common.cli import Problem  # noqa: E402

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


@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("inside", [False, True])
def test_both_official_layouts_are_read_from_the_folder_or_the_one_above(write, inside, tmp_path):
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
def test_a_broken_file_is_named_with_the_place_to_fetch_it(file, content, said, tmp_path):
    folder = write_python(tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(Problem, match=said) as raised:
        images.load_cifar10(tmp_path)
    assert file in str(raised.value)
    assert images.SOURCE in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_binary_file_that_is_cut_off_and_an_empty_folder_are_named(tmp_path):
    folder = write_binary(tmp_path)
    with open(folder / "data_batch_2.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(Problem, match=r"data_batch_2.bin.* has 5000 bytes"):
        images.load_cifar10(tmp_path)
    with pytest.raises(Problem, match="fetch the python or the binary version"):
        images.load_cifar10(tmp_path / "nothing")


def test_an_augmented_image_is_one_of_its_crops_mirrored_or_not_and_keys_decide_which():
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


def test_microbatches_give_the_mean_gradient_and_the_squares_of_the_parts():
    x, params = RNG.normal(size=(12, 3)).astype(np.float32), jnp.array([0.3, -1.0, 2.0])

    def loss(params, inputs):
        batch, keys, model_state = inputs
        del keys, model_state
        return jnp.mean((batch @ params) ** 2)

    run = training.microbatches(loss, has_aux=False, in_axes=None)
    out, (mean, squares) = run(params, (jnp.asarray(x), jax.random.split(jax.random.key(0), 12), None))
    parts = [np.mean(2 * (part @ params)[:, None] * part, axis=0) for part in x.reshape(4, 3, 3)]
    np.testing.assert_allclose(out, np.mean((x @ params) ** 2), rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean(parts, axis=0), rtol=1e-5)
    np.testing.assert_allclose(squares, np.sum((np.array(parts) / 4) ** 2, axis=0), rtol=1e-5)


def test_every_method_can_be_chosen_by_a_text():
    assert options.method("variance(alpha=2, threshold=0.1)") == ("variance", {"alpha": 2, "threshold": 0.1})
    for name in options.methods():
        needs = {"strom": "threshold=1.0", "demo": "top_k=8"}.get(name, "")
        density = (
            "density=0.1" if name in ("top_k", "random_k", "gaussian_k", "sidco", "dryden", "ef21", "sketch") else ""
        )
        chosen = options.method(f"{name}({needs or density})")
        tx = options.make_compressor(chosen, axis_name=None)
        params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
        assert updates == params, name
    assert len(options.methods()) == sum(name.endswith("_compress") for name in gcjax.__all__)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk(density=0.1)", "no method 'topk'"),
        ("top_k(0.1)", r"must be like 'top_k\(density=0.01\)'"),
        ("top_k(density=", "must be like"),
        ("__import__('os')", "must be like"),
        ("top_k(density=__import__('os'))", "must be like"),
        ("variance(alfa=2)", "no option 'alfa'; it has alpha,"),
        ("variance(axis_name='x')", "no option 'axis_name'"),
    ],
)
def test_a_method_that_cannot_be_made_is_named(text, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        options.method(text)


@pytest.mark.parametrize("text", ["top_k(density=2)", "top_k", "qsgd(bits=2, key='x')"])
def test_a_method_with_options_out_of_range_is_named(text):
    with pytest.raises(Problem, match=f"--method {text.split('(')[0]}: "):
        options.make_compressor(options.method(text), axis_name=None)


def test_parsing_a_method_touches_no_device():
    # Otherwise the number of virtual devices could not be set any more.
    code = "import jax; from common.options import method; method('qsgd'); jax.config.update('jax_num_cpu_devices', 3)"
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)


@pytest.mark.parametrize(("step", "rate"), [(0, 1.0), (24, 1.0), (25, 0.5), (49, 0.5), (299, 2.0**-11)])
def test_halving_is_the_papers_schedule_every_25_of_300_epochs(step, rate):
    assert float(options.learning_rate("halve", 1.0, 300 * 7, 300)(7 * step)) == pytest.approx(rate)


def run_example(*arguments):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / "cifar10.py"), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_curves(tmp_path):
    write_python(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ["--data", tmp_path, "--width", 8, "--workers", 2, "--batch", 8, "--epochs", 2, "--optimiser", "sgd"]
    done = run_example(*arguments, "--out", whole)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout.splitlines()[-1]
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "2")
    done = run_example(*arguments, "--out", cut, "--resume")
    assert done.returncode == 0, done.stderr
    for name in ("steps.csv", "epochs.csv"):
        rows, again = (list(csv.DictReader((out / name).read_text().splitlines())) for out in (whole, cut))
        assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in again]
        assert len(rows) == (10 if name == "steps.csv" else 2)
    result = json.loads((cut / "result.json").read_text())
    assert result["compression_ratio"] == json.loads((whole / "result.json").read_text())["compression_ratio"]
    assert (cut / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize("model", ["vgg", "resnet20", "resnet18"])
def test_networks_with_batch_statistics_and_dropout_train(model, tmp_path):
    write_python(tmp_path)
    arguments = ["--model", model, "--width", 8, "--workers", 2, "--batch", 4, "--epochs", 1, "--images", 16]
    done = run_example("--data", tmp_path, "--out", tmp_path / "out", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_the_user_can_mend_is_one_line(tmp_path):
    write_python(tmp_path)
    out = tmp_path / "out"
    small = ["--data", tmp_path, "--width", 8, "--workers", 2, "--epochs", 1, "--images", 16, "--batch", 8]
    assert run_example(*small, "--out", out).returncode == 0
    for arguments, said in [
        ([*small, "--out", out], "--resume goes on"),
        ([*small, "--out", tmp_path / "new", "--resume"], "no checkpoint"),
        ([*small, "--out", out, "--resume", "--width", "16"], "another model"),
        ([*small, "--out", tmp_path / "data", "--batch", "32"], "more than the 16 training images"),
        (["--data", tmp_path / "none", "--out", out], "no CIFAR-10"),
        ([*small, "--out", tmp_path / "fast", "--learning-rate", "1e30", "--epochs", "3"], "diverged"),
    ]:
        done = run_example(*arguments)
        assert done.returncode == 2
        lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("cifar10.py: ")]
        assert len(lines) == 1
        assert said in lines[0]
