"""The paper's comparison on CIFAR-10: accuracy and bytes of every method, with Adam and with momentum SGD.

Each run is one call of examples/cifar10.py, printed by --list. What has finished is kept in the result file, so that
the table goes on where it stopped; a run that was cut goes on after its last whole epoch.

    python bench/table.py --data DIR                         # --size small: a CNN, for 2 CPU cores; hours
    python bench/table.py --data DIR --rows dense "variance 1.5" --optimisers adam --seeds 3
    python bench/table.py --data DIR --size paper            # the paper's network and 300 epochs, for GPUs; not yet run
    python bench/table.py --report                           # table and plot again, from the result file
"""

import argparse
import collections
import concurrent.futures
import json
import math
import os
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from _machine import RESULTS, ROOT, Parser, provenance
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from tqdm import tqdm

BOTH, SGD = ("adam", "sgd"), ("sgd",)
# name: (method, the optimisers it is for, further options). First the rows of the paper's table, then other methods,
# then variants of ours, each settling one choice.
ROWS = {
    "dense": ("dense", BOTH, ""),
    "variance 1": ("variance(alpha=1)", BOTH, ""),
    "variance 1.5": ("variance(alpha=1.5)", BOTH, ""),
    "variance 2": ("variance(alpha=2)", BOTH, ""),
    "hybrid 0.01": ("variance(alpha=2, threshold=0.01)", BOTH, ""),
    "hybrid 0.1": ("variance(alpha=2, threshold=0.1)", BOTH, ""),
    "strom 0.001": ("strom(threshold=0.001)", BOTH, ""),
    "strom 0.01": ("strom(threshold=0.01)", BOTH, ""),
    "strom 0.1": ("strom(threshold=0.1)", BOTH, ""),
    "qsgd 2 bits": ("qsgd(bits=2, bucket_size=128)", BOTH, ""),
    "qsgd 3 bits": ("qsgd(bits=3, bucket_size=512)", BOTH, ""),
    "qsgd 4 bits": ("qsgd(bits=4, bucket_size=512)", BOTH, ""),
    "top-k 0.02": ("top_k(density=0.02)", BOTH, ""),
    "dgc 0.02": ("dgc(density=0.02)", SGD, "--momentum 0"),
    "powersgd 2": ("power_sgd(rank=2)", BOTH, ""),
    "1-bit": ("onebit", BOTH, ""),
    "ef-sign": ("ef_sign", BOTH, ""),
    "sketch 0.02": ("sketch(density=0.02)", SGD, "--momentum 0"),
    "density 0.04": ("variance(density=0.04, feedback=True)", BOTH, ""),
    "variance 0.5": ("variance(alpha=0.5)", BOTH, ""),
    "underflow drop": ("variance(alpha=1.5, underflow='drop')", BOTH, ""),
    "feedback": ("variance(alpha=1.5, feedback=True)", BOTH, ""),
    "float32 values": ("variance(alpha=1.5, values='float32')", BOTH, ""),
    "capacity N/4": (
        "variance(alpha=1.5, capacity=(96, 192, 384, 736, 1440, 2880, 5760, 11520, 23040))",
        BOTH,
        "",
    ),
    "capacity N/24": ("variance(alpha=1.5, capacity=(96, 384, 1440, 3840))", BOTH, ""),
    "reduce-scatter": ("variance(alpha=1.5, transport='reduce_scatter')", BOTH, ""),
    "4 microbatches": ("variance(alpha=1.5)", BOTH, "--squares microbatches"),
    "squared batch gradient": ("variance(alpha=1.5)", BOTH, "--squares batch"),
}
SIZES = {
    "small": {
        "common": "--model cnn --batch 64 --epochs 6 --schedule cosine",
        "adam": "--learning-rate 0.002",
        "sgd": "--learning-rate 0.02",
    },
    "paper": {
        "common": "--model vgg --batch 64 --epochs 300 --schedule halve",
        "adam": "--learning-rate 0.001",
        "sgd": "--learning-rate 0.05",
    },
}
RANGE = 30  # points below the best that the plot shows
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


