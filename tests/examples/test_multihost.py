"""examples/multihost.py: what its processes compute, and what they say when something is wrong."""

import itertools
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import commands
import multihost
import numpy as np
import pytest
from commands import LIMIT
from common.cli import Problem


@pytest.fixture
def port():
    """A port that no other program gets: bound but not listening, so that JAX's coordinator can share it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def start():
    """Starts the example, and at the end kills what still runs."""
    started = []

    def start(*options):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command, variables = commands.command("multihost.py", *options), commands.environment(PYTHONWARNINGS="error")
        process = subprocess.Popen(command, env=variables, text=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def member(port, process, *options):
    """The options of one of two processes."""
    join = (f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}", "--devices-per-process=1")
    # On a busy machine a starved process may miss heartbeats. On a CPU gloo notices a death without them.
    return (*join, f"--wait={LIMIT}", f"--heartbeat={LIMIT}", *options)


def finish(process):
    """Exit status, output, errors."""
    out, errors = process.communicate(timeout=LIMIT)
    return process.returncode, out, errors


def train_on_two(start, *options):
    """The output of two processes."""
    status, out, errors = finish(start("--local=2", f"--heartbeat={LIMIT}", *options))
    assert status == 0, errors
    return out


def digest(out):
    return re.search(r"bit-equal on all processes: SHA-256 (\w+)", out)[1]


def test_two_processes_train_and_one_prints(start):
    out = train_on_two(start, "--steps=30", "--batch=16")
    assert out.count("method  processes  workers") == 1
    row = next(line.split() for line in out.splitlines() if line.startswith("variance "))
    assert row[1:4] == ["2", "2", "30"]
    assert float(row[4]) > 50  # % of ten digits
    assert digest(out)


@pytest.mark.full  # by default: the next test, and tests/training/test_several_processes.py
def test_two_processes_end_as_one_with_two_devices(start):
    options = ("--steps=30", "--batch=16")
    status, alone, errors = finish(start("--devices-per-process=2", *options))
    assert status == 0, errors
    assert digest(alone) == digest(train_on_two(start, *options))


def test_samples_do_not_depend_on_the_number_of_processes():
    def first_batches(own):
        shards, _ = multihost.load_shards(own, 2)
        return list(itertools.islice(multihost.batches(shards, own, size=8, seed=3), 3))

    for whole, *parts in zip(first_batches([0, 1]), first_batches([0]), first_batches([1]), strict=True):
        for together, *apart in zip(whole, *parts, strict=True):
            assert len(together) == 16
            np.testing.assert_array_equal(together, np.concatenate(apart))


def wait_for_steps(process):
    """Wait until process 0 shows progress, as it does once training is under way."""
    reading = threading.Timer(LIMIT, process.kill)
    reading.start()
    shown = ""
    while "loss=" not in shown:
        character = process.stdout.read(1)
        assert character, process.stderr.read()
        shown += character
    reading.cancel()
    threading.Thread(target=process.stdout.read, daemon=True).start()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.full
def test_after_a_kill_the_other_stops_and_says_so(victim, start, port):
    options = ("--method=dense", "--steps=1000000")
    processes = [start(*member(port, i, *options, *["--child"] * (i == victim))) for i in (0, 1)]
    wait_for_steps(processes[0])
    processes[victim].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    status = processes[1 - victim].wait(timeout=LIMIT)
    assert time.monotonic() - begin < 20
    errors = processes[1 - victim].stderr.read()
    assert status == 1
    assert errors.startswith("multihost.py: lost another process")
    assert "Traceback" not in errors
    assert "Check failure" not in errors


@pytest.mark.parametrize("told", ["worker", "parent"])
@pytest.mark.full
def test_after_sigterm_all_processes_save_and_training_goes_on_bit_for_bit(told, start, port, tmp_path):
    options = ("--method=top_k", "--batch=8", f"--out={tmp_path}")
    first = [start(*member(port, i, *options, "--steps=1000000", *["--child"] * (told == "worker"))) for i in (0, 1)]
    wait_for_steps(first[0])
    first[1].send_signal(signal.SIGTERM)
    said = set()
    for process in first:
        assert process.wait(timeout=LIMIT) == 128 + signal.SIGTERM
        errors = process.stderr.read()
        assert "Traceback" not in errors
        assert told == "worker" or errors.count("\n") == 1  # a parent leaves out the runtime's log
        said.add(
            re.search(r"^multihost.py: SIGTERM: ended after step (\d+), which is saved; --resume", errors, re.M)[1]
        )
    (done,) = map(int, said)  # both say the same
    options = (*options, f"--steps={done + 20}", "--devices-per-process=2")
    status, again, errors = finish(start(*options, "--resume", "--allow", "steps"))
    assert status == 0, errors
    status, whole, errors = finish(start(*options[:2], *options[3:]))
    assert status == 0, errors
    assert digest(again) == digest(whole)
    assert again.split("ms/step")[1].split()[:7] == whole.split("ms/step")[1].split()[:7]


@pytest.mark.full
def test_a_checkpoint_past_the_last_step_is_named(tmp_path):
    options = [f"--out={tmp_path}", "--method=dense", "--batch=8", "--checkpoint-every=2"]
    multihost.train(multihost.parse_options([*options, "--steps=2"]))
    fewer = multihost.parse_options([*options, "--steps=1", "--resume", "--allow", "steps"])
    with pytest.raises(Problem, match="the checkpoint is of step 2, past the end of --steps 1"):
        multihost.train(fewer)


STALLED = "no step has finished for 3 seconds, so this process ends."


def test_a_process_without_a_finished_step_ends():
    code = "from common import launch; launch.step_finished(); launch.end_when_stalled(3)"
    variables = commands.environment() | {"PYTHONPATH": str(commands.ROOT / "examples")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert STALLED in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.full
def test_if_another_process_stops_the_rest_end(start, port):
    options = ("--method=dense", "--steps=1000000", "--stall=3", "--child")
    processes = [start(*member(port, i, *options)) for i in (0, 1)]
    wait_for_steps(processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    assert processes[0].wait(timeout=LIMIT) == 1
    errors = processes[0].stderr.read()
    assert f"multihost.py: {STALLED}" in errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps=20", "--steps=21"], "process 0 has `[^`]*20[^`]*` where process 1 has `[^`]*21"),
        pytest.param(
            ["--alpha=1.5", "--alpha=1.75"],
            r"process 0 has `[^`]*<1.5\d*e\+00>[^`]*` where process 1 has `[^`]*<1.75\d*e\+00>",
            marks=pytest.mark.full,  # by default: tests/training/test_several_processes.py
        ),
    ],
)
def test_different_options_are_named_before_the_first_step(options, named, start, port):
    for process in [start(*member(port, i, options[i])) for i in (0, 1)]:
        status, out, errors = finish(process)
        words = " ".join(errors.split())
        assert status == 1
        assert words.startswith("multihost.py: the processes do not agree")
        assert re.search(named, words)
        assert "loss=" not in out


@pytest.mark.full
def test_different_numbers_of_devices_are_named(start, port):
    for process in [start(*member(port, i, f"--devices-per-process={1 + i}")) for i in (0, 1)]:
        status, _, errors = finish(process)
        assert status == 1
        assert errors.startswith("multihost.py: the processes do not agree: they have [1, 2] devices")


@pytest.mark.full
def test_without_a_coordinator_its_address_is_named(start, port):
    status, out, errors = finish(start(*member(port, 1, "--wait=1")))
    assert status == 1
    assert not out
    assert f"nobody listened at --coordinator 127.0.0.1:{port}" in " ".join(errors.split())
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_process_that_never_starts_is_missed(start, port):
    status, _, errors = finish(start(*member(port, 0, "--wait=1")))
    assert status == 1
    assert "not all 2 processes came together" in " ".join(errors.split())
    assert "Check failure" not in errors


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--child"], 2), pytest.param([], 1, marks=pytest.mark.full)],
    ids=["unwatched", "watched"],
)
def test_a_port_in_use_is_named(options, expected, start, used_port):
    process = start(*member(used_port, 0, *options))
    assert process.wait(timeout=LIMIT) == expected
    errors = process.stderr.read()
    assert f"port {used_port} of this machine is in use" in " ".join(errors.split())
    assert errors.count("\n") == 1
