"""CIFAR-10 with any method of gcjax: the paper's network or a ResNet, Adam or momentum SGD, 8 workers.

The workers are this machine's accelerators, or virtual CPU devices. Fetch CIFAR-10 (python version, from
https://www.cs.toronto.edu/~kriz/cifar.html), unpack it, and give the folder. Writes curves (steps.csv, epochs.csv),
result.json, curves.png and checkpoints into --out.

    python examples/cifar10.py --data DIR --out runs/first                       # 92,074 parameters, minutes on 2 cores
    python examples/cifar10.py --data DIR --out runs/topk --method "top_k(density=0.01)" --optimiser sgd
    python examples/cifar10.py --data DIR --out runs/paper --model vgg --epochs 300 --schedule halve
    python examples/cifar10.py --data DIR --out runs/first --resume              # goes on from the last checkpoint
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import networks, training
from common.checkpoints import Checkpoints
from common.cli import Parser, above_zero, run_command
from common.images import CIFAR_MEAN, CIFAR_STD, ImageData, flip_and_crop, load_cifar10, normalise
from common.log import Log, settings_of
from common.options import add_training


def make_task(args: argparse.Namespace, data: ImageData) -> training.Task:
    """The network, its loss and its data."""
    images, labels, test_images, test_labels = data
    steps, size = training.steps_of_epoch(len(images), args), args.workers * args.batch
    model = networks.CIFAR[args.model](args.width, 1 + int(max(labels.max(), test_labels.max())))

    def init(key):
        variables = dict(model.init(key, jnp.zeros((1, 32, 32, 3)), train=False))
        return variables.pop("params"), variables.get("batch_stats")

    def loss(params, batch, key, model_state=None):
        images, labels = batch
        variables = {"params": params} | ({} if model_state is None else {"batch_stats": model_state})
        with training.whole_batch_norm(args):
            logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"], rngs={"dropout": key})
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return mean if model_state is None else (mean, updated["batch_stats"])

    def batches(first):
        for epoch in range(first // steps, args.epochs):
            order = np.random.default_rng((args.seed, epoch)).permutation(len(images))[: steps * size]
            for chosen in order.reshape(steps, size)[max(first - epoch * steps, 0) :]:
                yield images[chosen], labels[chosen]

    def prepare(key, batch):
        images, labels = batch
        return flip_and_crop(key, normalise(images, CIFAR_MEAN, CIFAR_STD)), labels

    @jax.jit
    def count_correct(params, model_state, images, labels):
        variables = {"params": params} | ({} if model_state is None else {"batch_stats": model_state})
        logits = model.apply(variables, normalise(images, CIFAR_MEAN, CIFAR_STD), train=False)
        return jnp.sum(jnp.argmax(logits, axis=-1) == labels)

    def evaluate(params, model_state):
        parts = [slice(i, i + 1000) for i in range(0, len(test_images), 1000)]
        correct = sum(int(count_correct(params, model_state, test_images[part], test_labels[part])) for part in parts)
        return {"accuracy": correct / len(test_images)}

    return training.Task(init, loss, steps, batches, evaluate, prepare)


def train(args: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """Train from the start, or from the last checkpoint on. Returns the content of result.json."""
    mesh = training.use_devices(args.workers)
    task = make_task(args, data)
    step, state = training.make_step(task, args, mesh)
    prepare, keys = training.prepare_on_workers(task.prepare, mesh), jax.random.key(args.seed + 2)
    parameters, total = training.count(state.params), args.epochs * task.steps
    print(f"{parameters:,} parameters, {args.workers} workers x {args.batch}, {total} steps")

    with Checkpoints(args.out / "checkpoints", settings_of(args) | {"steps": task.steps}) as checkpoints:
        state, done, rows = checkpoints.start(state, args.resume)
        log = Log(args, total, rows)
        for number, batch in enumerate(training.place_batches(task.batches(done), mesh), done):
            begin = time.perf_counter()
            state, metrics = step(state, prepare(jax.random.fold_in(keys, number), batch))
            log.add_step(state, metrics, begin)
            if log.done % task.steps == 0:
                log.end_epoch(task.evaluate(*training.on_host(state)))
            if log.done % (args.checkpoint_every or task.steps) == 0 or log.done == total:
                checkpoints.save(log.done, state, log.rows)
    return log.finish(parameters)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(__doc__)
    count = above_zero(int)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10, see above")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"), help="folder for curves and checkpoints")
    parser.add_argument("--model", choices=networks.CIFAR, default="cnn", help="network")
    parser.add_argument("--width", type=count, help="features of its first layer")
    parser.add_argument("--images", type=count, help="train only on this many images")
    add_training(parser, workers=8, batch=64, epochs=6, learning_rate=2e-3)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command."""
    args = parse_options()
    images, labels, *test = load_cifar10(args.data)
    result = train(args, (images[: args.images], labels[: args.images], *test))
    last = result["epochs"][-1]
    print(
        f"test accuracy {100 * last['accuracy']:.2f} %, compression ratio {result['compression_ratio']:.1f}, "
        f"wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} MB sent per worker, "
        f"{result['ms_per_step']:.0f} ms a step. Curves: {args.out}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