def command(size: str, row: str, optimiser: str, seed: int) -> str:
    """The options of examples/cifar10.py that make this run, but for --data and --out."""
    method, _, extra = ROWS[row]
    parts = [SIZES[size]["common"], f"--optimiser {optimiser}", SIZES[size][optimiser], extra]
    return " ".join([f"--method {shlex.quote(method)}", *filter(None, parts), f"--seed {seed}"])


def wanted(args):
    """(row, optimiser, seed), the first seeds of all rows before the second ones."""
    for seed in range(args.seeds):
        for row in args.rows:
            for optimiser in args.optimisers:
                if optimiser in ROWS[row][1]:
                    yield row, optimiser, seed


def run(job, args, cores: queue.SimpleQueue):
    """One training in a process of its own, on a core of its own where there are several jobs; its record."""
    row, optimiser, seed = job
    text = command(args.size, row, optimiser, seed)
    out = args.work / args.size / f"{row}-{optimiser}-{seed}".replace(" ", "_")
    checkpoints = out / "checkpoints"
    resume = ["--resume"] if checkpoints.is_dir() and any(checkpoints.iterdir()) else []
    core = cores.get()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    full = [sys.executable, str(ROOT / "examples" / "cifar10.py"), *shlex.split(text)]
    full += ["--data", str(args.data), "--out", str(out), *resume]
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    done = subprocess.run(full, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, preexec_fn=pin)
    cores.put(core)
    record = {"row": row, "optimiser": optimiser, "seed": seed, "command": text}
    if done.returncode:
        # A run that diverges is a result: what the method does with these settings.
        last = done.stderr.strip().splitlines()[-1]
        if "has diverged" not in last:
            raise SystemExit(f"table.py: {shlex.join(full)} failed:\n{done.stderr}")
        return record | {"diverged": last.removeprefix("cifar10.py: ")}
    result = json.loads((out / "result.json").read_text())
    kept = (
        "parameters",
        "steps",
        "epochs",
        "compression_ratio",
        "wire_ratio",
        "ms_per_step",
        "cpu_seconds",
        "versions",
    )
    return record | {name: result[name] for name in kept}


def measure(args, store: dict, path: Path) -> None:
    source = provenance()["source"]  # of the package, which may change while the table goes on
    have = {(record["row"], record["optimiser"], record["seed"]) for record in store["runs"]}
    missing = [job for job in wanted(args) if job not in have]
    cores: queue.SimpleQueue = queue.SimpleQueue()
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for i in range(args.jobs):
        cores.put(usable[i % len(usable)] if usable and args.jobs > 1 else None)
    bar = tqdm(total=len(missing), unit="run")
    with bar, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, job, args, cores) for job in missing]):
            store["runs"].append(done.result() | {"source": source})
            write(path, json.dumps(store, indent=1))
            bar.update()


