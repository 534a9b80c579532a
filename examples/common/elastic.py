"""Training that goes on with fewer hosts when some are lost, and takes them back when they return.

JAX's runtime cannot change its number of processes. So each host has a launcher that trains in a child process. When
the hosts change, all launchers start their children again from the last checkpoint, which `gcjax.resize` fits to the
new number of workers.

The launchers agree through files in the folder of the checkpoints, which all hosts share. Each of them beats: it writes
a file anew, again and again. A host whose file has not changed for `--heartbeat` seconds, by the reader's own clock, is
lost. A plan says which hosts train together. Each plan has a number, and only one can be written under a number,
whoever tries.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from common.cli import Stopped
from common.supervise import NAME, Ended, explain, print_error, watch

POLL = 0.25  # seconds between two looks at the files, and between two beats
RECENT = 2.0  # seconds; a host that has beaten within them is there
SAVE = 30.0  # seconds for a checkpoint before a host joins
TRIES = 3  # starts in a row that may fail before their first step
PROGRESS = struct.Struct("qq")  # the first and the last finished step of a child


class Plan(NamedTuple):
    """Who trains together.

    Attributes:
      number: of the plan, from 1.
      hosts: their addresses; the first one has process 0. None are left when training is complete.
    """

    number: int
    hosts: list[str]

    def coordinator(self) -> str:
        """Where process 0 listens: plans take turns at two ports, so that no process meets the last plan's."""
        host, _, port = self.hosts[0].rpartition(":")
        return f"{host}:{int(port) + self.number % 2}"


class Host(NamedTuple):
    """What is known of another host.

    Attributes:
      said: content of its last beat.
      beaten: when this was seen, by this host's clock; None: it has not changed since the first look.
    """

    said: dict[str, Any]
    beaten: float | None


class Step(NamedTuple):
    """The last step that finished, and when this was seen."""

    plan: int
    number: int
    seen: float


def next_hosts(
    plan: Plan | None, hosts: dict[str, Host], now: float, begin: float, silence: float, failed: float | None
) -> list[str] | None:
    """The hosts of the next plan, or None if this one stays.

    Args:
      plan: the present one, or None before the first.
      hosts: all that have beaten.
      now: the time.
      begin: when the looking began. Before `silence` seconds have passed, no host counts as lost.
      silence: seconds without a beat after which a host is lost.
      failed: when a process of the plan was seen to have failed, or None.
    """
    present = sorted(name for name, host in hosts.items() if host.beaten is not None and now - host.beaten < RECENT)
    if plan is None:
        return present
    lost = {name for name in plan.hosts if name not in hosts or now - (hosts[name].beaten or begin) > silence}
    if set(plan.hosts) - lost - set(present):
        return None  # of these it is not known yet
    under_way = any(host.said["plan"] == plan.number and host.said["step"] for host in hosts.values())
    joins = under_way and set(present) - set(plan.hosts)
    fails = failed is not None and now - failed > RECENT
    return present if (lost or joins or fails) and present else None


