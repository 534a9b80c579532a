"""Training that goes on without lost hosts: whom a plan names, and real hosts that are killed and come back."""

import json
import re
import signal
import socket
import subprocess
import threading

import commands
import multihost
import pytest
from commands import LIMIT
from common import elastic
from common.elastic import Host, Launcher, Plan, next_hosts

SILENCE, NOW = 10.0, 100.0
PLAN = Plan(4, ["a:1", "b:1"])


def host(age, step=7, plan=4):
    """A host whose last beat was seen `age` seconds ago; None: it was never seen to change."""
    return Host({"plan": plan, "step": step, "failed": 0}, None if age is None else NOW - age)


@pytest.mark.parametrize(
    ("hosts", "failed", "expected"),
    [
        ({"a:1": host(1), "b:1": host(1)}, None, None),  # all is well
        ({"a:1": host(1), "b:1": host(5)}, None, None),  # b may be late
        ({"a:1": host(1), "b:1": host(11)}, None, ["a:1"]),  # b is lost
        ({"a:1": host(1)}, None, ["a:1"]),  # b has left
        ({"a:1": host(1), "b:1": host(None)}, None, ["a:1"]),  # b has never beaten
        ({"a:1": host(1), "b:1": host(1)}, 1, None),  # a process has failed: who is still there?
        ({"a:1": host(1), "b:1": host(1)}, 3, ["a:1", "b:1"]),  # both
        ({"a:1": host(1), "b:1": host(5)}, 3, None),  # not known yet
        ({"a:1": host(1), "b:1": host(11)}, 11, ["a:1"]),
        ({"b:1": host(1), "c:1": host(1), "a:1": host(1)}, None, ["a:1", "b:1", "c:1"]),  # c joins
        ({"a:1": host(1), "b:1": host(1), "c:1": host(5)}, None, None),  # c was there once
        ({"a:1": host(1), "b:1": host(5), "c:1": host(1)}, None, None),  # c waits until it is known about b
        ({"a:1": host(1, 0), "b:1": host(1, 0), "c:1": host(1, 9, 3)}, None, None),  # and until a step has finished
        ({"a:1": host(11), "b:1": host(11), "c:1": host(1)}, None, ["c:1"]),
    ],
)
def test_the_next_plan_has_the_hosts_that_are_there(hosts, failed, expected):
    at = None if failed is None else NOW - failed
    assert next_hosts(PLAN, hosts, NOW, 0.0, SILENCE, at) == expected


def test_nobody_counts_as_lost_before_the_silence_is_over():
    hosts = {"a:1": host(1), "b:1": host(None)}
    assert next_hosts(PLAN, hosts, NOW, NOW - 5, SILENCE, None) is None
    assert next_hosts(None, hosts, NOW, NOW - 5, SILENCE, None) == ["a:1"]


@pytest.fixture
def launchers(tmp_path):
    options = [f"--out={tmp_path}", "--processes=2", "--heartbeat=5"]
    return [Launcher(multihost.parse_options([f"--elastic={own}", *options]), []) for own in ("a:1", "b:1")]


def test_two_hosts_that_propose_at_once_get_one_plan(launchers):
    first, second = launchers
    first.propose(["a:1", "b:1"])
    second.propose(["b:1"])
    plan = first.newest_plan()
    assert plan == second.newest_plan() == (1, ["a:1", "b:1"])
    assert plan.coordinator() == "a:2"
    first.plan = plan
    first.propose(["a:1"])
    assert second.newest_plan().coordinator() == "a:1"


def test_beats_are_seen_when_they_change(launchers):
    first, second = launchers
    second.beat()
    first.beat()
    first.look()
    assert first.hosts["a:1"].beaten is not None
    assert first.hosts["b:1"].beaten is None  # the file may be from another day
    second.beat()
    first.look()
    assert first.hosts["b:1"].beaten is not None
    assert not list(first.beats.glob(".*"))


def test_what_a_host_did_before_it_died_is_no_plan_for_it(launchers, tmp_path):
    launchers[0].propose(["a:1"])
    again = Launcher(launchers[0].args, [])
    again.beat()
    assert json.loads((again.beats / "a:1").read_text())["failed"] == 1
    assert again.follow() is None
    assert again.child is None


def test_a_folder_that_cannot_be_made_gives_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    args = multihost.parse_options(["--elastic=a:1", f"--out={tmp_path / 'file'}"])
    assert elastic.run(args, []) == 2
    assert "cannot use the folder" in capsys.readouterr().err


def test_a_finished_run_is_named(launchers, capsys):
    launchers[0].propose([])
    assert elastic.run(launchers[0].args, []) == 2
    assert "is complete" in capsys.readouterr().err


class RealHost:
    """A host: the launcher, whose child dies with it. Its output is read as it comes."""

    def __init__(self, number, ports, out):
        self.address = f"127.0.0.1:{ports[number]}"
        options = [f"--elastic={self.address}", f"--out={out}", "--processes=2", "--devices-per-process=1"]
        options += ["--steps=1000000", "--batch=8", "--checkpoint-every=20", "--heartbeat=5", f"--wait={LIMIT}"]
        command = commands.command("multihost.py", *options)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=commands.environment(), **pipes)

    def wait_for(self, pattern):
        """The match of the first line from here on that has the pattern."""
        limit = threading.Timer(LIMIT, self.process.kill)
        limit.start()
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if found := re.search(pattern, line):
                limit.cancel()
                return found
        raise AssertionError(f"no {pattern!r} in {''.join(lines)}")


@pytest.mark.full
def test_training_goes_on_without_a_killed_host_and_takes_it_back(tmp_path):
    """Each address is two ports, which nobody else gets: bound but not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        ports = [held.getsockname()[1] + 10 * i for i in range(2)]
    first, second = hosts = [RealHost(i, ports, tmp_path) for i in range(2)]
    try:
        first.wait_for(f"plan 1: to train together: {first.address}, {second.address}$")
        first.wait_for(r"[^0/]\d*/1000000 .*step/s, loss=")
        second.process.send_signal(signal.SIGKILL)
        first.wait_for(f"plan 2: {second.address} is lost; to go on from the last checkpoint: {first.address}$")
        assert float(first.wait_for(r"from 2 workers to 1, .* kept to (\S+) of")[1]) < 1e-6
        after, lost = map(int, first.wait_for(r"plan 2: training goes on after step (\d+), with (\d+) ").groups())
        assert after % 20 == 0
        assert lost <= 60  # two checkpoints may have been under way
        hosts.append(RealHost(1, ports, tmp_path))
        first.wait_for(f"plan 3: {second.address} joins; to go on")
        assert float(first.wait_for(r"from 1 workers to 2, .* kept to (\S+) of")[1]) < 1e-6
        again, lost = map(int, first.wait_for(r"plan 3: training goes on after step (\d+), with (\d+) ").groups())
        assert again > after
        assert lost == 0
        for process in (first.process, hosts[-1].process):
            process.send_signal(signal.SIGTERM)
        for process in (first.process, hosts[-1].process):
            process.stdout.read()
            assert process.wait(timeout=LIMIT) == 128 + signal.SIGTERM
        assert not list((tmp_path / "elastic" / "hosts").iterdir())
    finally:
        for each in hosts:
            each.process.kill()
            each.process.stdout.close()
            each.process.wait()
