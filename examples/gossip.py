"""Training without a global exchange: SwarmSGD, D-PSGD, SGP and local SGD against all-reduce, on images or text.

Trains one small convolutional network, or the transformer of char_lm.py, both in Flax, with 8 workers, which are this
machine's accelerators or virtual CPU devices. Every worker has its own part of the data and its own model; the mean of
the models is tested. Prints a table of accuracy or loss and bits sent, and writes a plot (gossip.png) and all curves
(gossip.json). Nothing here is asynchronous; for that see gcjax.gossip.simulate and swarm_mpi.py.

    python examples/gossip.py                                # scikit-learn's digits, two minutes on two cores
    python examples/gossip.py --data DIR                     # CIFAR-10, see cifar10.py; a quarter of an hour
    python examples/gossip.py --text FILE --optimiser adamw  # a character language model, see char_lm.py
    python examples/gossip.py --algorithms all-reduce swarm-8 --seeds 3
    python examples/gossip.py --algorithms diloco sparse-loco --local-steps 15 --optimiser adamw --learning-rate 0.002
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common.cli import Parser, Problem, above_zero, aligned, progress_bar, run_command
from common.images import load_cifar10, load_digits
from common.log import made_with, two_panels
from common.training import use_devices
from common.workloads import Workload, image_workload, text_workload
from matplotlib.ticker import NullFormatter, StrMethodFormatter

import gcjax
from gcjax import gossip

PyTree = Any
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def local_sgd(args: argparse.Namespace, **options: Any) -> optax.GradientTransformation:
    return gossip.local_sgd(args.local_steps, axis_name="data", **options)


def sparse_loco(*args: Any, **options: Any) -> optax.GradientTransformation:
    return gcjax.sparse_loco_compress(*args, axis_name="data", **options)


def qsgd(key: jax.Array) -> optax.GradientTransformation:
    return gcjax.qsgd_compress(4, key=key, transport="two_phase", axis_name="data")


def swarm(args: argparse.Namespace, key: jax.Array, **options: Any) -> optax.GradientTransformation:
    return gossip.swarm_average(args.local_steps, key=key, axis_name="data", **options)


# By key: title, and what makes the transform. The all-reduce is local SGD of one step: with SGD, averaging the models
# after every step equals averaging the gradients. With AdamW and Muon it does not, as each worker has its own moments.
ALGORITHMS = {
    "all-reduce": ("all-reduce of models", lambda args, key: gossip.local_sgd(1, axis_name="data")),
    "local": ("local SGD", lambda args, key: local_sgd(args)),
    "d-psgd": ("D-PSGD, ring", lambda args, key: gossip.d_psgd("ring", axis_name="data")),
    "sgp": ("SGP, exponential", lambda args, key: gossip.sgp("exponential", axis_name="data")),
    "swarm": ("SwarmSGD", swarm),
    "swarm-8": ("SwarmSGD, 8 bits", lambda args, key: swarm(args, key, bits=8)),
    "diloco": ("DiLoCo", lambda args, key: local_sgd(args, outer=OUTER)),
    "sparse-loco": ("SparseLoCo", lambda args, key: local_sgd(args, compressor=sparse_loco())),
    "sparse-loco-workers": (
        "SparseLoCo, mean of all",
        lambda args, key: local_sgd(args, compressor=sparse_loco(average="workers")),
    ),
    "muloco": (  # with --optimiser muon
        "MuLoCo",
        lambda args, key: local_sgd(
            args, outer=optax.sgd(0.7, momentum=0.6, nesterov=True), compressor=sparse_loco(4096, bits=4)
        ),
    ),
}
USUAL = ["all-reduce", "local", "d-psgd", "sgp", "swarm", "swarm-8"]  # the others are for more local steps
OPTIMISERS = {
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
    "adamw": optax.adamw,
    "muon": lambda rate: optax.contrib.muon(rate, consistent_rms=0.2),  # steps as large as those of AdamW
}
DENSE = "all-reduce"
DIGITS = {"batch": 16, "epochs": 40, "learning_rate": 0.05}
CIFAR = {"batch": 64, "epochs": 6, "learning_rate": 0.02}
TEXT = {"batch": 4, "epochs": 2, "learning_rate": 0.003}
FIGURES = {"accuracy": ("test accuracy %", 2), "validation_loss": ("validation loss", 4)}  # title, decimals
COLOURS = (  # of Okabe and Ito, then grey, brown, green, purple and indigo
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#F0E442", "#999999", "#884400", "#117733", "#882255", "#332288"),
)


def batches(rng: np.random.Generator, parts: np.ndarray, size: int) -> np.ndarray:
    """Draw the batches of an epoch, each worker's from its own samples.

    Args:
      rng: decides on the order.
      parts: int[workers, samples], numbers of each worker's samples. Those that fill no batch are dropped.
      size: samples per worker.

    Returns:
      int[steps, workers * size], numbers of samples.
    """
    workers, own = parts.shape
    order = rng.permuted(parts, axis=1)[:, : own // size * size]
    return order.reshape(workers, -1, size).swapaxes(0, 1).reshape(-1, workers * size)


def prepare(
    name: str, seed: int, workload: Workload, args: argparse.Namespace, mesh: jax.sharding.Mesh
) -> tuple[Any, gcjax.TrainState, Callable[[int], np.ndarray], Callable[[np.ndarray], tuple[jax.Array, ...]]]:
    """Make a training.

    Args:
      name: of the algorithm.
      seed: of the initialisation, the batches and the algorithm.
      workload: what is trained.
      args: the options.
      mesh: the workers.

    Returns:
      The training step; the state to begin with; order(epoch) -> int[steps, workers * size], the samples of each batch;
      place(numbers) -> the batch of these samples, on the devices.
    """
    count = len(workload.samples[0])
    own = count // args.workers
    steps = own // args.batch
    rate = optax.cosine_decay_schedule(args.learning_rate, args.epochs * steps)
    exchange = ALGORITHMS[name][1](args, jax.random.key(seed + 1))
    step = gcjax.make_train_step(workload.loss, optax.chain(OPTIMISERS[args.optimiser](rate), exchange), mesh)
    state = step.init(workload.init(jax.random.key(seed)))
    parts = np.random.default_rng(seed).permutation(count)[: own * args.workers].reshape(args.workers, own)
    over_workers = jax.NamedSharding(mesh, jax.P("data"))

    def order(epoch):
        return batches(np.random.default_rng((seed, epoch)), parts, args.batch)

    def place(numbers):
        return jax.device_put(tuple(x[numbers] for x in workload.samples), over_workers)

    return step, state, order, place


def train(
    name: str, seed: int, workload: Workload, args: argparse.Namespace, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """Run one training, with the arguments of `prepare`.

    Returns:
      `epochs`, a row for each: the mean model's figure, consensus distance, bits per worker, and more.
    """
    step, state, order, place = prepare(name, seed, workload, args, mesh)
    rows = []
    title, decimals = FIGURES[workload.figure]
    described = f"{ALGORITHMS[name][0]}, seed {seed}"
    with progress_bar(total=args.epochs * len(order(0)), desc=described, unit="step", leave=False, disable=None) as bar:
        for epoch in range(args.epochs):
            losses = []
            for numbers in order(epoch):
                state, metrics = step(state, place(numbers))
                losses.append(float(metrics.loss.mean()))
                bar.update()
            sent = gcjax.info(state.opt_state)
            # Off the mesh, where every virtual device would compute the same.
            mean = jax.device_get(gossip.mean_params(state.params, sent.weights))
            row = {
                "step": sent.step,
                "loss": float(np.mean(losses)),
                workload.figure: workload.test(mean),
                "consensus_distance": gossip.consensus_distance(state.params).relative,
                "bits": float(sent.bits.mean()),
                "repeated": sent.failures,
            }
            rows.append(row)
            bar.set_postfix_str(f"{title} {row[workload.figure]:.{decimals}f}", refresh=False)
    return {"algorithm": name, "seed": seed, "epochs": rows}


def grouped(runs: list[dict]) -> dict[str, list[list[dict]]]:
    """The epochs of each algorithm's runs."""
    found: dict[str, list[list[dict]]] = {}
    for run in runs:
        found.setdefault(run["algorithm"], []).append(run["epochs"])
    return found


