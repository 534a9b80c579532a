"""Time per step over slow links: gcjax's methods in several processes, beside PyTorch DDP and its hooks.

Every process runs in a network namespace of its own, on a link with a limited rate (Linux, root). Bytes are read from
the links' counters. All processes start a step at the same moment; its time ends when the last one has its update.
"""

import argparse
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from bench import machine, provenance
from bench.network import jax_workers, links, torch_workers
from bench.network.measure import ROUNDS, WARM_UP, Task, measure
from bench.network.report import plot, table

LINKS = ("unlimited", "1000", "500", "100")  # Mbit/s
QUICK_ROWS = ("psum float32", "variance 1/100", "PowerSGD 2")
COLLECTIVES = (1024, 2**20, 2**24)  # bytes
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PARTIAL = "network.part.json"  # what an unfinished run has measured
BAR = "{percentage:3.0f} %|{bar}| {elapsed}, {remaining} left{postfix}"


def main() -> None:
    args = options()
    if reason := links.why_not():
        print(f"bench.network: skipped, {reason}")
        return
    if args.clean:
        print(f"removed: {', '.join(links.remove_leftovers()) or 'nothing was left over'}")
        return
    for number in SIGNALS:
        signal.signal(number, leave)
    commands = {"jax": [sys.executable, "-m", "bench.network.jax_workers"]}
    if set(args.rows) & set(torch_workers.ROWS) and (torch_python := machine.find_torch(args.torch_python)):
        commands["torch"] = [torch_python, "-m", "bench.network.torch_workers"]
    try:
        record = run(make_tasks(args, list(commands)), commands, args.out)
    finally:  # in case a signal interrupted the removal itself; after the first signal the others are ignored
        links.remove_of(os.getpid())
    text = table(record)
    print(text)
    if args.out:
        provenance.save(args.out, "network", record, text)
        plot(record, args.out / "network.png")
        (args.out / PARTIAL).unlink()


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal: ignore further ones and exit, so that everything is removed on the way out."""
    del frame
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def options() -> argparse.Namespace:
    parser = machine.Parser(prog="bench.network", description=__doc__.splitlines()[0])
    rows = (*(jax_workers.ROWS | jax_workers.TRAINING), *torch_workers.ROWS)
    sizes, mallocs = ("10M", "25M", "transformer"), ("keep", "default")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], metavar="P", help="(default 2 4)")
    parser.add_argument("--parameters", nargs="+", default=sizes, metavar="N", help=f"(default {' '.join(sizes)})")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS, help="Mbit/s (default all)")
    parser.add_argument("--malloc", nargs="+", choices=mallocs, default=mallocs, help="settings (default both)")
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--quick", action="store_true", help="2 hosts, 1M, 100 Mbit/s, a few rows, no PyTorch")
    parser.add_argument("--torch-python", type=machine.interpreter, metavar="PATH", help=machine.TORCH_HELP)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="of the results; default bench/results if all is run"
    )
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs have left behind")
    default = vars(parser.parse_args([]))
    args = parser.parse_args()
    if all(vars(args)[name] == default[name] for name in ("hosts", "parameters", "links", "malloc", "rows", "quick")):
        args.out = args.out or provenance.RESULTS
    if args.quick:
        args.hosts, args.parameters, args.links, args.malloc = [2], ["1M"], ["100"], ["keep"]
        args.rows = QUICK_ROWS
    if wrong := [p for p in args.parameters if p != "transformer" and not (p[:-1].isdecimal() and p[-1] == "M")]:
        parser.error(f"--parameters: write 10M for ten million, or transformer; got {wrong[0]!r}")
    if not 2 <= min(args.hosts) <= max(args.hosts) <= 200:
        parser.error(f"--hosts: must be from 2 to 200, got {' '.join(map(str, args.hosts))}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    return args


def make_tasks(args: argparse.Namespace, sides: list[str]) -> list[Task]:
    """One task for each group of processes. Collectives are timed in the first one of each number of hosts."""
    rates = tuple(None if link == "unlimited" else int(link) for link in LINKS if link in args.links)
    collectives = COLLECTIVES[:1] if args.quick else COLLECTIVES
    tasks = []
    for malloc, parameters, hosts, side in itertools.product(args.malloc, args.parameters, args.hosts, sides):
        transformer = parameters == "transformer"
        count = None if transformer else int(parameters[:-1]) * 10**6
        known = list(torch_workers.ROWS if side == "torch" else jax_workers.ROWS)
        if transformer and side == "jax":
            known = list(jax_workers.TRAINING)
        rows = tuple(row for row in known if row in args.rows)
        sizes = collectives if side == "jax" and parameters == args.parameters[0] else ()
        if rows:
            tasks.append(Task(side, hosts, count, malloc, rows, rates, sizes))
    return tasks


def run(tasks: list[Task], commands: dict[str, list[str]], out: Path | None) -> dict:
    """Measure all tasks, except those that an interrupted run with the same sources and settings has finished."""
    record = provenance.provenance("network", PACKAGES)
    record["settings"] = {"malloc": machine.MALLOC, "rounds": ROUNDS, "warm_up": WARM_UP}
    part = out / PARTIAL if out else None
    same = {name: record[name] for name in ("source", "settings", "versions")}
    same |= {"commands": commands, "cpu": record["machine"]["cpu"]}
    done: dict = {}
    if part and part.exists() and (found := json.loads(part.read_text()))["same"] == same:
        done = found["done"]
    left = [task for task in tasks if repr(task) not in done]
    seconds = sum(task.estimate() for task in left)
    before = f", {len(tasks) - len(left)} measured before" if len(left) < len(tasks) else ""
    print(f"{len(tasks)} groups of processes{before}; about {seconds / 60:.1f} minutes", file=sys.stderr)
    with tqdm(total=seconds, bar_format=BAR) as bar:
        for task in left:

            def tick(text, seconds, name=task.name):
                bar.set_postfix_str(f"{name}: {text}")
                bar.update(min(seconds, bar.total - bar.n))

            done[repr(task)] = measure(task, commands[task.side], tick)
            if part:
                part.write_text(json.dumps({"same": same, "done": done}))
    for task in tasks:
        record["versions"] |= done[repr(task)]["versions"]
    for kind in ("rows", "collectives", "alone"):
        record[kind] = [entry for task in tasks for entry in done[repr(task)][kind]]
    return record
