"""The demo, run as a user runs it: `python examples/digits.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def run_demo(*options):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


def test_the_demo_writes_table_plot_and_curves(tmp_path):
    out = tmp_path / "new" / "folder"
    done = run_demo("--quick", "--methods", "dense", "variance", "--epochs", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("method ") and "compression ratio" in line for line in lines) == 1
    assert sum(line.startswith("dense  ") and "+0.00" in line for line in lines) == 1
    assert sum(line.startswith("variance alpha=1.5  ") for line in lines) == 1
    assert str(out / "digits.png") in done.stdout
    assert str(out / "digits.json") in done.stdout
    assert "not speed" in lines[-1]

    picture = (out / "digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000

    record = json.loads((out / "digits.json").read_text())
    assert record.keys() == {"settings", "versions", "machine", "parameters", "seconds", "runs"}
    assert [run["method"] for run in record["runs"]] == ["dense", "variance alpha=1.5"]
    for run in record["runs"]:
        assert len(run["test_accuracy"]) == record["settings"]["epochs"] == 2
        assert len(run["loss"]) == len(run["sent"]) == len(run["wire_bytes"]) == len(run["seconds"])
    dense, variance = record["runs"]
    assert dense["sent"] == [record["parameters"]] * len(dense["sent"])
    assert dense["loss"][0] == pytest.approx(variance["loss"][0], rel=1e-5), "not the same initialisation"
    assert sum(variance["wire_bytes"]) < sum(dense["wire_bytes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers", "0"], "'0'"),
        (["--batch", "5000"], "5000"),
    ],
)
def test_a_bad_option_gives_one_line_that_names_the_value(options, named, tmp_path):
    done = run_demo(*options, "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert not done.stdout
