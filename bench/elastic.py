"""Hosts killed at random while they train: steps and seconds lost, and what becomes of the residuals.

Each host is a network namespace with one worker (see bench.network), or without root a process of this machine. They
run `examples/multihost.py --elastic`. One after the other, ten of them are killed and started again: the training
process alone, everything on the host at once, or everything on it after its link was cut, so that the others only hear
silence.

    sudo python -m bench.elastic                           # about ten minutes
    sudo python -m bench.elastic --kills 2 --out runs/few  # a minute or two
    python -m bench.elastic --report                       # table again, from the result file
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from bench import machine, provenance
from bench.network import links

OPTIONS = "--steps 10000000 --batch 16 --checkpoint-every 50 --heartbeat 5 --wait 60 --devices-per-process 1"
KINDS = {"process": "training process", "host": "host", "link": "link, then host"}
PATIENCE = 180  # seconds
GOES_ON = r"plan {}: training goes on after step \d+, with (\d+) steps lost"


class Hosts:
    """A context: hosts that train together, and can be killed and started again."""

    def __init__(self, count: int, work: Path, network: links.Network | None):
        self.work, self.network = work, network
        self.addresses = [
            f"{links.address(i)}:9876" if network else f"127.0.0.1:{21000 + 10 * i}" for i in range(count)
        ]
        self.processes: list[subprocess.Popen | None] = [None] * count
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for host, process in enumerate(self.processes):
            if process:
                self.kill(host, "host")

    def start(self, host: int) -> None:
        inside = self.network.inside(host) if self.network else []
        if self.network:
            subprocess.run([*inside, "ip", "link", "set", links.INTERFACE, "up"], check=True)
        own = [f"--elastic={self.addresses[host]}", f"--processes={len(self.addresses)}", f"--out={self.work / 'run'}"]
        command = [*inside, sys.executable, str(machine.ROOT / "examples" / "multihost.py"), *own, *OPTIONS.split()]
        path = os.pathsep.join(filter(None, [str(machine.ROOT), os.environ.get("PYTHONPATH")]))
        variables = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}
        with open(self.work / f"{host}.log", "a") as log:
            self.processes[host] = subprocess.Popen(
                command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self, host: int, kind: str) -> None:
        """Kill a host, or its training process alone."""
        process = self.processes[host]
        if kind == "process":
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
            return
        if kind == "link":
            subprocess.run([*self.network.inside(host), "ip", "link", "set", links.INTERFACE, "down"], check=True)
            time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.processes[host] = None

    def plan(self) -> tuple[int, list[str]]:
        """Number and hosts of the newest plan."""
        newest = max((self.work / "run" / "elastic" / "plans").glob("*.json"))
        return int(newest.stem), json.loads(newest.read_text())

    def under_way(self, hosts: list[int], after: int) -> int | None:
        """The number of the plan, after another one, in which these hosts have finished a step; or None."""
        with contextlib.suppress(OSError, ValueError):
            number, members = self.plan()
            if number > after and members == sorted(self.addresses[host] for host in hosts):
                beats = self.work / "run" / "elastic" / "hosts"
                said = [json.loads((beats / member).read_text()) for member in members]
                if all(each["plan"] == number and each["step"] for each in said):
                    return number
        return None

    def wait_for(self, hosts: list[int], after: int) -> int:
        """Wait until these hosts train together, in a plan after another one, and return its number."""
        return self.wait(lambda: self.under_way(hosts, after), f"hosts {hosts} do not train after plan {after}")

    def wait(self, look: Callable[[], int | None], problem: str) -> int:
        until = time.monotonic() + PATIENCE
        while (found := look()) is None:
            if time.monotonic() > until:
                raise SystemExit(f"elastic.py: {problem}; see the logs in {self.work}")
            time.sleep(0.05)
        return found

    def cost(self, plan: int) -> dict:
        """Steps lost by the change to a plan, and the largest error of the mean residual as a share of its largest."""
        lost = self.wait(
            lambda: next((int(n) for n in re.findall(GOES_ON.format(plan), self.text())), None),
            f"nothing says what plan {plan} cost",
        )
        until_next = r"(?:(?!.*plan \d).*\n)*?"
        resized = re.findall(rf"plan {plan}: .*\n{until_next}.*is kept to (\S+) of its largest entry", self.text())
        return {"steps_lost": lost, "residual_error": float(resized[0]) if resized else None}

    def text(self) -> str:
        return "plan 0:\n".join(
            path.read_text(errors="replace").replace("\r", "\n") for path in self.work.glob("*.log")
        )

    def stop(self) -> list[int]:
        """Ask all hosts to end, and return their exit statuses."""
        for process in self.processes:
            process.terminate()
        return [process.wait(timeout=PATIENCE) for process in self.processes]


def kill_and_return(hosts: Hosts, kind: str, host: int, pause: float, plan: int) -> dict:
    """Kill a host in a plan of all, wait until the rest trains, start it again, wait until all train."""
    everyone = list(range(len(hosts.addresses)))
    rest = [other for other in everyone if other != host]
    time.sleep(pause)
    row = {"kind": kind, "host": host, "load": machine.load()}
    begin = time.monotonic()
    hosts.kill(host, kind)
    plan = hosts.wait_for(everyone if kind == "process" else rest, plan)
    row |= {"lost": {"seconds": time.monotonic() - begin} | hosts.cost(plan)}
    if kind != "process":
        time.sleep(3)
        begin = time.monotonic()
        hosts.start(host)
        plan = hosts.wait_for(everyone, plan)
        row |= {"back": {"seconds": time.monotonic() - begin} | hosts.cost(plan)}
    return row | {"plan": plan}


def table(record: dict) -> str:
    """Markdown."""
    lines = ["| killed | host | steps lost | s until the next step | residual's error | back: steps lost | s | error |"]
    lines += ["|---" * 8 + "|"]

    def cells(cost):
        error = cost["residual_error"]
        return [str(cost["steps_lost"]), f"{cost['seconds']:.1f}", "none" if error is None else f"{error:.0e}"]

    for row in record["kills"]:
        back = cells(row["back"]) if "back" in row else ["", "", ""]
        lines.append("| " + " | ".join([KINDS[row["kind"]], str(row["host"]), *cells(row["lost"]), *back]) + " |")
    slowest = max(row["lost"]["seconds"] for row in record["kills"])
    most = max(row["lost"]["steps_lost"] for row in record["kills"])
    again = max((row["back"]["steps_lost"] for row in record["kills"] if "back" in row), default=0)
    head = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        f"{record['hosts']} hosts, {record['place']}, `examples/multihost.py --elastic {OPTIONS}`; the load of the "
        f"machine was {min(r['load'] for r in record['kills'])} to {max(r['load'] for r in record['kills'])}.",
        f"Training went on after each of the {len(record['kills'])} kills. At most {most} steps and {slowest:.0f} "
        f"seconds were lost, and {again} steps when a host came back.",
    ]
    return "\n\n".join([*head, "\n".join(lines)]) + "\n"


def parse_options() -> argparse.Namespace:
    parser = machine.Parser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="number of kills")
    parser.add_argument("--hosts", type=int, default=3, help="number of hosts")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, hosts and times")
    parser.add_argument("--work", type=Path, default=Path("runs/elastic"), help="folder for checkpoints and logs")
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help="folder for elastic.json and elastic.md")
    parser.add_argument("--report", action="store_true", help="run nothing: the table from the result file")
    args = parser.parse_args()
    provenance.keep_whole(parser, args, "kills", "hosts", "seed")
    return args


def main() -> None:
    args = parse_options()
    if args.report:
        record = json.loads((args.out / "elastic.json").read_text())
        provenance.save(args.out, "elastic", record, table(record))
        print(table(record))
        return
    record = provenance.provenance("elastic", ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint"))
    why_not, draw = links.why_not(), random.Random(args.seed)
    place = f"processes of one machine ({why_not})" if why_not else "network namespaces of one machine"
    record |= {"hosts": args.hosts, "place": place, "kills": []}
    kinds = [kind for kind in KINDS if kind != "link" or not why_not]
    with contextlib.ExitStack() as stack:
        network = None if why_not else stack.enter_context(links.Network(args.hosts))
        hosts = stack.enter_context(Hosts(args.hosts, args.work.absolute(), network))
        for host in range(args.hosts):
            hosts.start(host)
        plan = hosts.wait_for(list(range(args.hosts)), 0)
        for number in tqdm(range(args.kills), unit="kill"):
            kind = kinds[number % len(kinds)]
            row = kill_and_return(hosts, kind, draw.randrange(args.hosts), draw.uniform(0, 10), plan)
            plan = row.pop("plan")
            record["kills"].append(row)
            provenance.save(args.out, "elastic", record, table(record))
        statuses = hosts.stop()
        if set(statuses) != {128 + signal.SIGTERM}:
            raise SystemExit(f"elastic.py: the hosts ended with {statuses}; see the logs in {args.work}")
    print(table(record))


if __name__ == "__main__":
    main()
