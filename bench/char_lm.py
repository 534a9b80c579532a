"""Validation loss against bytes for a character-level transformer: dense, variance-based and top-k exchange, with Adam.

Each run is one call of examples/char_lm.py, one after the other. Finished runs are kept in the result file, so an
interrupted table continues where it stopped. CPU seconds are of the whole run, compilation and validation included.

    python -m bench.char_lm --text FILE                            # all rows, 2 to 3 minutes of one core each
    python -m bench.char_lm --text FILE --rows dense "variance 1"
    python -m bench.char_lm --report                               # table again, from the result file
"""

import argparse
import csv
import json
import shlex
from operator import itemgetter
from pathlib import Path

import numpy as np

from bench import machine, programs, runs

COMMON = "--epochs 2"
ROWS = {
    "dense": "dense",
    "variance 0.25": "variance(alpha=0.25, capacity=0.5)",
    "variance 0.5": "variance(alpha=0.5)",
    "variance 1": "variance(alpha=1)",
    "variance 1.5": "variance(alpha=1.5)",
    "variance 2": "variance(alpha=2)",
    "variance 0.1 to 2": "variance(alpha=(0.1, 2), capacity=0.5)",
    "variance 0.5 to 8": "variance(alpha=(0.5, 8))",
    "qsgd 4 bits, two phases": "qsgd(bits=4, bucket_size=512, transport='two_phase')",
    "powersgd 4": "power_sgd(rank=4)",
    "top-k 0.01": "top_k(density=0.01)",
}
KEPT = ("settings", "parameters", "steps", "epochs", "compression_ratio", "wire_ratio", "ms_per_step", "cpu_seconds")
POINTS = 20  # of the training curve


def command(row: str) -> str:
    """The options of examples/char_lm.py that make this run, except --text and --out."""
    return f"--method {shlex.quote(ROWS[row])} {COMMON}"


def run(row: str, args: argparse.Namespace) -> dict:
    """One training in a process of its own; its record."""
    options = command(row)
    [program] = programs.digests("char_lm", [options])  # before the run, as the sources may change during it
    out = args.work / f"{row}-{program}".replace(" ", "_")
    resume = ["--resume"] if (out / "epochs.csv").is_file() else []
    arguments = [*shlex.split(options), *resume, "--text", str(args.text), "--out", str(out)]
    done = machine.run_example("char_lm.py", arguments)
    if done.returncode:
        raise SystemExit(f"char_lm.py: {shlex.join(done.args)} failed:\n{done.stderr}")
    result = json.loads((out / "result.json").read_text())
    if resume:  # its seconds are those since then
        result["cpu_seconds"] = None
    record = {"row": row, "command": options, "program": program} | {name: result[name] for name in KEPT}
    record["settings"] = {name: x for name, x in record["settings"].items() if name not in ("text", "out", "resume")}
    return record | {"curve": curve(out / "steps.csv"), "sample": (out / "sample.txt").read_text("utf-8")}


def curve(path: Path) -> list[dict]:
    """Mean training loss, compression ratio and megabytes sent so far, for equal parts of the run."""
    with open(path, newline="") as file:
        steps = list(csv.DictReader(file))
    sent = np.cumsum([float(step["wire_bytes"]) for step in steps]) / 1e6
    points = []
    for part in np.array_split(np.arange(len(steps)), POINTS):
        loss = np.mean([float(steps[i]["loss"]) for i in part])
        ratio = 1 / np.mean([1 / float(steps[i]["compression_ratio"]) for i in part])
        points.append(
            {"step": int(part[-1]) + 1, "loss": loss, "compression_ratio": ratio, "megabytes": sent[part[-1]]}
        )
    return points


def table(store: dict) -> str:
    """Markdown."""
    head = "| row | method | validation loss | to dense % | compression ratio | in the last twentieth | wire ratio | "
    lines = [head + "MB sent per worker | CPU s |", "|---" * 9 + "|"]
    records = {record["row"]: record for record in store["runs"]}
    dense = records["dense"]["epochs"][-1]["validation_loss"] if "dense" in records else None
    for row in [*filter(records.__contains__, ROWS), *(row for row in records if row not in ROWS)]:
        record = records[row]
        last = record["epochs"][-1]
        cells = [
            row if row in ROWS else f"{row} (taken out)",
            f"`{runs.method(record)}`",
            f"{last['validation_loss']:.4f}",
            "" if dense is None else f"{100 * (last['validation_loss'] / dense - 1):+.2f}",
            f"{record['compression_ratio']:.1f}",
            f"{record['curve'][-1]['compression_ratio']:.1f}",
            f"{record['wire_ratio']:.1f}",
            f"{last['wire_bytes'] / 1e6:.1f}",
            "-" if record["cpu_seconds"] is None else f"{record['cpu_seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse_options() -> argparse.Namespace:
    parser = runs.make_parser(__doc__, "runs/char_lm", "char_lm.json and char_lm.md", ROWS, "some of the rows")
    parser.add_argument("--text", type=Path, help="file to learn from, as for examples/char_lm.py")
    args = parser.parse_args()
    if args.text is None and not args.report:
        parser.error("--text: give a text file")
    return args


def main() -> None:
    args = parse_options()
    path = args.out / "char_lm.json"
    store = runs.load(path, args.report, ("jax", "jaxlib", "optax", "flax", "numpy"))
    if not args.report:
        commands = {row: command(row) for row in args.rows}
        runs.measure(store, path, commands, itemgetter("row"), lambda row: run(row, args))
    runs.report(store, path, table(store))


if __name__ == "__main__":
    main()
