"""Compressed against dense gradient exchange, on handwritten digits.

Trains one small convolutional network (Flax, Adam) on scikit-learn's 8x8 digits with 8 workers, which are virtual CPU
devices of this process. Each run has the same initialisation and batches, but another exchange of gradients: dense,
variance-based compression with several alphas, and its hybrid with Strom's threshold. Prints a table of test accuracy
and bytes sent, and writes a plot (digits.png) and all curves (digits.json).

    python examples/digits.py                # about two minutes on two cores
    python examples/digits.py --seeds 5      # medians and ranges over five initialisations
    python examples/digits.py --help
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.cli import Parser, above_zero, aligned, progress_bar, run_command
from common.images import ImageData, load_digits
from common.log import made_with, two_panels
from matplotlib.ticker import StrMethodFormatter

import gcjax

PyTree = Any
Run = dict[str, Any]  # as `train` returns it
METHODS = ("dense", "variance", "hybrid")
QUICK = {"workers": 4, "epochs": 3, "alpha": [1.5]}
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
MARKERS = "os^Dv*P"


class Network(nn.Module):
    """Two convolutions and two dense layers, 85,066 parameters."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def loss_fn(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy of images and their labels."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(Network().apply(params, images), labels).mean()


@jax.jit
def accuracy(params: PyTree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Share of the images whose label is the likeliest."""
    return jnp.mean(jnp.argmax(Network().apply(params, images), axis=-1) == labels)


def compressors(args: argparse.Namespace) -> dict[str, optax.GradientTransformationExtraArgs]:
    """The transforms to compare, by their names in the table and the plot."""
    found = {}
    if "dense" in args.methods:
        found["dense"] = gcjax.dense_compress(axis_name="data")
    if "variance" in args.methods:
        for alpha in args.alpha:
            found[f"variance alpha={alpha:g}"] = gcjax.variance_compress(alpha=alpha, axis_name="data")
    if "hybrid" in args.methods:
        alpha, tau = args.alpha[-1], args.threshold
        found[f"hybrid alpha={alpha:g} tau={tau:g}"] = gcjax.variance_compress(
            alpha=alpha, threshold=tau, axis_name="data"
        )
    return found


def train(name: str, step: Any, seed: int, data: ImageData, args: argparse.Namespace) -> Run:
    """Run one training.

    Args:
      name: of the method.
      step: what `gcjax.make_train_step` returned.
      seed: of the initialisation and the batches.
      data: what `load_digits` returns.
      args: the options.

    Returns:
      Loss, entries sent, bytes and seconds of every step, and the test accuracy after every epoch.
    """
    train_images, train_labels, test_images, test_labels = data
    batch = args.workers * args.batch
    steps = len(train_images) // batch  # the rest of the epoch is dropped
    state = step.init(Network().init(jax.random.key(seed), train_images[:1]))
    rng = np.random.default_rng(seed)
    curves = ("loss", "sent", "wire_bytes", "dense_bytes", "seconds", "test_accuracy")
    run: Run = {"method": name, "seed": seed} | {curve: [] for curve in curves}
    described, total = f"{name}, seed {seed}", args.epochs * steps
    with progress_bar(total=total, desc=described, unit="step", leave=False, disable=None) as bar:
        for _ in range(args.epochs):
            for chosen in rng.permutation(len(train_images))[: steps * batch].reshape(steps, batch):
                begin = time.perf_counter()
                state, metrics = step(state, (train_images[chosen], train_labels[chosen]))
                jax.block_until_ready(state)
                run["seconds"].append(time.perf_counter() - begin)
                sent = gcjax.info(state.opt_state)
                run["loss"].append(float(metrics.loss.mean()))
                run["sent"].append(float(sent.sent.mean()))
                run["wire_bytes"].append(sent.wire_bytes)
                run["dense_bytes"].append(sent.wire_ratio * sent.wire_bytes)
                loss, ratio = f"{run['loss'][-1]:.3f}", f"{sent.compression_ratio:.0f}"
                bar.set_postfix(loss=loss, compression=ratio, refresh=False)
                bar.update()
            # Off the mesh, where every virtual device would compute the same.
            run["test_accuracy"].append(float(accuracy(jax.device_get(state.params), test_images, test_labels)))
    return run


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each method."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["method"], []).append(run)
    return found


def summary(run: Run, parameters: int) -> dict[str, float]:
    """The numbers of one run that go into the table."""
    sent = sum(run["sent"])
    return {
        "accuracy": 100 * run["test_accuracy"][-1],
        "compression": parameters * len(run["sent"]) / sent if sent else math.inf,
        "wire": sum(run["dense_bytes"]) / sum(run["wire_bytes"]),
        "kilobytes": statistics.mean(run["wire_bytes"]) / 1e3,
        "milliseconds": 1e3 * statistics.median(run["seconds"]),
    }


def table(runs: list[Run], parameters: int) -> str:
    """Aligned text with a row for each method: medians, and ranges in brackets if there are several seeds."""
    grouped = {name: [summary(run, parameters) for run in group] for name, group in by_method(runs).items()}

    def median(name, key):
        return statistics.median(row[key] for row in grouped[name])

    def cell(name, key, digits):
        values = [row[key] for row in grouped[name]]
        spread = f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})" if len(values) > 1 else ""
        return f"{median(name, key):,.{digits}f}{spread}"

    rows = [
        ("method", "test accuracy %", "to dense", "compression ratio", "wire ratio", "kB/step/worker", "ms/step"),
    ]
    for name in grouped:
        gap = f"{median(name, 'accuracy') - median('dense', 'accuracy'):+.2f}" if "dense" in grouped else "-"
        numbers = [cell(name, key, 1) for key in ("compression", "wire", "kilobytes")]
        rows.append((name, cell(name, "accuracy", 2), gap, *numbers, f"{median(name, 'milliseconds'):.1f}"))
    return aligned(rows)


def plot(runs: list[Run], parameters: int, args: argparse.Namespace, path: Path) -> None:
    """Plot accuracy against bytes, and compression against steps."""
    steps = len(runs[0]["sent"]) // args.epochs
    figure, left, right = two_panels()
    for i, (name, group) in enumerate(by_method(runs).items()):
        style = {"color": COLOURS[i % len(COLOURS)], "label": name}
        marks = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "markevery": max(args.epochs // 10, 1)}
        scores = 100 * np.array([run["test_accuracy"] for run in group])
        megabytes = np.median([np.cumsum(run["wire_bytes"])[steps - 1 :: steps] for run in group], axis=0) / 1e6
        left.plot(megabytes, np.median(scores, axis=0), **style, **marks)
        left.fill_between(megabytes, scores.min(axis=0), scores.max(axis=0), color=style["color"], alpha=0.15, lw=0)
        sent = np.mean([run["sent"] for run in group], axis=0)
        with np.errstate(divide="ignore"):  # nothing sent in a whole epoch: infinite, a gap in the plot
            ratio = parameters / np.convolve(sent, np.ones(steps) / steps, "valid")
        right.plot(np.arange(steps, len(sent) + 1), ratio, **style)
    # Cuts off the first epochs of slow starters, which would squeeze the rest.
    bottom = min(70, 100 * min(run["test_accuracy"][-1] for run in runs) - 5)
    shown = [line.get_xdata()[line.get_ydata() >= bottom][0] for line in left.lines]
    left.set_xscale("log")
    left.set(ylim=(bottom, 100), xlim=(0.7 * min(shown), None))
    left.set(xlabel="sent per worker since the start (MB)", ylabel="test accuracy (%)")
    right.set(yscale="log", xlabel="step", ylabel="compression ratio (parameters / entries sent)")
    left.set_title("Accuracy against bytes sent" + (f", median and range of {args.seeds} seeds" * (args.seeds > 1)))
    right.set_title(f"Compression, moving mean of {steps} steps (an epoch)")
    figure.legend(handles=left.lines, loc="outside lower center", ncols=5, frameon=False)
    for axis in (left.xaxis, right.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    figure.savefig(path, dpi=130)


def parse_options(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, ImageData]:
    """Parse the command line, or these arguments; return the options and the data."""
    parser = Parser(__doc__)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--workers", type=count, default=8, help="workers, each a virtual CPU device; at least 2")
    parser.add_argument("--epochs", type=count, default=40, help="passes over the 1,437 training images")
    parser.add_argument("--batch", type=count, default=16, help="images per worker and step")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="what to compare")
    alphas = "criteria of variance, with a run for each; the hybrid uses the last one"
    parser.add_argument("--alpha", nargs="+", type=real, default=[1.0, 1.5, 2.0], help=alphas)
    parser.add_argument("--threshold", type=real, default=0.1, help="tau of the hybrid")
    parser.add_argument("--learning-rate", type=real, default=2e-3, help="of Adam at the start; falls to 0 as a cosine")
    parser.add_argument("--seeds", type=count, default=1, help="number of initialisations; several give medians")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for digits.png and digits.json")
    parser.add_argument("--quick", action="store_true", help=f"other defaults, for a quick try: {QUICK}")
    args = parser.parse_args(arguments)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(arguments)
    args.methods, args.alpha = list(dict.fromkeys(args.methods)), list(dict.fromkeys(args.alpha))
    data = load_digits()
    if args.workers < 2:
        parser.error(f"argument --workers: must be at least 2, a single worker sends nothing; got {args.workers}")
    if args.workers * args.batch > len(data[0]):
        parser.error(
            f"--workers {args.workers} times --batch {args.batch} is more than the {len(data[0])} training images"
        )
    return args, data


def main() -> None:
    """Run the command."""
    args, data = parse_options()
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))
    sizes = jax.eval_shape(Network().init, jax.random.key(0), data[0][:1])
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(sizes))
    steps = args.epochs * (len(data[0]) // (args.workers * args.batch))
    print(f"{parameters:,} parameters, {args.workers} workers, batch {args.workers} x {args.batch}, {steps} steps")
    runs = []
    begin = time.perf_counter()
    for name, compressor in compressors(args).items():
        tx = optax.chain(compressor, optax.adam(optax.cosine_decay_schedule(args.learning_rate, steps)))
        step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data")
        for seed in range(args.seeds):
            runs.append(train(name, step, seed, data, args))
            print(f"{name}, seed {seed}: test accuracy {100 * runs[-1]['test_accuracy'][-1]:.2f} %", flush=True)
    seconds = time.perf_counter() - begin
    record = {"settings": vars(args), **made_with(), "parameters": parameters, "seconds": seconds, "runs": runs}
    picture, curves = args.out / "digits.png", args.out / "digits.json"
    curves.write_text(json.dumps(record, default=str))
    plot(runs, parameters, args, picture)
    print(f"\n{table(runs, parameters)}\n\nTook {seconds:.0f} s. Plot: {picture}   Curves and settings: {curves}")
    print("Virtual devices on one machine show bytes and accuracy, not speed: here nothing crosses a network.")


if __name__ == "__main__":
    sys.exit(run_command(main))
