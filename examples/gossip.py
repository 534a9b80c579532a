"""Training without a global exchange: SwarmSGD, D-PSGD, SGP and local SGD against all-reduce, on digits or CIFAR-10.

Trains one small convolutional network (Flax; momentum SGD or AdamW) with 8 workers, which are this machine's
accelerators or virtual CPU devices. Every worker has its own part of the images and its own model; the mean of the
models is tested. Prints a table of accuracy and bits sent, and writes a plot (gossip.png) and all curves (gossip.json).
Nothing here is asynchronous; for that see gcjax.gossip.simulate and swarm_mpi.py.

    python examples/gossip.py                                # scikit-learn's digits, two minutes on two cores
    python examples/gossip.py --data DIR                     # CIFAR-10, see cifar10.py; a quarter of an hour
    python examples/gossip.py --algorithms all-reduce swarm-8 --seeds 3
    python examples/gossip.py --algorithms diloco sparse-loco --local-steps 15 --optimiser adamw --learning-rate 0.002
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from common.cli import Parser, Problem, above_zero
from common.images import CIFAR_MEAN, CIFAR_STD, ImageData, load_cifar10, load_digits, normalise
from common.networks import Cnn
from common.training import use_devices
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from tqdm import tqdm

import gcjax
from gcjax import gossip

PyTree = Any
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
# By key: title, and what makes the transform. The all-reduce is local SGD of one step: with SGD, averaging the models
# after every step equals averaging the gradients.
ALGORITHMS = {
    "all-reduce": ("all-reduce", lambda args, key: gossip.local_sgd(1, axis_name="data")),
    "local": ("local SGD", lambda args, key: gossip.local_sgd(args.local_steps, axis_name="data")),
    "d-psgd": ("D-PSGD, ring", lambda args, key: gossip.d_psgd("ring", axis_name="data")),
    "sgp": ("SGP, exponential", lambda args, key: gossip.sgp("exponential", axis_name="data")),
    "swarm": (
        "SwarmSGD",
        lambda args, key: gossip.swarm_average(args.local_steps, key=key, axis_name="data"),
    ),
    "swarm-8": (
        "SwarmSGD, 8 bits",
        lambda args, key: gossip.swarm_average(args.local_steps, bits=8, key=key, axis_name="data"),
    ),
    "diloco": ("DiLoCo", lambda args, key: gossip.local_sgd(args.local_steps, outer=OUTER, axis_name="data")),
    "streaming": (
        "Streaming DiLoCo",
        lambda args, key: gossip.local_sgd(
            args.local_steps,
            outer=OUTER,
            fragments=min(4, args.local_steps),
            delay=args.local_steps // 6,
            mixing=0.5,
            axis_name="data",
        ),
    ),
    "sparse-loco": (
        "SparseLoCo",
        lambda args, key: gossip.local_sgd(
            args.local_steps, compressor=gcjax.sparse_loco_compress(axis_name="data"), axis_name="data"
        ),
    ),
    "sparse-loco-workers": (
        "SparseLoCo, mean of all",
        lambda args, key: gossip.local_sgd(
            args.local_steps,
            compressor=gcjax.sparse_loco_compress(average="workers", axis_name="data"),
            axis_name="data",
        ),
    ),
}
USUAL = ["all-reduce", "local", "d-psgd", "sgp", "swarm", "swarm-8"]  # the others are for more local steps
OPTIMISERS = {"sgd": lambda rate: optax.sgd(rate, momentum=0.9), "adamw": optax.adamw}
DENSE = "all-reduce"
DIGITS = {"batch": 16, "epochs": 40, "learning_rate": 0.05}
CIFAR = {"batch": 64, "epochs": 6, "learning_rate": 0.02}
COLOURS = (  # of Okabe and Ito, grey and brown
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#F0E442", "#999999", "#884400"),
)


def batches(rng: np.random.Generator, parts: np.ndarray, size: int) -> np.ndarray:
    """Draw the batches of an epoch, each worker's from its own images.

    Args:
      rng: decides on the order.
      parts: int[workers, images], numbers of each worker's images. Those that fill no batch are dropped.
      size: images per worker.

    Returns:
      int[steps, workers * size], numbers of images.
    """
    workers, own = parts.shape
    order = rng.permuted(parts, axis=1)[:, : own // size * size]
    return order.reshape(workers, -1, size).swapaxes(0, 1).reshape(-1, workers * size)


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """float32[batch, 10] of images float32, or uint8 as CIFAR-10 has them."""
    images = images if images.dtype == jnp.float32 else normalise(images, CIFAR_MEAN, CIFAR_STD)
    return Cnn().apply({"params": params}, images, train=True)


def loss_fn(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy of images and their labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]).mean()


@jax.jit
def count_correct(params: PyTree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Number of images whose label is the likeliest."""
    return jnp.sum(jnp.argmax(logits(params, images), axis=-1) == labels)