def write(path: Path, text: str) -> None:
    """All or nothing: an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def grouped(runs, optimiser: str) -> dict[str, list[dict]]:
    found = collections.defaultdict(list)
    for record in sorted(runs, key=lambda record: (list(ROWS).index(record["row"]), record["seed"])):
        if record["optimiser"] == optimiser:
            found[record["row"]].append(record)
    return found


def table(store: dict) -> str:
    """Markdown, a table for each optimiser; medians over seeds, and ranges where there are several."""
    lines = []
    for optimiser in BOTH:
        rows = grouped(store["runs"], optimiser)
        if not rows:
            continue
        head = "| row | method | test accuracy % | to dense | compression ratio | wire ratio | bits per sent entry | "
        lines += [f"\n## {optimiser}\n", head + "MB sent per worker | CPU s | seeds |", "|---" * 10 + "|"]
        dense = median([r for r in rows.get("dense", []) if "epochs" in r], accuracy)
        for name, records in rows.items():
            ended = [record for record in records if "epochs" in record]
            method = ROWS[name][0]
            if not ended:
                lines.append(f"| {name} | `{method}` | diverged |" + " |" * 7)
                continue
            scores = [accuracy(record) for record in ended]
            spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
            lost = f", {len(records) - len(ended)} diverged" if len(ended) < len(records) else ""
            gap = f"{median(ended, accuracy) - dense:+.1f}" if dense is not None else ""
            cells = [
                f"{median(ended, accuracy):.1f}{spread}",
                gap,
                f"{median(ended, lambda r: r['compression_ratio']):,.1f}",
                f"{median(ended, lambda r: r['wire_ratio']):,.1f}",
                f"{median(ended, lambda r: r['epochs'][-1]['payload_bits'] / r['epochs'][-1]['sent']):.1f}",
                f"{median(ended, megabytes):,.1f}",
                f"{median(ended, lambda r: r['cpu_seconds']):.0f}",
                f"{len(ended)}{lost}",
            ]
            lines.append(f"| {name} | `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


def accuracy(record) -> float:
    return 100 * record["epochs"][-1]["accuracy"]


def megabytes(record) -> float:
    return record["epochs"][-1]["wire_bytes"] / 1e6


def median(records, of):
    return statistics.median(map(of, records)) if records else None


def plot(store: dict, path: Path) -> None:
    """Accuracy after each epoch against the bytes that a worker has sent till then, a panel for each optimiser."""
    plt.switch_backend("Agg")  # draws without a display
    figure, panels = plt.subplots(1, 2, figsize=(13, 6.5), layout="constrained", sharey=True)
    families = list(dict.fromkeys(name.split()[0] for name in ROWS))
    best = max(accuracy(record) for record in store["runs"] if "epochs" in record)
    for panel, optimiser in zip(panels, BOTH, strict=True):
        named: list[tuple[float, float]] = []
        for name, records in grouped(store["runs"], optimiser).items():
            curves = [record["epochs"] for record in records if "epochs" in record]
            if not curves:
                continue
            x = [statistics.median(row["wire_bytes"] / 1e6 for row in rows) for rows in zip(*curves, strict=True)]
            y = [statistics.median(100 * row["accuracy"] for row in rows) for rows in zip(*curves, strict=True)]
            number = families.index(name.split()[0])
            colour, marker = COLOURS[number % len(COLOURS)], "osD"[number // len(COLOURS) % 3]
            panel.plot(x, y, lw=0.8, alpha=0.6, color=colour)
            panel.plot(x[-1], y[-1], marker, color=colour)
            near = any(abs(math.log(x[-1] / other)) < 0.25 and abs(y[-1] - at) < 0.8 for other, at in named)
            if y[-1] > best - RANGE and not near:  # of several in one place the first one is named
                named.append((x[-1], y[-1]))
                panel.annotate(name, (x[-1], y[-1]), (4, 4), textcoords="offset points", fontsize=8, color=colour)
        panel.set(xscale="log", xlabel="MB sent per worker", title=optimiser, ylim=(best - RANGE, best + 2))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy (%), after each epoch")
    figure.savefig(path, dpi=120)


def parse_options():
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10, as for examples/cifar10.py")
    parser.add_argument("--size", choices=SIZES, default="small", help="network and schedule")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="see --list")
    parser.add_argument("--optimisers", nargs="+", choices=BOTH, default=list(BOTH), help="what follows the method")
    parser.add_argument("--seeds", type=int, default=1, help="number of initialisations and orders of the data")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, each on a core of its own")
    parser.add_argument("--work", type=Path, default=Path("runs/table"), help="folder for curves and checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for table-SIZE.json, .md and .png")
    parser.add_argument("--list", action="store_true", help="print the runs as commands, and end")
    parser.add_argument("--report", action="store_true", help="no runs: table and plot from the result file")
    args = parser.parse_args()
    if args.data is None and not (args.list or args.report):
        parser.error("--data: give the folder with CIFAR-10")
    return args


def main():
    args = parse_options()
    if args.list:
        for job in wanted(args):
            print(f"{job[0]}: python examples/cifar10.py --data DIR --out DIR {command(args.size, *job)}")
        return
    path = args.out / f"table-{args.size}.json"
    store = (
        json.loads(path.read_text())
        if path.is_file()
        else provenance(("jax", "jaxlib", "optax", "flax")) | {"runs": []}
    )
    if not args.report:
        measure(args, store, path)
    text = table(store)
    write(path.with_suffix(".md"), text)
    plot(store, path.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
