"""What `bench.accelerators` reads from compiled programs, and what it says without a compiler."""

import subprocess

import pytest

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
  ROOT %r = f32[64]{0} conditional(%i, %p, %p), branch_computations={%cheap, %costly}
}
"""


def test_cycles_follow_loops_and_branches():
    program = hlo.parse(TEXT)
    assert hlo.cycles(program, most_costly=False) == 3 * 10 + 100 + 5
    assert hlo.cycles(program, most_costly=True) == 3 * 10 + 100 + 700


def test_counts():
    found = hlo.counts(hlo.parse(TEXT), large=64)
    assert found["collectives"] == 2  # the second half of an asynchronous one is not another
    assert found["collective_bytes"] == 4 * 64 + 4 * (40 + 24)
    assert found["large_all_reduces"] == 1  # of both arrays together
    assert (found["sorts"], found["conditionals"], found["loops"], found["large_loops"]) == (1, 1, 1, 1)
    assert hlo.counts(hlo.parse(TEXT), large=66)["large_all_reduces"] == 0


def test_text_without_entry_raises():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule empty")


def test_failed_installation_says_why(monkeypatch, tmp_path):
    def run(command, **options):
        return subprocess.CompletedProcess(command, int("pip" in command), "", "ERROR: no network\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (environments.folder("tpu")).mkdir(parents=True)
    monkeypatch.setattr(environments.subprocess, "run", run)
    with pytest.raises(environments.Unavailable, match="tpu compiler cannot be installed: ERROR: no network"):
        environments.interpreter("tpu")
    assert not (environments.folder("tpu") / "ready").exists()


def test_table_names_skips_and_failures():
    machine = {"cpu": "x", "architecture": "y", "cores": 2, "memory_gb": 1}
    record = {"machine": machine, "versions": {}, "commit": "0", "source": "1", "command": "c"}
    record |= {"skipped": ["no compiler"], "rows": [{"target": "tpu", "model": "m", "method": "dense", "error": "bad"}]}
    text = cli.table(record)
    assert "no compiler" in text
    assert "| tpu | m | dense | fails: bad |" in text
