"""Training that rarely communicates: the mean model's accuracy or loss against bytes, with 8 workers.

On CIFAR-10, or on a text with the network and steps of bench.char_lm; with AdamW, and Muon for MuLoCo. Each run is one
call of examples/gossip.py, one after the other. Finished runs are kept in the result file, so an interrupted table
continues where it stopped. The all-reduce is of the models, after every step.

    python -m bench.local --data DIR                                # CIFAR-10, all rows, 2 to 3 minutes each
    python -m bench.local --text FILE                               # the language model, into local-text.json
    python -m bench.local --data DIR --rows "DiLoCo, 30" "SparseLoCo, 30"
    python -m bench.local --report                                  # tables again, from the result files
"""

import argparse
import json
import shlex
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from bench import machine, programs, provenance, runs


class Task(NamedTuple):
    """What is trained.

    Attributes:
      source: the option that names the data.
      common: options of every run.
      figure: its name in the records of examples/gossip.py.
      title: of that figure.
      decimals: of that figure.
    """

    source: str
    common: str
    figure: str
    title: str
    decimals: int


_ADAMW = "--optimiser adamw --learning-rate"
TASKS = {  # by result
    "local": Task("data", f"{_ADAMW} 0.002 --batch 16 --epochs 3", "accuracy", "test accuracy %", 2),
    "local-text": Task("text", f"{_ADAMW} 0.003 --batch 4 --epochs 2", "validation_loss", "validation loss", 4),
}
ROWS = {
    "all-reduce, 1": "--algorithms all-reduce",
    "DiLoCo, 30": "--algorithms diloco --local-steps 30",
    "SparseLoCo, 30": "--algorithms sparse-loco --local-steps 30",
    "SparseLoCo, mean of all, 30": "--algorithms sparse-loco-workers --local-steps 30",
    "MuLoCo, 30": "--algorithms muloco --local-steps 30 --optimiser muon",
    "DiLoCo, 15": "--algorithms diloco --local-steps 15",
    "SparseLoCo, 15": "--algorithms sparse-loco --local-steps 15",
    "SparseLoCo, mean of all, 15": "--algorithms sparse-loco-workers --local-steps 15",
    "MuLoCo, 15": "--algorithms muloco --local-steps 15 --optimiser muon",
    "local SGD, 30": "--algorithms local --local-steps 30",
}


def command(row: str, result: str) -> str:
    """The options of examples/gossip.py that make this run, except its data and --out."""
    return f"{TASKS[result].common} {ROWS[row]}"


def run(row: str, result: str, args: argparse.Namespace) -> dict:
    """One training in a process of its own; its record."""
    source = TASKS[result].source
    out = args.work / result / row.replace(", ", "_").replace(" ", "_")
    options = command(row, result)
    [program] = programs.digests(result, [options])  # before the run, as the sources may change during it
    data = [f"--{source}", str(getattr(args, source))]
    done = machine.run_example("gossip.py", [*shlex.split(options), *data, "--out", str(out)])
    if done.returncode:
        raise SystemExit(f"local.py: {shlex.join(done.args)} failed:\n{done.stderr}")
    record = json.loads((out / "gossip.json").read_text())
    (found,) = record["runs"]
    settings = {name: value for name, value in record["settings"].items() if name not in ("data", "text", "out")}
    return {"row": row, "command": options, "program": program, "settings": settings, "epochs": found["epochs"]}


def table(store: dict, result: str) -> str:
    """Markdown."""
    _, common, figure, title, decimals = TASKS[result]
    lines = [f"| row (local steps) | {title} | after each epoch | MB sent per worker | bytes a step |"]
    lines += ["|---" * 5 + "|"]
    records = {record["row"]: record for record in store["runs"]}
    for row in [*filter(records.__contains__, ROWS), *(row for row in records if row not in ROWS)]:
        *earlier, last = records[row]["epochs"]
        cells = [
            row if row in ROWS else f"{row} (taken out)",
            f"{last[figure]:.{decimals}f}",
            ", ".join(f"{epoch[figure]:.{decimals - 1}f}" for epoch in earlier),
            f"{last['bits'] / 8e6:.2f}",
            f"{last['bits'] / 8 / last['step']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    head = [provenance.machine_line(store), provenance.versions_line(store)]
    head.append(f"Each row: `examples/gossip.py {common}` and its own options.")
    return "\n\n".join([*head, "\n".join(lines)]) + "\n"


def parse_options() -> argparse.Namespace:
    files = "local.json and .md, or local-text.json and .md"
    parser = runs.make_parser(__doc__, "runs/local", files, ROWS, "some of the rows")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="folder with CIFAR-10, as for examples/cifar10.py")
    source.add_argument("--text", type=Path, help="file to learn from, as for examples/char_lm.py")
    args = parser.parse_args()
    if args.data is None and args.text is None and not args.report:
        parser.error("give --data, a folder with CIFAR-10, or --text, a text file")
    return args


def main() -> None:
    args = parse_options()
    for result, task in TASKS.items():
        path = args.out / f"{result}.json"
        if getattr(args, task.source) is None and not (args.report and (result == "local" or path.is_file())):
            continue
        store = runs.load(path, args.report, ("jax", "jaxlib", "optax", "flax", "numpy"))
        if not args.report:
            commands = {row: command(row, result) for row in args.rows}
            runs.measure(store, path, commands, itemgetter("row"), lambda row, result=result: run(row, result, args))
        runs.report(store, path, table(store, result))


if __name__ == "__main__":
    main()
