"""cifar10.py, char_lm.py and imagenet.py: they learn, compute what they should, and go on where they were cut off."""

import csv
import json
import os
import pickle
import sys

import char_lm
import cifar10
import imagenet
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from common import training
from common.cli import Problem, run_command
from common.images import load_cifar10
from common.log import Log
from common.text import load_text
from harness import mesh_of
from selection import cases

EXAMPLES = {
    "cifar10": "--data {data} --width 8 --batch 16 --learning-rate 0.01",
    "char_lm": "--text {data}/text.txt --context 16 --width 16 --layers 1 --heads 2 --batch 16 --learning-rate 0.01",
    "imagenet": "--data {data} --model resnet6 --size 16 --batch 8 --warmup-epochs 0 --learning-rate 0.02",
}


@pytest.fixture
def train(data, monkeypatch, capsys):
    """Runs an example on two devices of this process, and returns its output."""
    monkeypatch.setattr(training, "use_devices", mesh_of)

    def train(name, out, *options):
        common = f"--workers 2 --out {out} {EXAMPLES[name].format(data=data)}"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *common.split(), *map(str, options)])
        example = {"cifar10": cifar10, "char_lm": char_lm, "imagenet": imagenet}[name]
        status = run_command(example.main)
        said = capsys.readouterr()
        return said.out if status == 0 else said.err.splitlines()[-1]

    return train


def curve(out, name):
    """The rows of steps.csv or epochs.csv, without their times."""
    rows = csv.DictReader((out / f"{name}.csv").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def curves(out):
    return curve(out, "steps") + curve(out, "epochs")


def last_state(out):
    """Names and bytes of all leaves of the last checkpoint's state."""
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        leaves = jax.tree_util.tree_leaves_with_path(manager.restore(manager.latest_step(), args=args)["state"])
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for _, x in leaves]
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for (path, _), x in zip(leaves, plain, strict=True)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_learns_and_writes_curves_result_and_plot(name, train, tmp_path):
    said = train(name, tmp_path, "--epochs", 4, "--method", "top_k(density=0.1)", "--schedule", "cosine")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["epochs"][-1]["loss"] < 0.9 * result["epochs"][0]["loss"], said
    assert result["compression_ratio"] == pytest.approx(10, rel=0.05)
    assert f"compression ratio {result['compression_ratio']:.1f}" in said
    assert len(curves(tmp_path)) == result["steps"] + 4
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    if name == "char_lm":
        assert (tmp_path / "sample.txt").read_text() in said


def test_dense_exchange_takes_the_steps_of_plain_optax(train, data, tmp_path):
    train("char_lm", tmp_path, "--epochs", 1, "--method", "dense")
    found = [float(row["loss"]) for row in curve(tmp_path, "steps")]
    args = char_lm.parse_options(f"--workers 2 --epochs 1 {EXAMPLES['char_lm'].format(data=data)}".split())
    task = char_lm.make_task(args, *load_text(args.text, args.context))
    params, _ = task.init(jax.random.key(args.seed))
    tx = optax.adam(optax.cosine_decay_schedule(args.learning_rate, task.steps))
    opt_state, step, truth = tx.init(params), jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, b, None))), []
    for batch in task.batches(0):
        loss, grad = step(params, batch)
        updates, opt_state = tx.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        truth.append(float(loss))
    np.testing.assert_allclose(found, truth, rtol=1e-3)


class Cut(Exception):
    """In place of a kill."""


@cases("name", ["char_lm", "cifar10", "imagenet"], default=1)
def test_a_resumed_run_goes_on_bit_for_bit(name, train, tmp_path, monkeypatch):
    options = ("--epochs", 2, "--method", "variance(alpha=1)", "--checkpoint-every", 3)
    train(name, tmp_path / "whole", *options)
    add_step = Log.add_step

    def cut(log, *args):
        add_step(log, *args)
        if log.done == 4:
            raise Cut

    monkeypatch.setattr(Log, "add_step", cut)
    with pytest.raises(Cut):
        train(name, tmp_path / "cut", *options)
    monkeypatch.setattr(Log, "add_step", add_step)
    train(name, tmp_path / "cut", *options, "--resume")
    assert curves(tmp_path / "cut") == curves(tmp_path / "whole")
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")
    assert "already holds a run: add --resume" in train(name, tmp_path / "cut", *options)


def test_a_diverged_run_ends_with_one_line(train, tmp_path):
    said = train("char_lm", tmp_path, "--optimiser", "sgd", "--learning-rate", "1e30")
    assert said.startswith("char_lm.py: the loss is nan in step ")
    assert "has diverged" in said  # bench/table.py looks for it


@pytest.mark.full
@pytest.mark.parametrize("model", ["vgg", "resnet20", "resnet18"])
@pytest.mark.parametrize("squares", ["samples", "auto", "2", "batch"])
def test_every_network_takes_every_kind_of_squares(model, squares, data):
    args = f"--data {data} --model {model} --width 8 --workers 2 --batch 4 --squares {squares}".split()
    args = cifar10.parse_options(args)
    task = cifar10.make_task(args, load_cifar10(args.data))
    step, state = training.make_step(task, args, mesh_of(2))
    prepare = training.prepare_on_workers(task.prepare, mesh_of(2))
    [batch] = training.place_batches([next(task.batches(0))], mesh_of(2))
    _, metrics = jax.eval_shape(step, state, prepare(jax.random.key(0), batch))
    assert metrics.loss.shape == (2,)


class Payload:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Payload()), "it names posix.system"),
        (b"<html>not found</html>", r"data_batch_1' \("),
        (None, "No such file"),
    ],
)
def test_a_bad_file_of_cifar10_runs_no_code_and_is_named(content, said, tmp_path):
    if content is not None:
        (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(Problem, match=f"{said}.*fetch the python version of CIFAR-10 from https"):
        load_cifar10(tmp_path)


def test_an_unreadable_image_is_named(train, data, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "ant").mkdir(parents=True)
        for i in range(16):
            (tmp_path / part / "ant" / f"{i}.jpg").write_bytes(b"not an image")
    said = train("imagenet", tmp_path / "out", "--data", tmp_path)
    assert said.startswith("imagenet.py: --data: '")
    assert "is not an image that can be read (" in said
