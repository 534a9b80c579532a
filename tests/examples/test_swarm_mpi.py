"""examples/swarm_mpi.py: real processes, one slow, one killed; and many reads and writes of their shared memory."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import swarm_mpi
from commands import LIMIT, ROOT
from common.cli import Problem

no_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs gcjax[mpi]")


def needs_mpi(test):
    return pytest.mark.full(no_mpi(test))


# Three processes. Process 0 owns a copy of 2**18 equal entries; 1 and 2 add to it, 0 and 2 read it.
HAMMER = """
import sys, time, types
import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI
import numpy as np
sys.path.insert(0, {examples!r})
from common import board as boards
how, comm = {how!r}, MPI.COMM_WORLD
size = 1 << 18
board = boards.Board(comm, np.zeros(size, np.float32))
if how == "unread":    # planted: a reader that ignores the sequence number
    board.read = lambda rank: board._get(rank, boards.HEADER, np.empty(size, np.float32))
if how == "unlocked":  # planted: a writer that does not take it
    board._swap = lambda rank, old, new: True
comm.Barrier()
reads = torn = added = 0
end = time.monotonic() + 4
while time.monotonic() < end:
    if comm.rank:
        added += board.add(0, np.ones(size, np.float32))
    if comm.rank != 1 and (copy := board.read(0)) is not None:
        reads += 1
        torn += bool(np.ptp(copy))
totals = comm.allreduce(np.array([reads, torn, added]))
comm.Barrier()
if comm.rank == 0:
    print("HAMMERED", *totals, board._get(0, boards.HEADER, np.empty(size, np.float32)).max())
board.close()
MPI.Finalize()
"""

# Process 1 never ends its write to the copy of process 0.
ORPHANED = """
import sys, time
import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI
import numpy as np
sys.path.insert(0, {examples!r})
from common import board as boards
comm = MPI.COMM_WORLD
board = boards.Board(comm, np.full(1000, 7, np.float32))
comm.Barrier()
if comm.rank == 1:
    assert board._swap(0, 0, 1)
    board._put(0, boards.HEADER, np.full(500, 9, np.float32))
time.sleep(2)
busy = board.read(0) is None and not board.add(0, np.ones(1000, np.float32))
if comm.rank == 0:
    copy = board.add_to_own(np.ones(1000, np.float32), np.full(1000, 3, np.float32), 0.5)
    again = board.add(0, np.ones(1000, np.float32))
    print("ORPHANED", busy, copy.min(), copy.max(), again, board.read(0)[0], flush=True)
board.close()
MPI.Finalize()
"""


def mpiexec(processes, program):
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    command = [launcher, "-n", str(processes), sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def hammered(how):
    """Reads, torn reads, additions, and what the copy then holds."""
    done = mpiexec(3, HAMMER.format(examples=str(ROOT / "examples"), how=how))
    line = next(line for line in done.stdout.splitlines() if line.startswith("HAMMERED"))
    return [float(word) for word in line.split()[1:]]


def example(tmp_path, *options):
    """Exit status, record and output of a run of three nodes, slowed down so that the cores are not the limit."""
    done = commands.run("swarm_mpi.py", "--out", tmp_path, "--nodes=3", "--pace=15", *options)
    result = tmp_path / "swarm_mpi.json"
    return done.returncode, json.loads(result.read_text()) if result.exists() else None, done.stdout + done.stderr


def rates(record):
    return {own["rank"]: own["steps_per_second"] for own in record["results"]}


@needs_mpi
def test_no_read_is_torn_and_no_addition_lost():
    reads, torn, added, held = hammered("as it is")
    assert reads > 50
    assert added > 50
    assert torn == 0
    assert held == added


@needs_mpi
def test_a_reader_ignoring_sequence_numbers_is_caught():
    _, torn, _, _ = hammered("unread")
    assert torn > 0


@needs_mpi
def test_a_writer_ignoring_sequence_numbers_is_caught():
    _, torn, added, held = hammered("unlocked")
    assert held < added or torn > 0


@needs_mpi
def test_a_copy_with_a_dead_writer_is_skipped_then_replaced():
    done = mpiexec(2, ORPHANED.format(examples=str(ROOT / "examples")))
    assert "ORPHANED True 4.0 4.0 True 5.0" in done.stdout, done.stdout + done.stderr


@needs_mpi
def test_a_slow_node_does_not_slow_the_others(tmp_path):
    status, even, output = example(tmp_path, "--seconds=8")
    assert status == 0, output
    status, slowed, output = example(tmp_path, "--seconds=8", "--slow=2:5")
    assert status == 0, output
    before, after = rates(even), rates(slowed)
    assert after[2] < 0.3 * before[2]
    assert min(after[0], after[1]) > 0.9 * max(before[0], before[1])
    for record in (even, slowed):
        assert record["mean_model_accuracy"] > 0.9
        assert record["consensus_distance"] < 1
        assert record["lost"] == []
    assert min(own["exchanges"] for own in even["results"]) > 20
    assert "The mean model:" in output


@needs_mpi
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_node_does_not_stop_the_others(tmp_path, victim):
    status, record, output = example(tmp_path, "--seconds=8", f"--kill={victim}:3", "--patience=2")
    assert status == 0, output
    assert record["lost"] == [victim]
    assert sorted(rates(record)) == sorted({0, 1, 2} - {victim})
    assert min(rates(record).values()) > 0.9 * 15
    assert record["mean_model_accuracy"] > 0.9
    assert f"lost: {victim}" in output


def test_without_mpi_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Problem, match=r"there is no mpi4py\. Install it: pip install"):
        swarm_mpi.launch(swarm_mpi.parse_options([f"--out={tmp_path}"]))
