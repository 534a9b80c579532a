"""ImageNet, or any image folder, with any method of gcjax: ResNet-50, 16 workers x 32 as in the paper.

The workers are this machine's accelerators, those of several machines, or virtual CPU devices. Fetch ImageNet (ILSVRC
2012) from https://image-net.org and unpack it as train/CLASS/*.JPEG and val/CLASS/*.JPEG; the validation images come in
one folder and must be sorted into classes. Writes curves (steps.csv, epochs.csv), result.json, curves.png and
checkpoints into --out, which several machines must share.

The paper's 90 epochs with momentum SGD, on 16 GPUs of 2 machines: on 10.0.0.1 as below, on the other with --process 1.

    python examples/imagenet.py --data DIR --dtype bfloat16 --coordinator 10.0.0.1:9876 --processes 2 --process 0
    ... --optimiser adam --learning-rate 0.001 --method "variance(alpha=2, threshold=0.1)"
    ... --resume                                                                # goes on from the last checkpoint

If a process is lost, the others print so and stop.

The same batch of 512 on one machine with 8 GPUs, and a small network on virtual CPU devices to try the script:

    python examples/imagenet.py --data DIR --dtype bfloat16 --workers 8 --batch 64
    python examples/imagenet.py --data DIR --model resnet6 --size 32 --workers 2 --batch 8 --epochs 1
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import launch, networks
from common.cli import Parser, Problem, above_zero
from common.folders import Decoders, Images, find_images
from common.images import normalise
from common.options import add_training, check_training
from common.training import Task, place_batches, train, whole_batch_norm

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MARGIN = 224 / 256  # of the shorter side, in evaluation


def load_batches(
    args: argparse.Namespace, decoders: Decoders, images: Images, numbers: np.ndarray, seed: tuple[int, ...] | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Load this process's part of each batch.

    Args:
      args: the options.
      decoders: decode the images.
      images: what the numbers refer to.
      numbers: int[batches, workers * args.batch], an image's number; -1 for none, with the label -1.
      seed: random crops follow from it and the image's number. None for central squares, as in evaluation.

    Yields:
      uint8[rows, size, size, 3] and labels int32[rows].
    """
    devices = enumerate(jax.devices()[: args.workers])
    own = [worker for worker, device in devices if device.process_index == jax.process_index()]
    numbers = numbers.reshape(-1, args.workers, args.batch)[:, own].reshape(len(numbers), -1)
    requests = ([[images.paths[i], seed and (*seed, int(i))] for i in row] for row in numbers)
    pixels = decoders.batches(requests, 1.0 if seed else MARGIN)
    for row, batch in zip(numbers, pixels, strict=True):
        yield batch, np.where(row < 0, -1, images.labels[row])


def make_task(
    args: argparse.Namespace, train: Images, held_out: Images, classes: list[str], decoders: Decoders
) -> Task:
    """The task of training on `train` and evaluating on `held_out`."""
    size = args.workers * args.batch
    steps = len(train.paths) // size  # the rest of an epoch is dropped
    if not steps:
        raise Problem(
            f"--workers {args.workers} times --batch {args.batch} is more than the {len(train.paths)} training images"
        )
    model = networks.IMAGENET[args.model](classes=len(classes), dtype=jnp.dtype(args.dtype))
    top = min(5, len(classes))

    def init(key):
        variables = model.init(key, jnp.zeros((1, args.size, args.size, 3)), train=False)
        return variables["params"], variables["batch_stats"]

    def loss(params, batch, key, model_state):
        images, labels = batch
        with whole_batch_norm(args):
            variables = {"params": params, "batch_stats": model_state}
            logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return mean, updated["batch_stats"]

    def batches(epoch, first=0):
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train.paths))[: steps * size]
        return load_batches(args, decoders, train, order.reshape(steps, size)[first:], (args.seed, epoch))

    def prepare(key, batch):
        images, labels = batch
        return normalise(images, MEAN, STD), labels

    def count_correct(params, model_state, batch):
        """For how many images of all workers the label is the likeliest class, and one of the five likeliest."""
        images, labels = prepare(None, batch)
        logits = model.apply({"params": params, "batch_stats": model_state}, images, train=False)
        hits = jax.lax.top_k(logits, top)[1] == labels[:, None]
        return jax.lax.psum(jnp.array([hits[:, 0].sum(), hits.sum()]), "data")

    def evaluate(params, model_state):
        mesh = jax.make_mesh((args.workers,), ("data",), devices=jax.devices()[: args.workers])
        params, model_state = jax.device_put((params, model_state), jax.NamedSharding(mesh, jax.P()))
        count = len(held_out.paths)
        numbers = np.append(np.arange(count), np.full(-count % size, -1)).reshape(-1, size)
        parts = place_batches(load_batches(args, decoders, held_out, numbers, None), mesh)
        correct = sum(np.asarray(score(mesh, params, model_state, part)) for part in parts)
        return {"accuracy": float(correct[0] / count), "top_5_accuracy": float(correct[1] / count)}

    @jax.jit(static_argnums=0)
    def score(mesh, params, model_state, batch):
        specs = (jax.P(), jax.P(), jax.P("data"))
        return jax.shard_map(count_correct, mesh=mesh, in_specs=specs, out_specs=jax.P())(params, model_state, batch)

    return Task(init, loss, steps, batches, prepare, evaluate)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count = above_zero(int)
    parser.add_argument("--data", type=Path, required=True, help="folder of images, see above")
    parser.add_argument("--out", type=Path, default=Path("runs/imagenet"), help="folder for curves and checkpoints")
    parser.add_argument("--model", choices=networks.IMAGENET, default="resnet50", help="network")
    parser.add_argument("--size", type=count, default=224, help="pixels of the images' sides")
    text = "of the computation; parameters and what is sent stay float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--decoders", type=count, default=usable, help="processes that decode images, for each JAX process"
    )
    launch.add_options(parser)
    add_training(parser, workers=16, batch=32, epochs=90, learning_rate=0.2, optimiser="sgd", schedule="steps")
    parser.set_defaults(weight_decay=1e-4, warmup_epochs=5.0)
    args = parser.parse_args(arguments)
    launch.check_options(parser, args)
    check_training(parser, args)
    return args


def run(args: argparse.Namespace) -> None:
    """Train, once the processes are joined."""
    train_images, held_out, classes = find_images(args.data)
    processes = jax.process_count() if jax.distributed.is_initialized() else 1
    if args.workers % processes:
        raise Problem(f"--workers {args.workers} cannot be split evenly over {processes} processes")
    with Decoders(args.decoders, args.workers // processes * args.batch, args.size) as decoders:
        result = train(make_task(args, train_images, held_out, classes, decoders), args)
    last = result["epochs"][-1]
    if jax.process_index() == 0:
        print(
            f"accuracy {100 * last['accuracy']:.2f} % (top 5: {100 * last['top_5_accuracy']:.2f} %), compression ratio "
            f"{result['compression_ratio']:.1f}, wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} "
            f"MB sent per worker, {result['ms_per_step']:.0f} ms a step. Curves: {args.out}"
        )


def main() -> int:
    """Run the command; return the exit status."""
    args = parse_options()
    if args.processes:
        jax.config.update("jax_num_cpu_devices", max(args.workers // args.processes, 1))  # does not affect accelerators
    return launch.run(args, run)


if __name__ == "__main__":
    sys.exit(main())