def table(runs: list[dict], figure: str) -> str:
    """Aligned text with a row for each algorithm: medians, and ranges in brackets if there are several seeds."""
    title, decimals = FIGURES[figure]
    head = ("algorithm", title, "to all-reduce", "consensus distance")
    lines = [(*head, "kbit/step/worker", "Mbit/worker", "repeated")]
    ends = {name: [epochs[-1] for epochs in group] for name, group in grouped(runs).items()}
    for name, rows in ends.items():

        def median(key, rows=rows):
            return statistics.median(row[key] for row in rows)

        scores = [row[figure] for row in rows]
        ranged = f" ({min(scores):.{decimals}f} to {max(scores):.{decimals}f})" if len(scores) > 1 else ""
        gap = "-"
        if DENSE in ends:
            gap = f"{median(figure) - statistics.median(row[figure] for row in ends[DENSE]):+.{decimals}f}"
        bits = median("bits")
        lines.append(
            (
                ALGORITHMS[name][0],
                f"{median(figure):.{decimals}f}{ranged}",
                gap,
                f"{median('consensus_distance'):.4f}",
                f"{bits / rows[0]['step'] / 1e3:,.1f}",
                f"{bits / 1e6:,.1f}",
                f"{median('repeated'):g}",
            )
        )
    return aligned(lines)


