"""The paper's comparison on CIFAR-10: accuracy and bytes of every method, with Adam and with momentum SGD.

Each run is one call of examples/cifar10.py, printed by --list. Finished runs are kept in the result file, so an
interrupted table continues where it stopped, and an interrupted run after its last whole epoch. Those that are not
current are run again.

    python -m bench.table --data DIR                         # --size small: a CNN, for 2 CPU cores; hours
    python -m bench.table --data DIR --size long             # 30 epochs in place of 6
    python -m bench.table --data DIR --size hundred --rows dense "variance 0.5"  # or 100
    python -m bench.table --data DIR --size vgg --rows dense "hybrid 0.1"  # the paper's network, narrow
    python -m bench.table --data DIR --rows dense "variance 1.5" --optimisers adam --seeds 3
    python -m bench.table --data DIR --size paper            # the paper's network and 300 epochs, for GPUs; not yet run
    python -m bench.table --report                           # table and plot again, from the result file
"""

import argparse
import collections
import functools
import json
import math
import os
import queue
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from bench import machine, programs, runs

BOTH, SGD = ("adam", "sgd"), ("sgd",)
SIZES = {
    "small": {
        "common": "--model cnn --batch 64 --epochs 6 --schedule cosine",
        "adam": "--learning-rate 0.002",
        "sgd": "--learning-rate 0.02",
    },
    "long": {
        "common": "--model cnn --batch 64 --epochs 30 --schedule cosine",
        "adam": "--learning-rate 0.002",
        "sgd": "--learning-rate 0.02",
    },
    "hundred": {
        "common": "--model cnn --batch 64 --epochs 100 --schedule cosine",
        "adam": "--learning-rate 0.002",
        "sgd": "--learning-rate 0.02",
    },
    "vgg": {
        "common": "--model vgg --width 16 --batch 64 --epochs 8 --schedule cosine",
        "adam": "--learning-rate 0.001",
        "sgd": "--learning-rate 0.05",
    },
    "paper": {
        "common": "--model vgg --batch 64 --epochs 300 --schedule halve",
        "adam": "--learning-rate 0.001",
        "sgd": "--learning-rate 0.05",
    },
}
RANGE = 12  # points below the best that the plot shows
# Of a name beside its point: offset in points, horizontal and vertical alignment.
PLACES = (
    (5, 3, "left", "bottom"),
    (-5, 3, "right", "bottom"),
    (5, -3, "left", "top"),
    (-5, -3, "right", "top"),
    (0, 6, "center", "bottom"),
    (0, -6, "center", "top"),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
# Of a run's result.json.
KEPT = ("parameters", "steps", "epochs", "compression_ratio", "wire_ratio", "ms_per_step", "cpu_seconds", "versions")


class Row(NamedTuple):
    """One row of the table.

    Attributes:
      method: as `--method` of examples/cifar10.py takes it.
      optimisers: those it is run with.
      options: further options of examples/cifar10.py.
      variant: shows what one choice does; the plot leaves it out.
    """

    method: str
    optimisers: tuple[str, ...] = BOTH
    options: str = ""
    variant: bool = False


class Job(NamedTuple):
    """One run: a row, an optimiser and a seed."""

    row: str
    optimiser: str
    seed: int


@functools.cache
def rows() -> dict[str, Row]:
    """The rows of the paper's table, then other methods, then variants, each of which settles one choice."""
    variant = functools.partial(Row, variant=True)
    return {
        "dense": Row("dense"),
        "variance 1": Row("variance(alpha=1)"),
        "variance 1.5": Row("variance(alpha=1.5)"),
        "variance 2": Row("variance(alpha=2)"),
        "hybrid 0.01": Row("variance(alpha=2, threshold=0.01)"),
        "hybrid 0.1": Row("variance(alpha=2, threshold=0.1)"),
        "strom 0.001": Row("strom(threshold=0.001)"),
        "strom 0.01": Row("strom(threshold=0.01)"),
        "strom 0.1": Row("strom(threshold=0.1)"),
        "qsgd 2 bits": Row("qsgd(bits=2, bucket_size=128)"),
        "qsgd 3 bits": Row("qsgd(bits=3, bucket_size=512)"),
        "qsgd 4 bits": Row("qsgd(bits=4, bucket_size=512)"),
        "qsgd 2 bits, two phases": Row("qsgd(bits=2, bucket_size=128, transport='two_phase')"),
        "qsgd 3 bits, two phases": Row("qsgd(bits=3, bucket_size=512, transport='two_phase')"),
        "qsgd 4 bits, two phases": Row("qsgd(bits=4, bucket_size=512, transport='two_phase')"),
        "top-k 0.02": Row("top_k(density=0.02)"),
        "dgc 0.02": Row("dgc(density=0.02)", SGD, "--momentum 0"),
        "powersgd 2": Row("power_sgd(rank=2)"),
        "powersgd 3": Row("power_sgd(rank=3)"),
        "powersgd 4": Row("power_sgd(rank=4)"),
        "1-bit": Row("onebit"),
        "ef-sign": Row("ef_sign"),
        "ef-sign, two phases": Row("ef_sign(transport='two_phase')"),
        "sketch 0.02": Row("sketch(density=0.02)", SGD, "--momentum 0"),
        "variance 0.5": Row("variance(alpha=0.5)"),
        "variance 0.1 to 2": Row("variance(alpha=(0.1, 2), capacity=0.5)"),
        "variance 0.5 to 8": Row("variance(alpha=(0.5, 8))"),
        "dense, rate 0.005": variant("dense", SGD, "--learning-rate 0.005"),
        "dense, rate 0.01": variant("dense", SGD, "--learning-rate 0.01"),
        "variance 0.5, rate 0.01": variant("variance(alpha=0.5)", SGD, "--learning-rate 0.01"),
        "underflow drop": variant("variance(alpha=1.5, underflow='drop')"),
        "capacity N/16": variant("variance(alpha=1.5, capacity=0.0625)"),
        "capacity N/2, alpha 0.5": variant("variance(alpha=0.5, capacity=0.5)"),
        "capacity N/2, alpha 0.25": variant("variance(alpha=0.25, capacity=0.5)"),
        "all-gather": variant("variance(alpha=0.5, transport='all_gather')"),
        "words": variant("variance(alpha=0.5, transport='all_gather', wire='word')"),
        "all samples 0.5": variant("variance(alpha=0.5)", options="--squares samples"),
        "all samples": variant("variance(alpha=1.5)", options="--squares samples"),
        "all samples 0.5 to 8": variant("variance(alpha=(0.5, 8))", options="--squares samples"),
        "4 groups": variant("variance(alpha=1.5)", options="--squares 4"),
        "16 groups": variant("variance(alpha=1.5)", options="--squares 16"),
        "squared batch gradient": variant("variance(alpha=1.5)", options="--squares batch"),
    }


def command(size: str, row: str, optimiser: str, seed: int) -> str:
    """The options of examples/cifar10.py that make this run, except --data and --out."""
    method, _, extra, _ = rows()[row]
    rate = "" if "--learning-rate" in extra else SIZES[size][optimiser]
    parts = [SIZES[size]["common"], f"--optimiser {optimiser}", rate, extra]
    return " ".join([f"--method {shlex.quote(method)}", *filter(None, parts), f"--seed {seed}"])


def wanted(args: argparse.Namespace) -> Iterator[Job]:
    """The first seeds of all rows before the second ones."""
    for seed in range(args.seeds):
        for row in args.rows:
            for optimiser in args.optimisers:
                if optimiser in rows()[row].optimisers:
                    yield Job(row, optimiser, seed)


def run(job: Job, args: argparse.Namespace, cores: queue.SimpleQueue) -> dict:
    """One training in a process of its own, on a core of its own if several run at once; its record."""
    text = command(args.size, *job)
    [program] = programs.digests(f"table-{args.size}", [text])  # before the run, as the sources may change during it
    out = args.work / args.size / f"{job.row}-{job.optimiser}-{job.seed}-{program}".replace(" ", "_").replace("/", "_")
    checkpoints = out / "checkpoints"
    resume = ["--resume"] if checkpoints.is_dir() and any(checkpoints.iterdir()) else []
    core = cores.get()
    arguments = [*shlex.split(text), "--data", str(args.data), "--out", str(out), *resume]
    done = machine.run_example("cifar10.py", arguments, core)
    cores.put(core)
    record = job._asdict() | {"command": text, "program": program}
    if done.returncode:
        # A run that diverges is a result: what the method does with these settings.
        last = done.stderr.strip().splitlines()[-1]
        if "has diverged" not in last:
            raise SystemExit(f"table.py: {shlex.join(done.args)} failed:\n{done.stderr}")
        return record | {"diverged": last.removeprefix("cifar10.py: ")}
    result = json.loads((out / "result.json").read_text())
    if resume:  # its seconds are those since then
        result["cpu_seconds"] = None
    return record | {name: result[name] for name in KEPT}


def measure(args: argparse.Namespace, store: dict, path: Path) -> None:
    """Run what the store lacks, each on a core of its own."""
    commands = {job: command(args.size, *job) for job in wanted(args)}
    cores: queue.SimpleQueue = queue.SimpleQueue()
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for i in range(args.jobs):
        cores.put(usable[i % len(usable)] if usable and args.jobs > 1 else None)
    runs.measure(store, path, commands, job_of, lambda job: run(job, args, cores), args.jobs)


def job_of(record: dict) -> Job:
    return Job(record["row"], record["optimiser"], record["seed"])


def recorded_methods(recorded: Iterable[dict]) -> dict[str, str]:
    """Row -> the method it ran: of `rows()`, then of recorded rows that are no longer among them."""
    methods = {name: row.method for name, row in rows().items()}
    return methods | {record["row"]: runs.method(record) for record in recorded}


def grouped(recorded: list[dict], optimiser: str) -> dict[str, list[dict]]:
    """Row -> its runs with one optimiser, in the order of `recorded_methods`."""
    found, order = collections.defaultdict(list), list(recorded_methods(recorded))
    for record in sorted(recorded, key=lambda record: (order.index(record["row"]), record["seed"])):
        if record["optimiser"] == optimiser:
            found[record["row"]].append(record)
    return found


def table(store: dict) -> str:
    """Markdown, a table for each optimiser: medians over the seeds, and ranges if there are several."""
    lines, methods = [], recorded_methods(store["runs"])
    for optimiser in BOTH:
        found = grouped(store["runs"], optimiser)
        if not found:
            continue
        head = "| row | method | test accuracy % | to dense | compression ratio | in the last tenth | wire ratio | "
        lines += [
            f"\n## {optimiser}\n",
            head + "bits per sent entry | MB sent per worker | CPU s | seeds |",
            "|---" * 11 + "|",
        ]
        dense = median([r for r in found.get("dense", []) if "epochs" in r], accuracy)
        for name, records in found.items():
            ended = [record for record in records if "epochs" in record]
            method, name = methods[name], name if name in rows() else f"{name} (taken out)"
            if not ended:
                lines.append(f"| {name} | `{method}` | diverged |" + " |" * 8)
                continue
            scores = [accuracy(record) for record in ended]
            spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
            lost = f", {len(records) - len(ended)} diverged" if len(ended) < len(records) else ""
            gap = f"{median(ended, accuracy) - dense:+.1f}" if dense is not None else ""
            cells = [
                f"{median(ended, accuracy):.1f}{spread}",
                gap,
                f"{median(ended, lambda r: r['compression_ratio']):,.1f}",
                f"{median(ended, last_ratio):,.1f}",
                f"{median(ended, lambda r: r['wire_ratio']):,.1f}",
                f"{median(ended, entry_bits):.1f}",
                f"{median(ended, megabytes):,.1f}",
                seconds(ended),
                f"{len(ended)}{lost}",
            ]
            lines.append(f"| {name} | `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


def accuracy(record: dict) -> float:
    """Per cent, after the last epoch."""
    return 100 * record["epochs"][-1]["accuracy"]


def megabytes(record: dict) -> float:
    """Sent by a worker in the whole run."""
    return record["epochs"][-1]["wire_bytes"] / 1e6


def entry_bits(record: dict) -> float:
    """Bits of a sent entry; nan if none was sent."""
    last = record["epochs"][-1]
    return last["payload_bits"] / last["sent"] if last["sent"] else math.nan


def last_ratio(record: dict) -> float:
    """Compression ratio in the last tenth of the epochs, at least in the last one."""
    *_, last = epochs = record["epochs"]
    tenth = max(1, len(epochs) // 10)
    before = epochs[-1 - tenth] if len(epochs) > tenth else {"step": 0, "sent": 0.0}
    sent = last["sent"] - before["sent"]
    return record["parameters"] * (last["step"] - before["step"]) / sent if sent else math.inf


def seconds(records: list[dict]) -> str:
    """Median CPU seconds of the runs that were not interrupted."""
    known = [record["cpu_seconds"] for record in records if record["cpu_seconds"] is not None]
    return f"{statistics.median(known):.0f}" if known else "-"


def median(records: list[dict], of: Callable[[dict], float]) -> float | None:
    return statistics.median(map(of, records)) if records else None


def plot(store: dict, path: Path) -> None:
    """Accuracy at the end against bytes sent per worker, with the Pareto front; a panel for each optimiser."""
    plt.switch_backend("Agg")  # draws without a display
    figure, panels = plt.subplots(1, 2, figsize=(13, 6.5), layout="constrained", sharey=True)
    shown = [record for record in store["runs"] if record["row"] not in rows() or not rows()[record["row"]].variant]
    families = list(dict.fromkeys(family(name) for name in recorded_methods(shown)))
    scores = [accuracy(record) for record in shown if "epochs" in record]
    best, worst = max(scores, default=0.0), min(scores, default=0.0)
    bottom = max(worst, best - RANGE) - 1
    for panel, optimiser in zip(panels, BOTH, strict=True):
        panel.set(xscale="log", xlabel="MB sent per worker", title=optimiser, ylim=(bottom, best + 2))
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        points = {}
        for name, records in grouped(shown, optimiser).items():
            ended = [record for record in records if "epochs" in record]
            if ended:
                points[name] = (median(ended, megabytes), median(ended, accuracy))
        front = pareto(list(points.values()))
        if front:
            panel.step(*zip(*front, strict=True), where="post", color="0.6", lw=1, ls="--", zorder=1)
        for name, (x, y) in points.items():
            number = families.index(family(name))
            panel.plot(x, y, "osD^v"[number // len(COLOURS) % 5], color=COLOURS[number % len(COLOURS)], zorder=2)
    panels[0].set_ylabel("test accuracy (%)")
    figure.draw_without_rendering()
    for panel, optimiser in zip(panels, BOTH, strict=True):
        label(panel, grouped(shown, optimiser), families)
    figure.savefig(path, dpi=120)


def family(name: str) -> str:
    return name.split()[0].rstrip(",")


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of (bytes, accuracy) that no other one beats in both, by bytes."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def label(panel: plt.Axes, found: dict[str, list[dict]], families: list[str]) -> None:
    """Name the points, each beside its own where no other name or point is; without a place, no name."""
    renderer = panel.figure.canvas.get_renderer()
    ended = {name: [r for r in records if "epochs" in r] for name, records in found.items()}
    at = {name: (median(rs, megabytes), median(rs, accuracy)) for name, rs in ended.items() if rs}
    taken = [panel.transData.transform(point) for point in at.values()]
    boxes = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in taken]
    for name, point in sorted(at.items(), key=lambda item: -item[1][1]):
        if not panel.get_ylim()[0] < point[1]:
            continue
        colour = COLOURS[families.index(family(name)) % len(COLOURS)]
        for dx, dy, ha, va in PLACES:
            text = panel.annotate(
                name, point, (dx, dy), textcoords="offset points", fontsize=8, color=colour, ha=ha, va=va
            )
            box = text.get_window_extent(renderer)
            if panel.bbox.x0 <= box.x0 and box.x1 <= panel.bbox.x1 + 40 and not any(box.overlaps(b) for b in boxes):
                boxes.append(box)
                break
            text.remove()


def parse_options() -> argparse.Namespace:
    files = "table-SIZE.json, .md and .png"
    parser = runs.make_parser(__doc__, "runs/table", files, rows(), "see --list")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10, as for examples/cifar10.py")
    parser.add_argument("--size", choices=SIZES, default="small", help="network and schedule")
    parser.add_argument("--optimisers", nargs="+", choices=BOTH, default=list(BOTH), help="what follows the method")
    parser.add_argument("--seeds", type=int, default=1, help="number of initialisations and orders of the data")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each on a core of its own")
    parser.add_argument("--list", action="store_true", help="print the runs as commands and exit")
    args = parser.parse_args()
    if args.data is None and not (args.list or args.report):
        parser.error("--data: give the folder with CIFAR-10")
    return args


def main() -> None:
    args = parse_options()
    if args.list:
        for job in wanted(args):
            print(f"{job.row}: python examples/cifar10.py --data DIR --out DIR {command(args.size, *job)}")
        return
    path = args.out / f"table-{args.size}.json"
    store = runs.load(path, args.report, ("jax", "jaxlib", "optax", "flax"))
    if not args.report:
        measure(args, store, path)
    plot(store, path.with_suffix(".png"))
    runs.report(store, path, table(store))


if __name__ == "__main__":
    main()
