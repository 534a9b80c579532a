"""bench/local.py: commands that the example accepts, runs that continue, the figures of the table."""

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
import gossip as example

from bench import local


def test_example_accepts_every_row():
    found = [example.parse_options(shlex.split(f"{options} {local.COMMON}")) for options in local.ROWS.values()]
    assert len({(*args.algorithms, args.local_steps) for args in found}) == len(local.ROWS)
    for row, args in zip(local.ROWS, found, strict=True):
        assert (len(args.algorithms), args.seeds, args.optimiser) == (1, 1, "adamw")
        if args.algorithms != ["all-reduce"]:
            assert row == f"{example.ALGORITHMS[args.algorithms[0]][0]}, {args.local_steps}"


def test_a_table_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    ran = []

    def run(row, args):
        ran.append(row)
        epochs = [{"accuracy": 50.0 + len(row), "bits": 8e6, "step": 10}, {"accuracy": 60.0, "bits": 16e6, "step": 20}]
        return {"row": row, "command": "", "settings": {}, "epochs": epochs}

    monkeypatch.setattr(local, "run", run)
    for rows in (["DiLoCo, 15"], ["SparseLoCo, 15", "DiLoCo, 15", "all-reduce, 1"]):
        monkeypatch.setattr(sys, "argv", ["local.py", "--data", "x", "--out", str(tmp_path), "--rows", *rows])
        local.main()
    assert ran == ["DiLoCo, 15", "SparseLoCo, 15", "all-reduce, 1"]
    assert len(json.loads((tmp_path / "local.json").read_text())["runs"]) == 3
    lines = [line for line in (tmp_path / "local.md").read_text().splitlines() if line.startswith("|")][2:]
    assert lines == [
        "| all-reduce, 1 | 60.00 | 63.0 | 2.00 | 100,000 |",
        "| DiLoCo, 15 | 60.00 | 60.0 | 2.00 | 100,000 |",
        "| SparseLoCo, 15 | 60.00 | 64.0 | 2.00 | 100,000 |",
    ]
    assert "SparseLoCo" in capsys.readouterr().out
