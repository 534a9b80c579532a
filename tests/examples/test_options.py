"""examples/common/options.py: methods by text, learning rates."""

import argparse
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, environment
from common import options
from common.cli import Problem

import gcjax


def test_every_method_can_be_chosen_by_text():
    assert options.parse_method("variance(alpha=2, threshold=0.1)") == ("variance", {"alpha": 2, "threshold": 0.1})
    for name in options.method_names():
        needs = {"strom": "threshold=1.0", "demo": "top_k=8"}.get(name, "")
        density = (
            "density=0.1" if name in ("top_k", "random_k", "gaussian_k", "sidco", "dryden", "ef21", "sketch") else ""
        )
        chosen = options.parse_method(f"{name}({needs or density})")
        tx = options.make_compressor(chosen, axis_name=None, steps=1)
        params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
        assert updates == params, name
    assert len(options.method_names()) == sum(name.endswith("_compress") for name in gcjax.__all__)


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
    state, sent = tx.init(jnp.zeros((5, 6))), []
    for i in range(5):  # each step has a row of its own
        row = jnp.zeros((5, 1)).at[i].set(1)
        updates, state = tx.update(row * jnp.ones(6), state, sum_grad_squared=row * squares)
        sent.append(int(jnp.count_nonzero(updates)))
    assert sent == [5, 4, 3, 2, 1]


def test_parsing_a_method_touches_no_device():
    # Otherwise the number of virtual devices could no longer be set.
    code = "import jax; from common.options import parse_method; parse_method('qsgd'); "
    code += "jax.config.update('jax_num_cpu_devices', 3)"
    subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT / "examples", check=True)


@pytest.mark.parametrize(("step", "rate"), [(0, 1.0), (24, 1.0), (25, 0.5), (49, 0.5), (299, 2.0**-11)])
def test_the_paper_halves_every_25_of_300_epochs(step, rate):
    assert float(options.learning_rate("halve", 1.0, 300 * 7, 300)(7 * step)) == pytest.approx(rate)


def test_the_steps_schedule_warms_up():
    rate = options.learning_rate("steps", 0.2, 90 * 10, 90, warmup_epochs=5)
    found = [float(rate(step)) for step in (0, 24, 49, 50, 299, 301, 599, 601, 799, 801, 899)]
    truth = [0.2 / 50, 0.1, 0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002]
    np.testing.assert_allclose(found, truth, rtol=1e-5)
    assert float(options.learning_rate("constant", 0.2, 100, 10)(0)) == pytest.approx(0.2)
