"""CIFAR-10 with any method of gcjax: the paper's network or a ResNet, Adam or momentum SGD, 8 workers.

The workers are this machine's accelerators, or virtual CPU devices. Fetch CIFAR-10 (python or binary version, from
https://www.cs.toronto.edu/~kriz/cifar.html), unpack it, and give the folder; an image folder (train/CLASS/*.png,
test/CLASS/*.png) works too. Writes curves (steps.csv, epochs.csv), result.json, curves.png and checkpoints into --out.

    python examples/cifar10.py --data DIR --out runs/first                       # 92,074 parameters, minutes on 2 cores
    python examples/cifar10.py --data DIR --out runs/topk --method "top_k(density=0.01)" --optimiser sgd
    python examples/cifar10.py --data DIR --out runs/paper --model vgg --epochs 300 --schedule halve
    python examples/cifar10.py --data DIR --out runs/first --resume              # goes on from the last checkpoint
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import networks
from common.cli import Parser, Problem, above_zero, run_command
from common.folders import load_folder
from common.images import CIFAR_MEAN, CIFAR_STD, flip_and_crop, load_cifar10, normalise
from common.options import add_training, check_training
from common.training import Task, train, whole_batch_norm


def make_task(args: argparse.Namespace, data: Sequence[np.ndarray]) -> Task:
    """The task of training on `data`: images, labels, test images, test labels."""
    images, labels, test_images, test_labels = data
    size = args.workers * args.batch
    if len(images) < size:
        raise Problem(
            f"--workers {args.workers} times --batch {args.batch} is more than the {len(images)} training images"
        )
    model = networks.CIFAR[args.model](args.width, 1 + int(max(labels.max(), test_labels.max())))
    steps = len(images) // size  # the rest of an epoch is dropped

    def init(key):
        variables = dict(model.init(key, jnp.zeros((1, 32, 32, 3)), train=False))
        return variables.pop("params"), variables.get("batch_stats")

    def loss(params, batch, key, model_state=None):
        images, labels = batch
        variables = {"params": params} | ({} if model_state is None else {"batch_stats": model_state})
        with whole_batch_norm(args):
            logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"], rngs={"dropout": key})
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return mean if model_state is None else (mean, updated["batch_stats"])

    def batches(epoch, first=0):
        order = np.random.default_rng((args.seed, epoch)).permutation(len(images))[: steps * size]
        for chosen in order.reshape(steps, size)[first:]:
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

    return Task(init, loss, steps, batches, prepare, evaluate)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count = above_zero(int)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10, see above")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"), help="folder for curves and checkpoints")
    parser.add_argument("--model", choices=networks.CIFAR, default="cnn", help="network")
    parser.add_argument("--width", type=count, help="features of its first layer")
    parser.add_argument("--images", type=count, help="train only on this many images")
    add_training(parser, workers=8, batch=64, epochs=6, learning_rate=2e-3)
    args = parser.parse_args(arguments)
    check_training(parser, args)
    if args.model == "cnn" and (args.width or 8) % 8:
        parser.error(f"--width {args.width} must be a multiple of 8, the groups of the normalisation")
    return args


def load_data(args: argparse.Namespace) -> Sequence[np.ndarray]:
    """Training images, their labels, test images, their labels."""
    load = partial(load_folder, size=32) if (args.data / "train").is_dir() else load_cifar10
    images, labels, *test = load(args.data)
    return [images[: args.images], labels[: args.images], *test]


def main() -> None:
    """Run the command."""
    args = parse_options()
    result = train(make_task(args, load_data(args)), args)
    last = result["epochs"][-1]
    print(
        f"test accuracy {100 * last['accuracy']:.2f} %, compression ratio {result['compression_ratio']:.1f}, "
        f"wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} MB sent per worker, "
        f"{result['ms_per_step']:.0f} ms a step. Curves: {args.out}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
