"""What `bench.accelerators` reads from compiled programs, what it compares, and what it says without a compiler."""

import json
import subprocess
import sys

import pytest

from bench import machine, provenance
from bench.accelerators import __main__ as cli
from bench.accelerators import environments, hlo

TEXT = """HloModule step, is_scheduled=true

%body.1 (arg: (s32[], f32[64])) -> (s32[], f32[64]) {
  %arg = (s32[], f32[64]{0}) parameter(0)
  %fusion.1 = f32[64]{0} fusion(%arg), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
}

%cheap (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %copy = f32[64]{0} copy(%x), backend_config={"estimated_cycles":"5"}
}

%costly (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %sort = f32[64]{0} sort(%x), to_apply=%less, backend_config={"estimated_cycles":"700"}
}

ENTRY %main (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  %while.1 = (s32[], f32[64]{0}) while(%p), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  %ag = (u32[8]{0}, u32[64]{0}) all-gather-start(%p), dimensions={0}, backend_config={"estimated_cycles":"100"}
  %done = u32[64]{0} all-gather-done(%ag)
  %sums = (f32[40]{0}, /*index=1*/f32[24]{0}) all-reduce(%p, %p), to_apply=%add
  %swap = ((u32[8,2]{1,0}), u32[8,2]{1,0}) all-to-all-start(%p), dimensions={0}
  ROOT %r = f32[64]{0} conditional(%i, %p, %p), branch_computations={%cheap, %costly}
}
"""


def test_cycles_follow_loops_and_branches():
    program = hlo.parse(TEXT)
    assert hlo.cycles(program, most_costly=False) == 3 * 10 + 100 + 5
    assert hlo.cycles(program, most_costly=True) == 3 * 10 + 100 + 700


def test_counts():
    found = hlo.counts(hlo.parse(TEXT), large=64)
    assert found["collectives"] == 3  # the second half of an asynchronous one is not another
    assert found["collective_bytes"] == 4 * 64 + 4 * (40 + 24) + 4 * 16  # operands do not count
    assert found["large_all_reduces"] == 1  # of both arrays together
    assert (found["sorts"], found["conditionals"], found["loops"], found["large_loops"]) == (1, 1, 1, 1)
    assert hlo.counts(hlo.parse(TEXT), large=66)["large_all_reduces"] == 0


def record(*runs):
    return {
        "machine": {"cpu": "x", "architecture": "y", "cores": 2, "memory_gb": 1},
        "versions": {},
        "commit": "0",
        "source": "1",
        "command": "c",
        "skipped": [],
        "runs": [{"target": "tpu", "model": "m"} | run for run in runs],
    }


def test_rows_are_compared_with_plain_training_and_the_pass_of_their_own_model():
    runs = [
        {"method": cli.PASS, "compile_cpu_s": 1.0, "temporaries_mb": 0.0, "cycles": 100},
        {"method": cli.PLAIN, "compile_cpu_s": 2.0, "temporaries_mb": 4.0, "cycles": 1000},
        {"method": "dense", "compile_cpu_s": 5.0, "temporaries_mb": 6.0, "cycles": 1250, "unknown_loops": 1},
        {"method": "dense", "model": "other", "compile_cpu_s": 5.0, "temporaries_mb": 6.0, "cycles": 1250},
        {"method": "dense", "target": "gpu", "compile_cpu_s": 5.0, "temporaries_mb": 6.0},
    ]
    compared = cli.ratios(record(*runs)["runs"])
    added = [{key: run[key] for key in run.keys() - old.keys()} for run, old in zip(compared, runs, strict=True)]
    names = {"target", "model"}
    assert [{key: x for key, x in new.items() if key not in names} for new in added] == [
        {},
        {"compile_ratio": 1.0, "temporaries_ratio": 1.0, "cycles_ratio": 1.0, "passes": 0.0},
        {"compile_ratio": 2.5, "temporaries_ratio": 1.5, "cycles_ratio": 1.25, "passes": 2.5},
        {},
        {},
    ]
    lines = cli.table(record(*runs)).splitlines()
    assert "| tpu | m | dense | - | 5.0 | 2.5 | 6.0 | 1.5 | at least 1,250 | 1.25 | 2.5 |" in "\n".join(lines)


class Bench:
    """The bench with a compiler that needs no time."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.compiled, self.results = monkeypatch, [], folder
        monkeypatch.setattr(provenance, "RESULTS", folder)
        monkeypatch.setattr(environments, "interpreter", lambda target: "python")
        monkeypatch.setattr(cli.subprocess, "run", self.compile)
        self.fails: set = set()
        self.seconds = 1.0

    def compile(self, command, **options):
        job = json.loads(command[-1])
        self.compiled.append(job["method"])
        if job["method"] in self.fails:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nValueError: no\n")
        row = {
            "compile_s": self.seconds,
            "compile_cpu_s": 2.0,
            "temporaries_mb": 1.0,
            "cycles": 1,
            "collective_bytes": 10**6,
        }
        return subprocess.CompletedProcess(command, 0, json.dumps(row) + "\n", "")

    def run(self, *methods, repeats=1):
        self.compiled.clear()
        options = ["--targets", "tpu", "--models", "4M in 4", "--repeats", str(repeats), "--methods", *methods]
        self.monkeypatch.setattr(sys, "argv", ["x", *options])
        cli.main()
        saved = json.loads((self.results / "accelerators.json").read_text())
        return self.compiled, saved["runs"]


def test_rows_are_saved_at_once_and_not_measured_again(monkeypatch, tmp_path):
    bench = Bench(monkeypatch, tmp_path)
    bench.fails = {"onebit"}
    compiled, saved = bench.run("dense", "onebit", repeats=3)
    assert compiled == ["dense"] * 3 + ["onebit"]
    assert [(run["method"], run.get("error"), run.get("collective_mb")) for run in saved] == [
        ("dense", None, 1.0),
        ("onebit", "ValueError: no", None),
    ]
    bench.fails = set()
    bench.seconds = 100.0
    compiled, saved = bench.run("dense", "onebit", "hybrid", repeats=3)
    assert compiled == ["onebit", "hybrid"]  # what takes long is compiled once
    assert [run["method"] for run in saved] == ["dense", "onebit", "hybrid"]
    assert provenance.outdated(json.loads((tmp_path / "accelerators.json").read_text()), "accelerators") == []


def test_rows_of_other_sources_or_machines_are_measured_again(monkeypatch, tmp_path):
    bench = Bench(monkeypatch, tmp_path)
    bench.run("dense")
    described = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: described | {"cpu": "another"})
    assert bench.run("dense")[0] == ["dense"]
    assert bench.run("dense")[0] == []
    monkeypatch.setattr(provenance, "source_digest", lambda *args: "changed")
    assert bench.run("dense", "hybrid")[0] == ["dense", "hybrid"]


def test_sources_that_change_on_the_way_end_the_run(monkeypatch, tmp_path):
    bench = Bench(monkeypatch, tmp_path)
    digests = iter(["old", "old", "old", "old", "new"])
    monkeypatch.setattr(provenance, "source_digest", lambda *args: next(digests, "new"))
    with pytest.raises(SystemExit, match="sources have changed"):
        bench.run("dense", "hybrid", "onebit")
    saved = json.loads((tmp_path / "accelerators.json").read_text())["runs"]
    assert {run["source"] for run in saved} == {"old"}
