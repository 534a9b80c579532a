"""examples/cifar10.py: squares of parts of a batch, image folders, the command, resuming."""

import shutil
import sys

import cifar10
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cifar_files import RNG, write_python
from commands import curve, result, run
from common import training
from harness import mesh_of


def test_microbatches_give_mean_gradient_and_squares_of_parts():
    x, params = RNG.normal(size=(12, 3)).astype(np.float32), jnp.array([0.3, -1.0, 2.0])

    def loss(params, inputs):
        batch, keys, factor = inputs
        assert keys.shape == (3,)
        return factor * jnp.mean((batch @ params) ** 2)

    run = training.microbatches(loss, has_aux=False, in_axes=(0, 0, None))
    out, (mean, squares) = run(params, (jnp.asarray(x), jax.random.split(jax.random.key(0), 12), 1.0))
    parts = [np.mean(2 * (part @ params)[:, None] * part, axis=0) for part in x.reshape(4, 3, 3)]
    np.testing.assert_allclose(out, np.mean((x @ params) ** 2), rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean(parts, axis=0), rtol=1e-5)
    np.testing.assert_allclose(squares, np.sum((np.array(parts) / 4) ** 2, axis=0), rtol=1e-5)


@pytest.mark.parametrize("squares", ["samples", "microbatches", "batch"])
def test_a_step_takes_every_kind_of_squares(squares, image_tree):
    options = ["--data", str(image_tree), "--workers", "2", "--batch", "4", "--squares", squares]
    args = cifar10.parse_options(options)
    task = cifar10.make_task(args, cifar10.load_data(args))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step, state = training.make_step(task, args, mesh)
    prepare = training.prepare_on_workers(task.prepare, mesh)
    [batch] = training.place_batches([next(task.batches(0))], mesh)
    _, metrics = jax.eval_shape(step, state, prepare(jax.random.key(0), batch))
    assert metrics.loss.shape == (2,)


def test_it_trains_on_an_image_folder(image_tree):
    args = cifar10.parse_options(["--data", str(image_tree), "--workers", "2", "--batch", "4"])
    task = cifar10.make_task(args, cifar10.load_data(args))
    images, labels = next(task.batches(0))
    assert (task.steps, images.shape, labels.dtype) == (3, (8, 32, 32, 3), np.int32)
    for tail, batch in zip(list(task.batches(0))[2:], task.batches(0, 2), strict=True):
        np.testing.assert_array_equal(tail[0], batch[0])
    assert jax.eval_shape(task.init, jax.random.key(0))[0]["Dense_0"]["bias"].shape == (3,)


def test_a_resumed_run_ends_with_the_same_curves(tmp_path, monkeypatch, capsys):
    write_python(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    monkeypatch.setattr(training, "use_devices", mesh_of)  # in this process, whose devices cannot be set any more

    def train(*more):
        options = ["--data", tmp_path, "--width", 8, "--workers", 2, "--batch", 8, "--epochs", 2, "--optimiser", "sgd"]
        monkeypatch.setattr(sys, "argv", ["cifar10.py", *map(str, (*options, *more))])
        cifar10.main()
        return capsys.readouterr().out

    assert "test accuracy" in train("--out", whole).splitlines()[-1]
    shutil.copytree(whole, cut)
    (cut / "checkpoints" / "10" / "run" / "metadata").write_text("damaged")
    (cut / "steps.csv").unlink()
    assert "step 10 is damaged" in train("--out", cut, "--resume")
    for name, length in (("steps", 10), ("epochs", 2)):
        assert curve(whole, name) == curve(cut, name)
        assert len(curve(cut, name)) == length
    assert result(cut)["compression_ratio"] == result(whole)["compression_ratio"]
    assert (cut / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize("model", ["vgg", "resnet20", "resnet18"])
def test_networks_with_batch_norm_and_dropout_train(model, tmp_path):
    write_python(tmp_path)
    options = ["--model", model, "--width", 8, "--workers", 2, "--batch", 4, "--epochs", 1, "--images", 16]
    done = run("cifar10.py", "--data", tmp_path, "--out", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_errors_of_the_user_give_one_line(tmp_path):
    write_python(tmp_path)
    out = tmp_path / "out"
    small = ["--data", tmp_path, "--width", 8, "--workers", 2, "--epochs", 1, "--images", 16, "--batch", 8]
    assert run("cifar10.py", *small, "--out", out).returncode == 0
    for options, message in [
        ([*small, "--out", out], "--resume goes on"),
        ([*small, "--out", tmp_path / "new", "--resume"], "no checkpoint"),
        ([*small, "--out", out, "--resume", "--width", "16"], "--width 8, not 16"),
        ([*small, "--out", out, "--resume", "--width", "16", "--allow", "width"], "another model"),
        ([*small, "--out", tmp_path / "data", "--batch", "32"], "more than the 16 training images"),
        (["--data", tmp_path / "none", "--out", out], "no CIFAR-10"),
        ([*small, "--out", tmp_path / "fast", "--learning-rate", "1e30", "--epochs", "3"], "diverged"),
    ]:
        done = run("cifar10.py", *options)
        assert done.returncode == 2
        lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("cifar10.py: ")]
        assert len(lines) == 1
        assert message in lines[0]
