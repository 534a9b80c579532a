"""examples/common/options.py: methods by text, learning rates; and how commands end."""

import argparse
import runpy
import subprocess
import sys
from unittest import mock

import char_lm
import cifar10
import digits
import gossip
import imagenet
import jax
import jax.numpy as jnp
import multihost
import numpy as np
import pytest
import swarm_mpi
from commands import ROOT, environment
from common import options
from common.cli import Problem, run_command

import gcjax


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_every_method_can_be_chosen_by_text():
    assert options.parse_method("variance(alpha=2, threshold=0.1)") == ("variance", {"alpha": 2, "threshold": 0.1})
    for name in options.method_names():
        needs = {"strom": "threshold=1.0", "demo": "top_k=8"}.get(name, "")
        density = "density=0.1" if name in ("top_k", "random_k", "gaussian_k", "dryden", "sketch") else ""
        chosen = options.parse_method(f"{name}({needs or density})")
        tx = options.make_compressor(chosen, axis_name=None, steps=1)
        params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
        assert updates == params, name
    assert len(options.method_names()) == len(gcjax.methods.__all__ + gcjax.contrib.__all__)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk(density=0.1)", "no method 'topk'"),
        ("top_k(0.1)", r"must be like 'top_k\(density=0.01\)'"),
        ("top_k(density=", "must be like"),
        ("__import__('os')", "must be like"),
        ("top_k(density=__import__('os'))", "must be like"),
        ("variance(alpha=b'1')", "must be like"),
        ("variance(alfa=2)", "no option 'alfa'; it has alpha,"),
        ("variance(axis_name='x')", "no option 'axis_name'"),
    ],
)
def test_a_bad_method_text_is_named(text, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        options.parse_method(text)


@pytest.mark.parametrize(
    "text",
    [
        "top_k(density=2)",
        "top_k",
        "qsgd(bits=2, key='x')",
        "qsgd(bits=2, key=4294967296)",
        "variance(alpha=(1,))",
        "variance(alpha=(0, 2))",
    ],
)
def test_options_out_of_range_are_named(text):
    with pytest.raises(Problem, match=f"--method {text.split('(')[0]}: "):
        options.make_compressor(options.parse_method(text), axis_name=None, steps=1)


def test_alpha_of_two_numbers_grows_by_the_same_factor_in_every_step():
    tx = options.make_compressor(options.parse_method("variance(alpha=(0.5, 8))"), axis_name=None, steps=4)
    squares = jnp.array([3.0, 1.5, 0.75, 0.375, 0.1875, 0.09375])  # alpha 0.5 lets 5 of them pass, 1 lets 4 pass, ...
    state, sent, update = tx.init(jnp.zeros((5, 6))), [], jax.jit(tx.update)
    for i in range(5):  # each step has a row of its own
        row = jnp.zeros((5, 1)).at[i].set(1)
        updates, state = update(row * jnp.ones(6), state, sum_grad_squared=row * squares)
        sent.append(int(jnp.count_nonzero(updates)))
    assert sent == [5, 4, 3, 2, 1]


def test_parsing_a_method_touches_no_device():
    # Otherwise the number of virtual devices could no longer be set.
    code = "import jax; from common.options import parse_method; parse_method('qsgd'); "
    code += "jax.config.update('jax_num_cpu_devices', 3)"
    subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT / "examples", check=True)


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        (char_lm, "--text x --width 10 --heads 4", "--width 10 must be a multiple of --heads 4"),
        (cifar10, "--data x --width 20", "--width 20 must be a multiple of 8"),
        (cifar10, "--data x --squares microbatches --batch 6", "cuts a batch in 4: --batch 6 must be a multiple"),
        (cifar10, "--data x --seed -1", "must be a whole number from 0 to 4294967295, got '-1'"),
        (cifar10, "--data x --allow epochs", "--allow names what may differ from a checkpoint: it needs --resume"),
        (digits, "--workers 0", "must be a whole number above 0, got '0'"),
        (digits, "--batch 5000", "--workers 8 times --batch 5000 is more than the 1437 training images"),
        (gossip, "--workers 1", "--workers: must be at least 2, a single worker sends nothing; got 1"),
        (imagenet, "--data x --processes 2", "--coordinator, --processes and --process go together"),
        (imagenet, "--data x --warmup-epochs -1", "--warmup-epochs: must be a number, 0 or above, got '-1'"),
        (imagenet, "--data x --warmup-epochs x", "--warmup-epochs: must be a number, 0 or above, got 'x'"),
        (imagenet, "--data x --size 0", "--size: must be a whole number above 0, got '0'"),
        (multihost, "--coordinator nowhere --processes 2 --process 0", "must be HOST:PORT, got 'nowhere'"),
        (multihost, "--coordinator a:1 --processes 2 --process 2", "--process must be from 0 to 1, --processes less"),
        (swarm_mpi, "--nodes=0", "argument --nodes: must be a whole number above 0, got '0'"),
        (swarm_mpi, "--nodes=3 --slow=3:5", "argument --slow: nodes are 0 to 2, got 3"),
        (swarm_mpi, "--nodes=3 --kill=1", "must be NODE:NUMBER, such as 3:5, got '1'"),
        (swarm_mpi, "--hostfile=nowhere", "no such file: 'nowhere'"),
    ],
)
def test_bad_options_are_one_line(example, options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.parse_options(options.split())
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--batch 500", "--workers 8 times --batch 500 is more than the 1437 training samples"),
        ("--data /nowhere", "no CIFAR-10 in '/nowhere'"),
        ("--text /nowhere", "cannot read '/nowhere'"),
    ],
)
def test_data_that_do_not_fit_are_one_line(options, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gossip.py", *options.split()])
    assert run_command(gossip.main) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize("name", ["char_lm.py", "cifar10.py", "digits.py", "gossip.py", "swarm_mpi.py"])
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Problem("no data"), 2, "no data"),
        (IsADirectoryError(21, "Is a directory", "out/curves.png"), 1, "[Errno 21] Is a directory: 'out/curves.png'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_command_is_one_line(name, error, status, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert ended.value.code == status
    assert capsys.readouterr().err == f"{name}: {said}\n"


@pytest.mark.parametrize(("step", "rate"), [(0, 1.0), (24, 1.0), (25, 0.5), (49, 0.5), (299, 2.0**-11)])
def test_the_paper_halves_every_25_of_300_epochs(step, rate):
    assert float(options.learning_rate("halve", 1.0, 300 * 7, 300)(7 * step)) == pytest.approx(rate)


def test_the_steps_schedule_warms_up():
    rate = options.learning_rate("steps", 0.2, 90 * 10, 90, warmup_epochs=5)
    found = [float(rate(step)) for step in (0, 24, 49, 50, 299, 301, 599, 601, 799, 801, 899)]
    truth = [0.2 / 50, 0.1, 0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002]
    np.testing.assert_allclose(found, truth, rtol=1e-5)
    assert float(options.learning_rate("constant", 0.2, 100, 10)(0)) == pytest.approx(0.2)
