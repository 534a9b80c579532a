"""examples/common/options.py: methods by text, learning rates; and the commands of the documentation."""

import argparse
import importlib
import re
import shlex

import cifar10
import gossip
import jax
import jax.numpy as jnp
import multihost
import numpy as np
import pytest
from commands import ROOT
from common import options
from common.cli import Problem

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
        ("top_k(density=__import__('os'))", "must be like"),
        ("variance(alfa=2)", "no option 'alfa'; it has alpha,"),
        ("top_k(density=2)", "--method top_k: "),
    ],
)
def test_a_bad_method_is_named(text, said):
    with pytest.raises((argparse.ArgumentTypeError, Problem), match=said):
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


@pytest.mark.parametrize(("step", "rate"), [(0, 1.0), (24, 1.0), (25, 0.5), (49, 0.5), (299, 2.0**-11)])
def test_the_paper_halves_every_25_of_300_epochs(step, rate):
    assert float(options.learning_rate("halve", 1.0, 300 * 7, 300)(7 * step)) == pytest.approx(rate)


def test_the_steps_schedule_warms_up():
    rate = options.learning_rate("steps", 0.2, 90 * 10, 90, warmup_epochs=5)
    found = [float(rate(step)) for step in (0, 24, 49, 50, 299, 301, 599, 601, 799, 801, 899)]
    truth = [0.2 / 50, 0.1, 0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002]
    np.testing.assert_allclose(found, truth, rtol=1e-5)


def documented_commands():
    """Script and options of every example's command in the documentation and in the examples themselves."""
    pages = [*ROOT.glob("examples/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"]
    texts = [path.read_text() for path in pages]
    return sorted({match for text in texts for match in re.findall(r"python examples/(\w+)\.py([^`#|\n]*)", text)})


@pytest.mark.parametrize(("script", "text"), documented_commands())
def test_every_documented_command_is_accepted(script, text, capsys):
    example = importlib.import_module(script)
    if "--help" in text:
        with pytest.raises(SystemExit, match="0"):
            example.parse_options(["--help"])
        assert capsys.readouterr().out
    else:
        example.parse_options(shlex.split(text))


@pytest.mark.parametrize(
    ("example", "text", "said"),
    [
        (cifar10, "--data x --batch 0", "--batch: must be a whole number above 0, got '0'"),
        (cifar10, "--data x --weight-decay -1", "--weight-decay: must be a number of 0 or above, got '-1'"),
        (gossip, "--workers 1", "--workers: must be at least 2, a single worker sends nothing; got 1"),
        (multihost, "--processes 2", "--coordinator, --processes and --process go together"),
    ],
)
def test_a_bad_option_is_one_line(example, text, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.parse_options(text.split())
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