class Launcher:
    """Trains on this host in child processes, one after the other, as the plans say."""

    def __init__(self, args: argparse.Namespace, command: list[str]):
        """Make the shared folders.

        Args:
          args: the options of the script. `args.elastic` is the address of this host.
          command: of a child, without what the plan decides.
        """
        self.args, self.command, self.own = args, command, args.elastic
        self.beats, self.plans = args.out / "elastic" / "hosts", args.out / "elastic" / "plans"
        for folder in (self.beats, self.plans):
            folder.mkdir(parents=True, exist_ok=True)
        self.begin, self.count, self.told_to_end = time.monotonic(), 0, False
        self.hosts: dict[str, Host] = {}
        self.plan = self.newest_plan()
        self.failed = self.plan.number if self.plan else 0  # the plan whose child has ended: none is here yet
        self.failure: tuple[int, float] | None = None  # the last plan seen to have failed, and when
        self.child: Child | None = None
        self.ending: float | None = None  # when the child, which has been told to save and end, is killed
        self.fruitless = 0
        self.last, self.before = Step(0, 0, self.begin), Step(0, 0, self.begin)  # in this plan, in earlier ones
        self.told_of = 0  # the last plan whose first step was told

    def run(self) -> int:
        """Train until training is complete. Returns the exit status."""
        if self.plan and not self.plan.hosts:
            print_error(f"training in {str(self.args.out)!r} is complete: choose another --out")
            return 2
        signal.signal(signal.SIGTERM, self._terminate)
        try:
            while True:
                self.beat()
                self.look()
                status = self.follow()
                if status is not None:
                    return status
                if not self.told_to_end:
                    self.propose_if_due()
                time.sleep(POLL)
        except KeyboardInterrupt:
            return 130
        finally:
            if self.child:
                self.child.end()
            (self.beats / self.own).unlink(missing_ok=True)  # so that the others need not wait

    def _terminate(self, *_: object) -> None:
        self.told_to_end, self.ending = True, time.monotonic() + SAVE
        if self.child:
            self.child.process.send_signal(signal.SIGTERM)

    def beat(self) -> None:
        """Say that this host is there, and how far it is."""
        self.count += 1
        steps = self.child.steps() if self.child else None
        said = {"count": self.count, "launcher": os.getpid(), "failed": self.failed}
        said |= {"plan": self.plan.number if self.plan else 0, "step": steps[1] if steps else 0}
        new = self.beats / f".{self.own}"
        new.write_text(json.dumps(said))
        new.replace(self.beats / self.own)

    def look(self) -> None:
        """Note which beats have changed, and how far training is."""
        now, found = time.monotonic(), {}
        for path in self.beats.glob("[!.]*"):
            with contextlib.suppress(OSError):  # it was just replaced: of a network file system also ESTALE
                said, known = json.loads(path.read_text()), self.hosts.get(path.name)
                beaten = None if known is None else known.beaten if said == known.said else now
                found[path.name] = Host(said, now if path.name == self.own else beaten)
                if (said["plan"], said["step"]) > self.last[:2] and said["step"]:
                    if said["plan"] > self.last.plan:
                        self.before = self.last
                    self.last = Step(said["plan"], said["step"], now)
                if self.plan and said["failed"] == self.plan.number and (self.failure or (0,))[0] < said["failed"]:
                    self.failure = self.plan.number, now
        self.hosts = found

    def newest_plan(self) -> Plan | None:
        paths = sorted(self.plans.glob("*.json"))
        return Plan(int(paths[-1].stem), json.loads(paths[-1].read_text())) if paths else None

    def propose(self, hosts: list[str]) -> None:
        """Write the next plan, unless another host was faster."""
        number = self.plan.number + 1 if self.plan else 1
        new = self.plans / f".{self.own}"
        new.write_text(json.dumps(hosts))
        with contextlib.suppress(FileExistsError):
            os.link(new, self.plans / f"{number:06d}.json")
        new.unlink()

    def propose_if_due(self) -> None:
        """Propose a plan if one is due, and it is for this host to do so."""
        now = time.monotonic()
        failed = self.failure[1] if self.plan and self.failure and self.failure[0] == self.plan.number else None
        hosts = next_hosts(self.plan, self.hosts, now, self.begin, self.args.heartbeat, failed)
        if hosts is None:
            return
        if self.plan is None and len(hosts) < (self.args.processes or 1) and now - self.begin < self.args.wait:
            return
        speakers = [host for host in hosts if self.plan is None or host in self.plan.hosts] or hosts
        if speakers[0] == self.own:
            self.propose(hosts)

    def follow(self) -> int | None:
        """Do what the newest plan says. Returns the exit status once there is nothing more to do."""
        plan = self.newest_plan()
        if plan and (self.plan is None or plan.number > self.plan.number):
            if self.child and self.ending is None:
                grows = plan.hosts and set(plan.hosts) > set(self.plan.hosts)
                self.ending = time.monotonic() + (SAVE if grows or not plan.hosts else 0)
                if grows:
                    self.child.process.send_signal(signal.SIGTERM)  # all processes save after the same step
            if self.child and not self.child.ended.qsize() and time.monotonic() < self.ending:
                return None
            if self.child:
                self.child.end()
            old, self.plan, self.child, self.ending = self.plan, plan, None, None
            if not plan.hosts:
                return 0
            self.tell_plan(old)
            if self.own in plan.hosts and not self.told_to_end:
                self.child = Child(self.command, plan, plan.hosts.index(self.own), self.args)
        if self.child is None:
            return Stopped.status if self.told_to_end else None
        if self.child.ended.qsize():
            return self.child_has_ended()
        if self.told_to_end and time.monotonic() > self.ending:
            return Stopped.status
        self.tell_first_step()
        return None

    def child_has_ended(self) -> int | None:
        """Note how the child has ended. Returns the exit status of this process if it is of no use to go on."""
        last, steps = self.child.ended.get(), self.child.steps()
        self.child.end()
        self.child, self.failed = None, self.plan.number
        if last.status == 0:
            self.propose([])
            return 0
        if self.told_to_end or last.status == 130:
            return Stopped.status
        if last.status == Stopped.status:
            return None
        if "lost another process" not in last.errors:
            sys.stderr.write(last.errors)
        self.fruitless = 0 if steps else self.fruitless + 1
        if self.fruitless < TRIES:
            return None
        if not last.explained:
            explain(last, self.args)
        print_error(f"{TRIES} starts in a row failed before their first step, so this host gives up")
        return 1

    def tell_plan(self, old: Plan | None) -> None:
        here = ", ".join(self.plan.hosts)
        if old is None:
            tell(f"plan {self.plan.number}: to train together: {here}")
            return
        lost, new = sorted(set(old.hosts) - set(self.plan.hosts)), sorted(set(self.plan.hosts) - set(old.hosts))
        why = [f"{', '.join(lost)} is lost"] if lost else []
        why += [f"{', '.join(new)} joins"] if new else []
        why = " and ".join(why) or "a training process has ended"
        tell(f"plan {self.plan.number}: {why}; to go on from the last checkpoint: {here}")

    def tell_first_step(self) -> None:
        """Say what the change of hosts cost, once, on the first host."""
        steps = self.child.steps()
        if steps is None or self.told_of == self.plan.number or self.plan.hosts[0] != self.own:
            return
        self.told_of = self.plan.number
        before = self.before if self.last.plan == self.plan.number else self.last
        if before.number:
            begin, lost = steps[0] - 1, max(before.number - steps[0] + 1, 0)
            seconds = time.monotonic() - before.seen
            tell(
                f"plan {self.plan.number}: training goes on after step {begin}, with {lost} steps lost, "
                f"{seconds:.1f} seconds after the last step that finished before"
            )


def tell(text: str) -> None:
    print(f"\n{NAME}{text}", flush=True)  # below the progress bar


class Child:
    """A training process of a plan.

    Attributes:
      process: it.
      ended: gets one item when it has ended.
    """

    def __init__(self, command: list[str], plan: Plan, number: int, args: argparse.Namespace):
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  closed by `end`
        join = [f"--coordinator={plan.coordinator()}", f"--processes={len(plan.hosts)}", f"--process={number}"]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, *join, f"--progress={self._file.name}"], **pipes)
        self.ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=watch, args=(number, self.process, False, self.ended))
        self._watcher.start()

    def steps(self) -> tuple[int, int] | None:
        """The numbers of the first and the last finished step, or None before them."""
        content = Path(self._file.name).read_bytes()
        return PROGRESS.unpack(content) if content else None

    def end(self) -> None:
        self.process.kill()
        self._watcher.join()
        self.process.stdin.close()
        self._file.close()


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Train on this host, and on the others that are there, until training is complete. Returns the exit status."""
    try:
        return Launcher(args, command).run()
    except OSError as error:
        print_error(f"--elastic: cannot use the folder {str(args.out)!r} ({error.strerror})")
        return 2
