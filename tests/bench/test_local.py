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


@pytest.mark.parametrize("result", local.TASKS)
def test_example_accepts_every_row(result):
    source, common, *_ = local.TASKS[result]
    common = shlex.split(f"{common} --{source} x")
    found = [example.parse_options([*common, *shlex.split(options)]) for options in local.ROWS.values()]
    assert len({(*args.algorithms, args.local_steps) for args in found}) == len(local.ROWS)
    for row, args in zip(local.ROWS, found, strict=True):
        optimiser = "muon" if row.startswith("MuLoCo") else "adamw"
        assert (len(args.algorithms), args.seeds, args.optimiser) == (1, 1, optimiser)
        if args.algorithms != ["all-reduce"]:
            assert row == f"{example.ALGORITHMS[args.algorithms[0]][0]}, {args.local_steps}"


@pytest.mark.parametrize(
    ("result", "value", "shown"), [("local", 60.0, "60.00 | 60.0"), ("local-text", 1.85, "1.8500 | 1.850")]
)
def test_a_table_continues_where_it_stopped(result, value, shown, tmp_path, monkeypatch, capsys):
    ran, task = [], local.TASKS[result]

    def run(row, result, args):
        ran.append((row, result))
        epochs = [{task.figure: value, "bits": bits, "step": 10 * (1 + i)} for i, bits in enumerate((8e6, 16e6))]
        return {"row": row, "command": local.command(row, result), "settings": {}, "epochs": epochs}

    monkeypatch.setattr(local, "run", run)
    for rows in (["DiLoCo, 15"], ["SparseLoCo, 15", "DiLoCo, 15", "all-reduce, 1"]):
        options = ["--" + task.source, "x", "--out", str(tmp_path), "--rows", *rows]
        monkeypatch.setattr(sys, "argv", ["local.py", *options])
        local.main()
    assert ran == [(row, result) for row in ("DiLoCo, 15", "SparseLoCo, 15", "all-reduce, 1")]
    assert len(json.loads((tmp_path / f"{result}.json").read_text())["runs"]) == 3
    lines = [line for line in (tmp_path / f"{result}.md").read_text().splitlines() if line.startswith("|")][2:]
    assert lines == [
        f"| {row} | {shown} | 2.00 | 100,000 |" for row in ("all-reduce, 1", "DiLoCo, 15", "SparseLoCo, 15")
    ]
    assert "SparseLoCo" in capsys.readouterr().out
