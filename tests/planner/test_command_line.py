"""`python -m gcjax plan`."""

import json
import os
import subprocess
import sys

import pytest

import gcjax
from gcjax.__main__ import main
from gcjax._planner import costs
from gcjax._planner.costs import device_name
from gcjax._planner.measuring import standard_methods

STANDARD = standard_methods(0.01)
COSTS = {name: gcjax.Cost(1e-3, 1e-9, 1e-9) for name in STANDARD}
ARGUMENTS = ["plan", "--params=25.6M", "--workers=16", "--link=1Gbit", "--step-time=0.3s"]
METHODS = ["--methods", "top_k", "ef_sign"]


def test_command_prints_the_table_and_draws_the_plot(tmp_path):
    folder = tmp_path / "gcjax"
    folder.mkdir()
    (folder / "costs.json").write_text(json.dumps({device_name(): COSTS}))
    plot = tmp_path / "plan.png"
    command = [sys.executable, "-m", "gcjax", *ARGUMENTS, *METHODS, f"--plot={plot}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{gcjax.plan('25.6M', 16, '1Gbit', 0.3, methods=['top_k', 'ef_sign'], costs=COSTS)}\n"
    assert plot.stat().st_size > 10_000


def test_command_measures_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(costs, "measure", lambda method: measured.append(method) or gcjax.Cost(0.0, 1e-9, 0.0))
    hosts = ["--inner-workers=8", "--inner-link=300Gbit", "--latency=20us", "--density=0.002"]
    assert main([*ARGUMENTS, *METHODS, *hosts, "--measure"]) == 0
    assert len(measured) == len(STANDARD)
    out, err = capsys.readouterr()
    assert "16 workers in 2 hosts of 8" in out
    assert "top_k 1/500" in out
    assert err.startswith(f"measuring 1 of {len(STANDARD)} on this device, once: dense float32\n")


@pytest.mark.parametrize(
    ("bad", "says"), [("--link=fast", "link must be a speed"), ("--density=1/0", "--density must be a share")]
)
def test_command_refuses_bad_values(bad, says, capsys):
    assert main([*ARGUMENTS, *METHODS, bad]) == 2
    assert says in capsys.readouterr().err


def test_command_needs_its_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["plan"])
    assert main([]) == 0
    assert "predict the time of a training step" in capsys.readouterr().out


def test_missing_matplotlib_is_reported_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*ARGUMENTS, "--plot=plan.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
