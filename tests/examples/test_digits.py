"""The demo, examples/digits.py."""

import json

import pytest
from commands import run


def test_it_writes_table_plot_and_curves(tmp_path):
    out = tmp_path / "new" / "folder"
    options = ("--quick", "--methods", "dense", "variance", "--epochs", "2", "--out", out)
    done = run("digits.py", *options, many_steps=True)
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
    assert [training["method"] for training in record["runs"]] == ["dense", "variance alpha=1.5"]
    for training in record["runs"]:
        assert len(training["test_accuracy"]) == record["settings"]["epochs"] == 2
        assert len(training["loss"]) == len(training["sent"]) == len(training["wire_bytes"]) == len(training["seconds"])
    dense, variance = record["runs"]
    assert dense["sent"] == [record["parameters"]] * len(dense["sent"])
    assert dense["loss"][0] == pytest.approx(variance["loss"][0], rel=1e-5), "not the same initialisation"
    assert sum(variance["wire_bytes"]) < sum(dense["wire_bytes"])
