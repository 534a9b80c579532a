"""Training that rarely communicates, on CIFAR-10: accuracy of the mean model against bytes, with 8 workers and AdamW.

Each run is one call of examples/gossip.py, one after the other. Finished runs are kept in the result file, so an
interrupted table continues where it stopped. The all-reduce is of the models, after every step.

    python -m bench.local --data DIR                                # all rows, 2 to 3 minutes each
    python -m bench.local --data DIR --rows "DiLoCo, 30" "SparseLoCo, 30"
    python -m bench.local --report                                  # table again, from the result file
"""

import argparse
import json
import shlex
from pathlib import Path

from bench import machine, provenance, runs

COMMON = "--optimiser adamw --learning-rate 0.002 --batch 16 --epochs 3"
ROWS = {
    "all-reduce, 1": "--algorithms all-reduce",
    "DiLoCo, 30": "--algorithms diloco --local-steps 30",
    "SparseLoCo, 30": "--algorithms sparse-loco --local-steps 30",
    "SparseLoCo, mean of all, 30": "--algorithms sparse-loco-workers --local-steps 30",
    "Streaming DiLoCo, 30": "--algorithms streaming --local-steps 30",
    "DiLoCo, 15": "--algorithms diloco --local-steps 15",
    "SparseLoCo, 15": "--algorithms sparse-loco --local-steps 15",
    "SparseLoCo, mean of all, 15": "--algorithms sparse-loco-workers --local-steps 15",
    "Streaming DiLoCo, 15": "--algorithms streaming --local-steps 15",
    "local SGD, 30": "--algorithms local --local-steps 30",
}


def run(row: str, args: argparse.Namespace) -> dict:
    """One training in a process of its own; its record."""
    out = args.work / row.replace(", ", "_").replace(" ", "_")
    options = f"{ROWS[row]} {COMMON}"
    done = machine.run_example("gossip.py", [*shlex.split(options), "--data", str(args.data), "--out", str(out)])
    if done.returncode:
        raise SystemExit(f"local.py: {shlex.join(done.args)} failed:\n{done.stderr}")
    record = json.loads((out / "gossip.json").read_text())
    (found,) = record["runs"]
    settings = {name: value for name, value in record["settings"].items() if name not in ("data", "out")}
    return {"row": row, "command": options, "settings": settings, "epochs": found["epochs"]}


def table(store: dict) -> str:
    """Markdown."""
    lines = ["| row (local steps) | test accuracy % | after each epoch | MB sent per worker | bytes a step |"]
    lines += ["|---" * 5 + "|"]
    records = {record["row"]: record for record in store["runs"]}
    for row in filter(records.__contains__, ROWS):
        *earlier, last = records[row]["epochs"]
        cells = [
            row,
            f"{last['accuracy']:.2f}",
            ", ".join(f"{epoch['accuracy']:.1f}" for epoch in earlier),
            f"{last['bits'] / 8e6:.2f}",
            f"{last['bits'] / 8 / last['step']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    head = [provenance.machine_line(store), provenance.versions_line(store)]
    head.append(f"Each row: `examples/gossip.py {COMMON}` and its own options.")
    return "\n\n".join([*head, "\n".join(lines)]) + "\n"


def parse_options() -> argparse.Namespace:
    parser = runs.make_parser(__doc__, "runs/local", "local.json and local.md", ROWS, "some of the rows")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10, as for examples/cifar10.py")
    args = parser.parse_args()
    if args.data is None and not args.report:
        parser.error("--data: give a folder with CIFAR-10")
    return args


def main() -> None:
    args = parse_options()
    path = args.out / "local.json"
    store = runs.load(path, args.report, ("jax", "jaxlib", "optax", "flax", "numpy"))
    if not args.report:
        have = {record["row"] for record in store["runs"]}
        runs.measure(store, path, [row for row in args.rows if row not in have], lambda row: run(row, args))
    runs.report(store, path, table(store))


if __name__ == "__main__":
    main()
