"""digits.py, multihost.py and swarm_mpi.py, run as commands."""

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import multihost
import numpy as np
import pytest
from common.checkpoints import Checkpoints


def test_digits_writes_table_plot_and_curves(tmp_path):
    out = tmp_path / "new" / "folder"
    said = commands.run("digits.py", "--quick", "--methods", "dense", "variance", "--epochs", 1, "--out", out)
    assert re.search(r"^method +test accuracy %  to dense  compression ratio  wire ratio", said, re.M)
    assert re.search(r"^dense +\d\d\.\d\d +\+0\.00 +1\.0 ", said, re.M)
    assert (out / "digits.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "digits.json").read_text())
    dense, variance = record["runs"]
    assert dense["loss"][0] == pytest.approx(variance["loss"][0], rel=1e-5), "not the same initialisation"
    assert dense["sent"] == [record["parameters"]] * len(dense["sent"])
    assert sum(variance["wire_bytes"]) < 0.5 * sum(dense["wire_bytes"])
    for run in (dense, variance):
        assert run["loss"][-1] < 0.7 * run["loss"][0]


def digest(said):
    return re.search(r"bit-equal on all processes: SHA-256 (\w+)", said)[1]


def test_two_processes_train_and_one_prints():
    said = commands.run("multihost.py", "--local=2", "--steps=30", "--batch=16")
    assert said.count("method  processes  workers") == 1
    row = next(line.split() for line in said.splitlines() if line.startswith("variance "))
    assert row[1:4] == ["2", "2", "30"]
    assert float(row[4]) > 50  # % of ten digits
    assert digest(said)


@pytest.mark.full  # by default: tests/training/test_several_processes.py
def test_two_processes_end_as_one_with_two_devices_and_go_on_from_its_checkpoint(tmp_path):
    options = ("--steps=30", "--batch=16", "--checkpoint-every=20")
    one = commands.run("multihost.py", "--devices-per-process=2", f"--out={tmp_path}", *options)
    shutil.rmtree(tmp_path / "30")
    assert digest(one) == digest(commands.run("multihost.py", "--local=2", f"--out={tmp_path}", "--resume", *options))


def test_samples_do_not_depend_on_the_number_of_processes():
    def first_batches(own):
        shards, _ = multihost.load_shards(own, 2)
        return list(itertools.islice(multihost.batches(shards, own, size=8, seed=3), 3))

    for whole, *parts in zip(first_batches([0, 1]), first_batches([0]), first_batches([1]), strict=True):
        for together, *apart in zip(whole, *parts, strict=True):
            np.testing.assert_array_equal(together, np.concatenate(apart))


def test_multihost_goes_on_bit_for_bit(tmp_path, capsys, monkeypatch):
    options = ["--steps=4", "--batch=8", "--method=top_k", "--checkpoint-every=2"]

    def train(folder, *more):
        multihost.train(multihost.parse_options([*options, f"--out={tmp_path / folder}", *more]))
        return digest(capsys.readouterr().out)

    whole, save = train("whole"), Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *rest: save(self, step, *rest) if step == 2 else None)
    train("cut")
    monkeypatch.setattr(Checkpoints, "save", save)
    assert train("cut", "--resume") == whole


# Three processes. Process 0 owns a copy of 2**18 equal entries; 1 and 2 add to it, 0 and 2 read it.
HAMMER = """
import sys, time
from mpi4py import MPI
import numpy as np
sys.path.insert(0, {examples!r})
from common.board import Board
how, comm, size = {how!r}, MPI.COMM_WORLD, 1 << 18
board = Board(comm, np.zeros(size, np.float32))
if how == "unread":    # planted: a reader that ignores the sequence number
    board.read = board._get
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
if comm.rank == 0:
    print("HAMMERED", *totals, board._get(0).max())
board.close()
"""
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs gcjax[mpi]")


@needs_mpi
@pytest.mark.full
@pytest.mark.parametrize("how", ["as it is", "unread", "unlocked"])
def test_no_read_is_torn_and_no_addition_lost(how):
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    program = HAMMER.format(examples=str(commands.ROOT / "examples"), how=how)
    command = [launcher, "-n", "3", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=commands.LIMIT, check=False)
    line = next(line for line in done.stdout.splitlines() if line.startswith("HAMMERED"))
    reads, torn, added, held = map(float, line.split()[1:])
    assert min(reads, added) > 50
    assert (torn == 0 and held == added) == (how == "as it is")


@needs_mpi
@pytest.mark.full
def test_a_slow_node_does_not_slow_the_others(tmp_path):
    said = commands.run("swarm_mpi.py", "--out", tmp_path, "--nodes=3", "--pace=15", "--seconds=8", "--slow=2:5")
    record = json.loads((tmp_path / "swarm_mpi.json").read_text())
    rates = [own["steps_per_second"] for own in record["results"]]
    assert rates[2] < 0.3 * min(rates[:2])
    assert min(rates[:2]) > 0.9 * 15
    assert record["mean_model_accuracy"] > 0.9
    assert record["consensus_distance"] < 1
    assert "The mean model:" in said
