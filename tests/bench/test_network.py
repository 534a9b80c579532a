"""The network benchmark at its smallest: what it writes, that bytes agree, and that it leaves nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selection import cases

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.network"]
LIMIT = 300  # seconds
GLOO = 3 * 600  # bytes of a step that are gloo's own: 576 for an all-reduce, of which PowerSGD makes three
NAMESPACES, HOSTS_FILES = Path("/run/netns"), Path("/etc/netns")

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


from bench.network import links  # noqa: E402


@pytest.fixture(autouse=True)
def _possible_here():
    if reason := links.why_not():
        pytest.skip(reason)


@pytest.fixture
def start():
    """Starts the benchmark, and removes what it leaves, whatever happens."""
    started = []

    def start(*options):
        settings = {"env": {**os.environ, "PYTHONWARNINGS": "error"}, "cwd": ROOT, "text": True}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [*COMMAND, *map(str, options)]
        started.append(subprocess.Popen(command, start_new_session=True, **settings, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    subprocess.run([*COMMAND, "--clean"], cwd=ROOT, check=True, capture_output=True)


def traces(process):
    """Namespaces, hosts files and processes of a run."""
    folders = [folder for folder in (NAMESPACES, HOSTS_FILES) if folder.exists()]
    files = [str(entry) for folder in folders for entry in folder.glob(f"gcjax-{process.pid}-*")]
    return files + [f"process {child}" for child in children(process)]


def children(process):
    """Processes that a run has started on its hosts, by the variable that names it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"GCJAX_NETWORK={process.pid}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def wait_for(condition):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_until_it_measures(process):
    """Wait until its hosts run and have begun with the first row."""
    wait_for(lambda: len(children(process)) == 2)
    shown = ""
    while "warm-up" not in shown:
        character = process.stderr.read(1)
        assert character, shown
        shown += character


@pytest.mark.full
def test_quick_run_counts_the_reported_bytes_and_cleans_up(start, tmp_path):
    process = start("--quick", "--out", tmp_path)
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    assert traces(process) == []
    assert {path.name for path in tmp_path.iterdir()} == {"network.json", "network.md", "network.png"}
    record = json.loads((tmp_path / "network.json").read_text())
    assert {"machine", "versions", "command", "rows", "collectives", "alone"} <= record.keys()
    rows = {row["row"]: row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == len(record["alone"]) == 3
    for name, row in rows.items():
        assert f"| {name} | " in out
        assert [row[k] for k in ("hosts", "parameters", "link_mbit", "malloc", "side", "model")] == [
            *(2, 10**6, 100),
            *("keep", "jax", "matrices"),
        ]
        assert 0 < row["ms_min"] <= row["ms"]
        assert row["bytes_without_headers"] == pytest.approx(row["wire_bytes"], rel=0.05, abs=GLOO)
        assert row["bytes_received"] == pytest.approx(row["bytes_counted"], rel=0.01)
        assert row["overflow"] == 0
    assert rows["psum float32"]["wire_bytes"] == 4 * 10**6
    assert rows["psum float32"]["ms"] > 320  # at 100 Mbit/s
    assert 0.97 * 10**4 < rows["variance 1/100"]["sent"] < 10**4
    kinds = {entry["kind"] for entry in record["collectives"]}
    assert kinds == {"scalar_max", "all_reduce", "all_gather", "all_to_all"}
    for entry in record["collectives"]:
        assert entry.keys() >= {"hosts", "link_mbit", "malloc", "bytes", "ms", "ms_min"}
    for entry in record["alone"]:
        assert entry.keys() >= {"hosts", "parameters", "malloc", "row", "ms", "ms_min"}


@cases("number", [signal.SIGINT, signal.SIGTERM], default=1)
def test_interrupted_run_cleans_up(number, start):
    process = start("--quick")
    wait_until_it_measures(process)
    assert len(traces(process)) == 7  # three namespaces, two hosts files, two processes
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert traces(process) == []