def train(name: str, seed: int, data: ImageData, args: argparse.Namespace, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Run one training.

    Args:
      name: of the algorithm.
      seed: of the initialisation, the batches and the algorithm.
      data: training images, their labels, test images, their labels.
      args: the options.
      mesh: the workers.

    Returns:
      `epochs`, a row for each: accuracy of the mean model, consensus distance, bits per worker, and more.
    """
    images, labels, test_images, test_labels = data
    own = len(images) // args.workers
    steps = own // args.batch
    rate = optax.cosine_decay_schedule(args.learning_rate, args.epochs * steps)
    exchange = ALGORITHMS[name][1](args, jax.random.key(seed + 1))
    step = gossip.make_train_step(loss_fn, optax.chain(OPTIMISERS[args.optimiser](rate), exchange), mesh)
    state = step.init(Cnn().init(jax.random.key(seed), jnp.zeros((1, *images.shape[1:])), train=True)["params"])
    parts = np.random.default_rng(seed).permutation(len(images))[: own * args.workers].reshape(args.workers, own)
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    rows = []
    title = f"{ALGORITHMS[name][0]}, seed {seed}"
    with tqdm(total=args.epochs * steps, desc=title, unit="step", leave=False, disable=None) as bar:
        for epoch in range(args.epochs):
            losses = []
            for chosen in batches(np.random.default_rng((seed, epoch)), parts, args.batch):
                batch = jax.device_put((images[chosen], labels[chosen]), over_workers)
                state, metrics = step(state, batch)
                losses.append(float(metrics.loss.mean()))
                bar.update()
            sent = gossip.info(state.opt_state)
            # Off the mesh, where every virtual device would compute the same.
            mean = jax.device_get(gossip.mean_params(state.params, sent.weights))
            correct = [
                int(count_correct(mean, test_images[i : i + 1000], test_labels[i : i + 1000]))
                for i in range(0, len(test_images), 1000)
            ]
            row = {
                "step": sent.step,
                "loss": float(np.mean(losses)),
                "accuracy": 100 * sum(correct) / len(test_images),
                "consensus_distance": gossip.consensus_distance(state.params).relative,
                "bits": float(sent.bits.mean()),
                "repeated": sent.failures,
            }
            rows.append(row)
            bar.set_postfix(accuracy=f"{row['accuracy']:.2f}", refresh=False)
    return {"algorithm": name, "seed": seed, "epochs": rows}


def grouped(runs: list[dict]) -> dict[str, list[list[dict]]]:
    """The epochs of each algorithm's runs."""
    found: dict[str, list[list[dict]]] = {}
    for run in runs:
        found.setdefault(run["algorithm"], []).append(run["epochs"])
    return found


def table(runs: list[dict]) -> str:
    """Aligned text with a row for each algorithm: medians, and ranges in brackets if there are several seeds."""
    head = ("algorithm", "test accuracy %", "to all-reduce", "consensus distance")
    lines = [(*head, "kbit/step/worker", "Mbit/worker", "repeated")]
    ends = {name: [epochs[-1] for epochs in group] for name, group in grouped(runs).items()}
    for name, rows in ends.items():

        def median(key, rows=rows):
            return statistics.median(row[key] for row in rows)

        scores = [row["accuracy"] for row in rows]
        ranged = f" ({min(scores):.2f} to {max(scores):.2f})" if len(scores) > 1 else ""
        gap = "-"
        if DENSE in ends:
            gap = f"{median('accuracy') - statistics.median(row['accuracy'] for row in ends[DENSE]):+.2f}"
        bits = median("bits")
        lines.append(
            (
                ALGORITHMS[name][0],
                f"{median('accuracy'):.2f}{ranged}",
                gap,
                f"{median('consensus_distance'):.4f}",
                f"{bits / rows[0]['step'] / 1e3:,.1f}",
                f"{bits / 1e6:,.1f}",
                f"{median('repeated'):g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in lines)


def plot(runs: list[dict], args: argparse.Namespace, path: Path) -> None:
    """Plot accuracy against bits, and against steps."""
    plt.switch_backend("Agg")  # draws without a display
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for name, group in grouped(runs).items():
        colour = COLOURS[list(ALGORITHMS).index(name)]
        scores = np.array([[row["accuracy"] for row in epochs] for epochs in group])
        bits = np.median([[row["bits"] for row in epochs] for epochs in group], axis=0)
        for panel, x in ((left, bits / 1e6), (right, [row["step"] for row in group[0]])):
            panel.plot(x, np.median(scores, axis=0), "o-", markersize=3, color=colour, label=ALGORITHMS[name][0])
            panel.fill_between(x, scores.min(axis=0), scores.max(axis=0), color=colour, alpha=0.15, lw=0)
    best = max(line.get_ydata().max() for line in left.lines)
    lowest = min(line.get_ydata()[-1] for line in left.lines)
    left.set(xscale="log", xlabel="sent by a worker (Mbit)", ylabel="test accuracy of the mean model (%)")
    left.set_ylim(lowest - max(10, best - lowest), best + 1)  # cuts off the first epochs, which would squeeze the rest
    left.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set(xlabel="step")
    left.set_title(f"{args.workers} workers" + (f", median and range of {args.seeds} seeds" * (args.seeds > 1)))
    figure.legend(handles=left.lines, loc="outside lower center", ncols=6, frameon=False)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10, as for cifar10.py; digits without it")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=USUAL, help="what to compare")
    parser.add_argument("--workers", type=count, default=8, help="workers, one per device; at least 2")
    parser.add_argument("--local-steps", type=count, default=4, help="of all but all-reduce, D-PSGD and SGP")
    parser.add_argument("--optimiser", choices=OPTIMISERS, default="sgd", help="of each worker")
    text = "{}; {} for digits, {} for CIFAR-10"
    for name, kind, about in (
        ("batch", count, "images per worker and step"),
        ("epochs", count, "passes over the images"),
        ("learning_rate", real, "at the start; falls to 0 as a cosine"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, default=argparse.SUPPRESS, help=text.format(about, DIGITS[name], CIFAR[name])
        )
    parser.add_argument("--seeds", type=count, default=1, help="number of initialisations; several give medians")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for gossip.png and gossip.json")
    args = parser.parse_args(arguments)
    for name, value in (DIGITS if args.data is None else CIFAR).items():
        args.__dict__.setdefault(name, value)
    args.algorithms = list(dict.fromkeys(args.algorithms))
    if args.workers < 2:
        parser.error(f"argument --workers: must be at least 2, a single worker sends nothing; got {args.workers}")
    return args


def run(args: argparse.Namespace) -> None:
    """Train with each algorithm; write the results."""
    data = load_digits() if args.data is None else load_cifar10(args.data)
    if args.workers * args.batch > len(data[0]):
        raise Problem(
            f"--workers {args.workers} times --batch {args.batch} is more than the {len(data[0])} training images"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"--out: cannot make the folder {str(args.out)!r} ({error.strerror})") from None
    mesh = use_devices(args.workers)
    runs = []
    for name in args.algorithms:
        for seed in range(args.seeds):
            runs.append(train(name, seed, data, args, mesh))
            print(f"{ALGORITHMS[name][0]}, seed {seed}: {runs[-1]['epochs'][-1]['accuracy']:.2f} %", flush=True)
    versions = {module.__name__: module.__version__ for module in (gcjax, jax, flax, optax, np)}
    record = {
        "settings": vars(args) | {"data": str(args.data), "out": str(args.out)},
        "versions": {"python": platform.python_version(), **versions},
        "machine": f"{platform.machine()}, {jax.default_backend()}",
        "runs": runs,
    }
    (args.out / "gossip.json").write_text(json.dumps(record, indent=1))
    plot(runs, args, args.out / "gossip.png")
    print(f"\n{table(runs)}\n\nPlot: {args.out / 'gossip.png'}   Curves: {args.out / 'gossip.json'}")


def main() -> int:
    """Run the command; return the exit status."""
    try:
        run(parse_options())
    except Problem as problem:
        print(f"gossip.py: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
