"""ImageNet, or any image folder, with any method of gcjax: ResNet-50, 16 workers x 32 as in the paper.

The workers are this machine's accelerators, those of several machines, or virtual CPU devices. Fetch ImageNet (ILSVRC
2012) from https://image-net.org and unpack it as train/CLASS/*.JPEG and val/CLASS/*.JPEG; the validation images come in
one folder and must be sorted into classes. Pillow decodes the images in threads of this process. Writes curves
(steps.csv, epochs.csv), result.json, curves.png and checkpoints into --out, which several machines must share.

The paper's 90 epochs with momentum SGD, on 16 GPUs of 2 machines: on 10.0.0.1 as below, on the other with --process 1.

    python examples/imagenet.py --data DIR --dtype bfloat16 --coordinator 10.0.0.1:9876 --processes 2 --process 0
    ... --optimiser adam --learning-rate 0.001 --method "variance(alpha=2, threshold=0.1)"
    ... --resume                                                                # goes on from the last checkpoint

The same batch of 512 on one machine with 8 GPUs, and a small network on virtual CPU devices to try the script:

    python examples/imagenet.py --data DIR --dtype bfloat16 --workers 8 --batch 64
    python examples/imagenet.py --data DIR --model resnet6 --size 32 --workers 2 --batch 8 --epochs 1
"""

import argparse
import concurrent.futures
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import launch, networks, training
from common.checkpoints import Checkpoints
from common.cli import Parser, Problem, above_zero, run_command
from common.images import find_images, load_image, normalise
from common.log import Log, settings_of
from common.options import add_training
from jax.experimental import multihost_utils

import gcjax

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_task(args: argparse.Namespace, own: list[int]) -> training.Task:
    """The network, its loss and its data.

    Args:
      args: the options.
      own: numbers of this process's workers.
    """
    paths, labels, classes = find_images(args.data / "train")
    test_paths, test_labels, test_classes = find_images(args.data / "val")
    if test_classes != classes:
        raise Problem("--data: the folders train and val have different classes")
    steps, top = training.steps_of_epoch(len(paths), args), min(5, len(classes))
    model = networks.IMAGENET[args.model](classes=len(classes), dtype=jnp.dtype(args.dtype))
    threads = concurrent.futures.ThreadPoolExecutor()  # Pillow decodes outside of Python's lock

    def init(key):
        variables = model.init(key, jnp.zeros((1, args.size, args.size, 3)), train=False)
        return variables["params"], variables["batch_stats"]

    def loss(params, batch, key, model_state):
        images, labels = batch
        with training.whole_batch_norm(args):
            variables = {"params": params, "batch_stats": model_state}
            logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return mean, updated["batch_stats"]

    def batches(first):
        for epoch in range(first // steps, args.epochs):
            order = np.random.default_rng((args.seed, epoch)).permutation(len(paths))
            order = order[: steps * args.workers * args.batch].reshape(steps, args.workers, args.batch)

            def load(image, epoch=epoch):
                return load_image(paths[image], args.size, np.random.default_rng((args.seed, epoch, image)))

            for chosen in order[max(first - epoch * steps, 0) :, own].reshape(-1, len(own) * args.batch):
                yield np.stack(list(threads.map(load, chosen))), labels[chosen]

    def prepare(key, batch):
        images, labels = batch
        return normalise(images, MEAN, STD), labels

    @jax.jit
    def count_correct(params, model_state, images, labels):
        """For how many images the label is the likeliest class, and one of the five likeliest."""
        variables = {"params": params, "batch_stats": model_state}
        logits = model.apply(variables, normalise(images, MEAN, STD), train=False)
        hits = jax.lax.top_k(logits, top)[1] == labels[:, None]
        return jnp.array([hits[:, 0].sum(), hits.sum()])

    def evaluate(params, model_state):
        mine = np.arange(jax.process_index(), len(test_paths), jax.process_count())
        correct = np.zeros(2)
        for chosen in (mine[i : i + 256] for i in range(0, len(mine), 256)):
            images = np.stack(list(threads.map(lambda i: load_image(test_paths[i], args.size), chosen)))
            correct += count_correct(params, model_state, images, test_labels[chosen])
        one, five = multihost_utils.process_allgather(correct).reshape(-1, 2).sum(axis=0) / len(test_paths)
        return {"accuracy": float(one), "top_5_accuracy": float(five)}

    return training.Task(init, loss, steps, batches, evaluate, prepare)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train from the start, or from the last checkpoint on. Returns the content of result.json."""
    mesh, is_first = training.use_devices(args.workers), jax.process_index() == 0
    own = [w for w, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    task = make_task(args, own)
    settings = settings_of(args) | {"steps": task.steps}
    gcjax.check_agreement(mesh, settings=settings)
    step, state = training.make_step(task, args, mesh)
    prepare, keys = training.prepare_on_workers(task.prepare, mesh), jax.random.key(args.seed + 2)
    parameters, total = training.count(state.params), args.epochs * task.steps
    if is_first:
        print(f"{parameters:,} parameters, {args.workers} workers x {args.batch}, {total} steps")

    with Checkpoints(args.out / "checkpoints", settings) as checkpoints:
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
    parser.add_argument("--data", type=Path, required=True, help="folder of images, see above")
    parser.add_argument("--out", type=Path, default=Path("runs/imagenet"), help="folder for curves and checkpoints")
    parser.add_argument("--model", choices=networks.IMAGENET, default="resnet50", help="network")
    parser.add_argument("--size", type=count, default=224, help="pixels of the images' sides")
    text = "of the computation; parameters and messages stay float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    launch.add_options(parser)
    add_training(parser, workers=16, batch=32, epochs=90, learning_rate=0.2, optimiser="sgd", schedule="steps")
    parser.set_defaults(weight_decay=1e-4, warmup_epochs=5.0)
    args = parser.parse_args(arguments)
    launch.check_options(parser, args)
    return args


def main() -> None:
    """Run the command."""
    args = parse_options()
    if args.processes:
        jax.config.update("jax_num_cpu_devices", max(args.workers // args.processes, 1))  # does not affect accelerators
    launch.connect(args)
    result = train(args)
    last = result["epochs"][-1]
    if jax.process_index() == 0:
        print(
            f"accuracy {100 * last['accuracy']:.2f} % (top 5: {100 * last['top_5_accuracy']:.2f} %), compression ratio "
            f"{result['compression_ratio']:.1f}, wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} "
            f"MB sent per worker, {result['ms_per_step']:.0f} ms a step. Curves: {args.out}"
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