def plot(runs: list[dict], shown: str, args: argparse.Namespace, path: Path) -> None:
    """Plot accuracy or loss against bits, and against steps."""
    figure, left, right = two_panels(sharey=True)
    for name, group in grouped(runs).items():
        colour = COLOURS[list(ALGORITHMS).index(name)]
        scores = np.array([[row[shown] for row in epochs] for epochs in group])
        bits = np.median([[row["bits"] for row in epochs] for epochs in group], axis=0)
        for panel, x in ((left, bits / 1e6), (right, [row["step"] for row in group[0]])):
            panel.plot(x, np.median(scores, axis=0), "o-", markersize=3, color=colour, label=ALGORITHMS[name][0])
            panel.fill_between(x, scores.min(axis=0), scores.max(axis=0), color=colour, alpha=0.15, lw=0)
    left.set(xscale="log", xlabel="sent by a worker (Mbit)", ylabel=f"{FIGURES[shown][0]}, of the mean model")
    if shown == "accuracy":  # cuts off the first epochs, which would squeeze the rest
        best = max(line.get_ydata().max() for line in left.lines)
        lowest = min(line.get_ydata()[-1] for line in left.lines)
        left.set_ylim(lowest - max(10, best - lowest), best + 1)
    left.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set(xlabel="step")
    left.set_title(f"{args.workers} workers" + (f", median and range of {args.seeds} seeds" * (args.seeds > 1)))
    figure.legend(handles=left.lines, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(__doc__)
    count, real = above_zero(int), above_zero(float)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="folder with CIFAR-10, as for cifar10.py; digits without it")
    source.add_argument("--text", type=Path, help="file to learn from, UTF-8, as for char_lm.py")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=USUAL, help="what to compare")
    parser.add_argument("--workers", type=count, default=8, help="workers, one per device; at least 2")
    parser.add_argument("--local-steps", type=count, default=4, help="of all but all-reduce, D-PSGD and SGP")
    parser.add_argument("--optimiser", choices=OPTIMISERS, default="sgd", help="of each worker")
    text = "{}; {} for digits, {} for CIFAR-10, {} for a text"
    for name, kind, about in (
        ("batch", count, "samples per worker and step"),
        ("epochs", count, "passes over the data"),
        ("learning_rate", real, "at the start; falls to 0 as a cosine"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, default=argparse.SUPPRESS, help=text.format(about, DIGITS[name], CIFAR[name], TEXT[name])
        )
    parser.add_argument("--seeds", type=count, default=1, help="number of initialisations; several give medians")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for gossip.png and gossip.json")
    args = parser.parse_args(arguments)
    for name, value in (TEXT if args.text else CIFAR if args.data else DIGITS).items():
        args.__dict__.setdefault(name, value)
    args.algorithms = list(dict.fromkeys(args.algorithms))
    if args.workers < 2:
        parser.error(f"argument --workers: must be at least 2, a single worker sends nothing; got {args.workers}")
    return args


def main() -> None:
    """Run the command: train with each algorithm; write the results."""
    args = parse_options()
    if args.text:
        workload = text_workload(args.text)
    else:
        workload = image_workload(load_cifar10(args.data) if args.data else load_digits())
    count = len(workload.samples[0])
    if args.workers * args.batch > count:
        raise Problem(f"--workers {args.workers} times --batch {args.batch} is more than the {count} training samples")
    args.out.mkdir(parents=True, exist_ok=True)
    mesh = use_devices(args.workers)
    runs = []
    for name in args.algorithms:
        for seed in range(args.seeds):
            runs.append(train(name, seed, workload, args, mesh))
            reached, (title, decimals) = runs[-1]["epochs"][-1][workload.figure], FIGURES[workload.figure]
            print(f"{ALGORITHMS[name][0]}, seed {seed}: {title} {reached:.{decimals}f}", flush=True)
    record = {"settings": vars(args), **made_with(), "runs": runs}
    (args.out / "gossip.json").write_text(json.dumps(record, indent=1, default=str))
    plot(runs, workload.figure, args, args.out / "gossip.png")
    print(f"\n{table(runs, workload.figure)}\n\nPlot: {args.out / 'gossip.png'}   Curves: {args.out / 'gossip.json'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
