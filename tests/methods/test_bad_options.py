"""Bad options raise when a transform is made, with the value and the cure in the message."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gcjax
from gcjax._table import METHODS

KEY = jax.random.key(0)
NAN = float("nan")
NEEDED = {  # arguments without a default
    "dgc": {"density": 0.1},
    "drop": {"density": 0.1},
    "dryden": {"density": 0.1},
    "gaussian_k": {"density": 0.1},
    "random_k": {"density": 0.1, "key": KEY},
    "sketch": {"density": 0.1, "key": KEY},
    "top_k": {"density": 0.1},
    "strom": {"threshold": 0.1},
    **{name: {"key": KEY} for name in ("natural", "power_sgd", "qsgd", "terngrad")},
}
NO_DENSITY = r"density must be in \(0, 1\], got "
NO_KEY = r"key must be a key made by jax.random.key\(seed\), got 0"
NO_TRANSPORT = "transport must be one of 'all_gather', 'two_phase', 'auto', got 'ring'"

CASES = [
    *((name, {"density": 0.0}, ValueError, NO_DENSITY + "0.0") for name in NEEDED if "density" in NEEDED[name]),
    *((name, {"key": 0}, TypeError, NO_KEY) for name in NEEDED if "key" in NEEDED[name]),
    *(
        (name, {"transport": "ring"}, ValueError, NO_TRANSPORT)
        for name in ("dense", "variance", "strom", "top_k", "dgc", "drop", "qsgd", "natural", "ef_sign")
    ),
    ("demo", {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ("demo", {"top_k": 0.01}, TypeError, "top_k must be an int, got 0.01"),
    ("demo", {"chunk": 0}, ValueError, "chunk must be from 1 to 256, got 0"),
    ("demo", {"decay": 1.001}, ValueError, r"decay must be in \[0, 1\], got 1.001"),
    ("dense", {"dtype": "int8"}, ValueError, "'float32', 'bfloat16', 'float16', got 'int8'"),
    ("dense", {"transport": "two_phase"}, ValueError, "transport='two_phase' needs a dtype of 16 bits"),
    ("dgc", {"density": "1 %"}, TypeError, "density must be a number, got '1 %'"),
    ("dgc", {"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1"),
    ("dgc", {"warmup_steps": 2.5}, TypeError, "warmup_steps must be an int, got 2.5"),
    ("dgc", {"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    ("drop", {"layer_wise": 1}, TypeError, "layer_wise must be True or False, got 1"),
    ("dryden", {"capacity": 0}, ValueError, "at least 1 slot, got 0"),
    ("gaussian_k", {"capacity": "big"}, TypeError, r"capacity must be an int, .*'big'"),
    ("power_sgd", {"rank": 0}, ValueError, "rank must be at least 1, got 0"),
    ("power_sgd", {"rank": 1.5}, TypeError, "rank must be an int, got 1.5"),
    ("qsgd", {"bits": 1}, ValueError, "bits must be from 2 to 8, got 1"),
    ("qsgd", {"bits": 9}, ValueError, "bits must be from 2 to 8, got 9"),
    ("qsgd", {"bits": 4.0}, TypeError, "bits must be an int, got 4.0"),
    ("qsgd", {"bucket_size": 100}, ValueError, "bucket_size must be at least 32 and a multiple of 32, got 100"),
    ("random_k", {"block": 0}, ValueError, "block must be at least 1, got 0"),
    ("random_k", {"feedback": 1}, TypeError, "feedback must be True or False, got 1"),
    ("signum", {"momentum": NAN}, ValueError, r"momentum must be in \[0, 1\), got nan"),
    ("sketch", {"rows": 0}, ValueError, "rows must be at least 1, got 0"),
    ("sketch", {"rows": 4}, ValueError, "rows must be odd.*got 4"),
    ("sketch", {"columns": 0}, ValueError, "columns must be at least 1, got 0"),
    ("sketch", {"momentum": -0.1}, ValueError, r"momentum must be in \[0, 1\), got -0.1"),
    ("sparse_loco", {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ("sparse_loco", {"chunk": 257}, ValueError, "chunk must be from 1 to 256, got 257"),
    ("sparse_loco", {"decay": 1.001}, ValueError, r"decay must be in \[0, 1\], got 1.001"),
    ("sparse_loco", {"bits": 5}, ValueError, "bits must be from 2 to 4, got 5"),
    ("sparse_loco", {"average": "all"}, ValueError, "average must be one of.*'all'"),
    ("strom", {"threshold": NAN}, ValueError, r"threshold must be in \(0, inf\), got nan"),
    ("terngrad", {"clip": 0.0}, ValueError, r"clip must be in \(0, inf\), got 0.0"),
    ("terngrad", {"aggregate": "mean"}, ValueError, "'sum', 'gather', got 'mean'"),
    ("terngrad", {"aggregate": "gather", "transport": "ring"}, ValueError, NO_TRANSPORT),
    ("terngrad", {"transport": "two_phase"}, ValueError, "'two_phase' needs aggregate='gather'"),
    ("top_k", {"density": NAN}, ValueError, NO_DENSITY + "nan"),
    ("variance", {"alpha": 0.0}, ValueError, r"alpha must be in \(0, inf\), got 0.0"),
    ("variance", {"alpha": float("inf")}, ValueError, "alpha.*inf"),
    ("variance", {"alpha": optax.linear_schedule(0.0, 2.0, 100)}, ValueError, r"alpha\(0\) must be in .*0"),
    ("variance", {"alpha": "big"}, TypeError, "alpha must be a number, got 'big'"),
    ("variance", {"decay": 0.0}, ValueError, r"decay must be in \(0, 1\], got 0.0"),
    ("variance", {"threshold": 0.0}, ValueError, "threshold.*0.0"),
    ("variance", {"threshold": 0.1, "underflow": "drop"}, ValueError, "underflow='drop'"),
    ("variance", {"underflow": "lose"}, ValueError, "'keep', 'drop', got 'lose'"),
    ("variance", {"capacity": 1}, ValueError, "capacity=1 is a single slot; give 1.0"),
    ("variance", {"capacity": 2.5}, ValueError, r"capacity must be in \(0, 1\] as a share .*2.5"),
    ("variance", {"capacity": ()}, ValueError, "at least one size"),
    ("variance", {"wire": "x"}, ValueError, "wire must be one of 'compact', 'word', got 'x'"),
    ("variance", {"axis_name": 3}, TypeError, "axis_name must be a string.*3"),
    ("variance", {"axis_name": "a", "inner_axis_name": "a"}, ValueError, "must differ.*'a'"),
    ("variance", {"aplha": 1.5}, TypeError, "aplha"),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), CASES)
def test_bad_options_raise(name, options, error, message):
    with pytest.raises(error, match=message):
        METHODS[name].factory(**NEEDED.get(name, {}) | options)


def test_a_wire_for_values_that_do_not_fit_raises():
    with pytest.raises(ValueError, match="wire='word' has 4 bits for a value, of which 32 are to be sent"):
        gcjax.extend.check_wire("word", 32)


@pytest.mark.parametrize("name", [name for name in NEEDED if "density" in NEEDED[name]])
def test_a_traced_density_is_named_with_the_cure(name):
    make = functools.partial(METHODS[name].factory, **{"key": KEY} if "key" in NEEDED[name] else {})
    cure = "give a Python float" if name == "dgc" else ".* with static_args='density'"
    with pytest.raises(TypeError, match=rf"density .*cannot be traced.*{cure}"):
        jax.jit(lambda density: make(density=density).init(jnp.zeros(8)))(0.5)
    tx = make(density=np.float32(0.5))  # a scalar whose value is known
    assert np.isfinite(jax.jit(tx.update)(jnp.arange(8.0), tx.init(jnp.zeros(8)))[0]).all()
