"""Time per step over slow links: gcjax's methods in several processes, PyTorch DDP and its hooks beside them.

Every process runs in a network namespace of its own, on a link whose rate is limited (Linux, root). The bytes come from
the links' counters. All processes begin a step at the same moment; its time ends when the last one has its update.
"""

import argparse
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import _machine
import _network_jax
import _network_links
import _network_measure
import _network_torch
from _network_measure import Task
from _network_report import plot, table
from step import find_torch
from tqdm import tqdm

LINKS = ("unlimited", "1000", "500", "100")  # Mbit/s
QUICK_ROWS = ("psum float32", "variance 1/100", "PowerSGD 2")
COLLECTIVES = (1024, 2**20, 2**24)  # bytes
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")
HERE = Path(__file__).parent
BAR = "{percentage:3.0f} %|{bar}| {elapsed}, {remaining} left{postfix}"


def main():
    args = options()
    if reason := _network_links.why_not():
        print(f"network.py: skipped, {reason}")
        return
    if args.clean:
        print(f"removed: {', '.join(_network_links.remove_leftovers()) or 'nothing was left over'}")
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    commands = {"jax": [sys.executable, str(HERE / "_network_jax.py")]}
    if set(args.rows) & set(_network_torch.ROWS) and (torch_python := find_torch(args.torch_python)):
        commands["torch"] = [torch_python, str(HERE / "_network_torch.py")]
    try:
        record = run(plan(args, commands), commands, args)
    finally:  # a signal may have stopped the removal itself; from the first one on, others are ignored
        _network_links.remove_of(os.getpid())
    text = table(record)
    print(text)
    if args.out:
        (args.out / "network.json").write_text(json.dumps(record, indent=1) + "\n")
        (args.out / "network.md").write_text(text + "\n")
        plot(record, args.out / "network.png")
        (args.out / "network.part.json").unlink()


def leave(number, frame):
    del frame
    for every in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(every, signal.SIG_IGN)  # once is enough; on the way out everything is removed
    sys.exit(128 + number)


def options() -> argparse.Namespace:
    parser = _machine.Parser(description=__doc__.splitlines()[0])
    rows = (*_network_jax.ROWS, *_network_torch.ROWS)
    sizes, mallocs = ("10M", "25M", "transformer"), ("keep", "default")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], metavar="P", help="(default 2 4)")
    parser.add_argument("--parameters", nargs="+", default=sizes, metavar="N", help=f"(default {' '.join(sizes)})")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS, help="Mbit/s (default all)")
    parser.add_argument("--malloc", nargs="+", choices=mallocs, default=mallocs, help="settings (default both)")
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--quick", action="store_true", help="2 hosts, 1M, 100 Mbit/s, a few rows, no PyTorch")
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter that has torch (default: this one)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for results; default bench/results if all is run")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs have left behind")
    whole = vars(parser.parse_args([]))
    args = parser.parse_args()
    if all(vars(args)[name] == whole[name] for name in ("hosts", "parameters", "links", "malloc", "rows", "quick")):
        args.out = args.out or _machine.RESULTS
    if args.quick:
        args.hosts, args.parameters, args.links, args.malloc = [2], ["1M"], ["100"], ["keep"]
        args.rows = QUICK_ROWS
    if wrong := [p for p in args.parameters if p != "transformer" and not (p[:-1].isdecimal() and p[-1] == "M")]:
        parser.error(f"--parameters: write 10M for ten million, or transformer; got {wrong[0]!r}")
    if not 2 <= min(args.hosts) <= max(args.hosts) <= 200:
        parser.error(f"--hosts: must be from 2 to 200, got {' '.join(map(str, args.hosts))}")
    if args.torch_python and not os.access(args.torch_python, os.X_OK):
        parser.error(f"--torch-python: {args.torch_python} is not an interpreter that can be run")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    return args


def plan(args, commands) -> list[Task]:
    """One task for each group of processes. Collectives are timed in the first of each number of hosts."""
    links = tuple(None if link == "unlimited" else int(link) for link in LINKS if link in args.links)
    collectives = COLLECTIVES[:1] if args.quick else COLLECTIVES
    tasks = []
    every = itertools.product(args.malloc, args.parameters, args.hosts, commands)
    for malloc, parameters, hosts, side in every:
        transformer = parameters == "transformer"
        count = None if transformer else int(parameters[:-1]) * 10**6
        known = list(_network_torch.ROWS if side == "torch" else _network_jax.ROWS)
        if transformer:
            known = [] if side == "torch" else list(_network_jax.TRANSFORMER)
        rows = tuple(row for row in known if row in args.rows)
        sizes = collectives if side == "jax" and parameters == args.parameters[0] else ()
        if rows:
            tasks.append(Task(side, hosts, count, malloc, rows, links, sizes))
    return tasks


def run(tasks: list[Task], commands: dict, args) -> dict:
    """Measure all tasks. Those that an interrupted run of the same has finished are not measured again."""
    record = _machine.provenance(PACKAGES)
    record["settings"] = {
        "malloc": _machine.MALLOC,
        "rounds": _network_measure.ROUNDS,
        "warm_up": _network_measure.WARM_UP,
    }
    part = args.out / "network.part.json" if args.out else None
    same = {name: record[name] for name in ("source", "settings", "versions")}
    done: dict = {}
    if part and part.exists() and (found := json.loads(part.read_text()))["same"] == same:
        done = found["done"]
    left = [task for task in tasks if task.name not in done]
    seconds = sum(task.estimate() for task in left)
    before = f", {len(tasks) - len(left)} measured before" if len(left) < len(tasks) else ""
    print(f"{len(tasks)} groups of processes{before}; about {seconds / 60:.1f} minutes", file=sys.stderr)
    with tqdm(total=seconds, bar_format=BAR) as bar:
        for task in left:

            def tick(text, seconds, name=task.name):
                bar.set_postfix_str(f"{name}: {text}")
                bar.update(min(seconds, bar.total - bar.n))

            done[task.name] = _network_measure.measure(task, commands[task.side], tick)
            if part:
                part.write_text(json.dumps({"same": same, "done": done}))
    for task in tasks:
        record["versions"] |= done[task.name]["versions"]
    for kind in ("rows", "collectives", "alone"):
        record[kind] = [entry for task in tasks for entry in done[task.name][kind]]
    return record


if __name__ == "__main__":
    main()
