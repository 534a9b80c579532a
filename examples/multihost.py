"""One training script for one machine or many: digits, data parallel, with compressed gradients.

Every machine runs this same script; JAX joins the processes, and the mesh has the devices of all of them. Each process
loads only its own workers' images. Process 0 prints. If a process dies, the others say so and stop.

    python examples/multihost.py                    # one process, to see that it runs
    python examples/multihost.py --local 2          # two processes on this machine's CPU
    python examples/multihost.py --coordinator 10.0.0.1:9876 --processes 2 --process 0    # on one machine, 10.0.0.1
    python examples/multihost.py --coordinator 10.0.0.1:9876 --processes 2 --process 1    # on another
    srun python examples/multihost.py --auto        # SLURM, Open MPI, Kubernetes, TPU slices: JAX finds the others
    python examples/multihost.py --help
"""

import argparse
import collections
import hashlib
import itertools
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import launch
from common.cli import Parser, Problem, above_zero
from common.images import load_digits
from jax.experimental import multihost_utils
from tqdm import tqdm

import gcjax

METHODS = {
    "dense": lambda args: gcjax.dense_compress(axis_name="data"),
    "power_sgd": lambda args: gcjax.power_sgd_compress(rank=2, key=jax.random.key(1), axis_name="data"),
    "top_k": lambda args: gcjax.top_k_compress(args.density, axis_name="data"),
    "variance": lambda args: gcjax.variance_compress(alpha=args.alpha, axis_name="data"),
}

# Nothing below but `own`, the batches and the last lines of `train` knows of processes.


def init_params(key):
    """A network of one hidden layer, 9,610 parameters."""
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 128)) * math.sqrt(2 / 64), "b": jnp.zeros(128)},
        "out": {"w": jax.random.normal(second, (128, 10)) * math.sqrt(1 / 128), "b": jnp.zeros(10)},
    }


def logits(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def load_shards(own: list[int], workers: int):
    """The training images of the workers `own`, and the test images; large data would come from files of their own."""
    train, labels, test, test_labels = load_digits()
    train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    return [(train[w::workers], labels[w::workers]) for w in own], (test, test_labels)


def batches(shards, own, args):
    """Without end: this process's part of each batch. A worker's samples do not depend on the number of processes."""
    orders = [np.random.default_rng((args.seed, w)) for w in own]
    while True:
        parts = []
        for order, (images, labels) in zip(orders, shards, strict=True):
            chosen = order.choice(len(images), args.batch, replace=False)
            parts.append((images[chosen], labels[chosen]))
        yield tuple(map(np.concatenate, zip(*parts, strict=True)))


def train(args) -> None:
    workers, speaks = jax.device_count(), jax.process_index() == 0
    mesh = jax.make_mesh((workers,), ("data",))
    devices = collections.Counter(device.process_index for device in mesh.devices.flat)
    if len(set(devices.values())) > 1:
        counts = [devices[process] for process in sorted(devices)]
        raise RuntimeError(f"the processes do not agree: they have {counts} devices. Give all the same number")
    own = [w for w, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    shards, test = load_shards(own, workers)
    if args.batch > (most := min(len(images) for images, _ in shards)):
        raise Problem(f"--batch {args.batch} is more than the {most} training images of one of {workers} workers")

    tx = optax.chain(METHODS[args.method](args), optax.adam(args.learning_rate))
    moments = gcjax.value_and_moments if args.method == "variance" else None
    step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data", moments=moments)
    state = step.init(init_params(jax.random.key(args.seed)))  # the same seed everywhere, or the first step raises
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    seconds, sent = [], []
    with tqdm(total=args.steps, file=sys.stdout, unit="step", disable=not speaks) as bar:
        for batch in itertools.islice(batches(shards, own, args), args.steps):
            begin = time.perf_counter()
            batch = [jax.make_array_from_process_local_data(over_workers, part) for part in batch]
            state, metrics = step(state, batch)
            loss = float(metrics.loss.addressable_shards[0].data[0])  # of one worker; waits for the step
            seconds.append(time.perf_counter() - begin)
            sent.append(gcjax.info(state.opt_state))
            bar.set_postfix(loss=f"{loss:.3f}", wire_ratio=f"{sent[-1].wire_ratio:.1f}", refresh=False)
            bar.update()

    params = jax.device_get(state.params)  # each process has all of them
    right = np.argmax(logits(params, test[0]), axis=-1) == test[1]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params)))
    digests = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8)).reshape(-1, 32)
    if (digests != digests[0]).any():
        raise Problem(f"the processes ended with different parameters: {[d.tobytes().hex()[:8] for d in digests]}")
    if speaks:
        wire_bytes = np.mean([s.wire_bytes for s in sent])
        ratio = sum(s.wire_ratio * s.wire_bytes for s in sent) / max(sum(s.wire_bytes for s in sent), 1)
        row = {
            "method": args.method,
            "processes": jax.process_count(),
            "workers": workers,
            "steps": args.steps,
            "test accuracy %": f"{100 * right.mean():.2f}",
            "wire bytes/step/worker": f"{wire_bytes:,.0f}",
            "wire ratio": f"{ratio:.1f}" if workers > 1 else "-",
            "ms/step": f"{1e3 * np.median(seconds):.1f}",
        }
        print("  ".join(name.rjust(len(str(value))) for name, value in row.items()))
        print("  ".join(str(value).rjust(len(name)) for name, value in row.items()))
        print(f"Parameters are bit-equal on all processes: SHA-256 {digest.hexdigest()[:16]}", flush=True)


def parse_options():
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count, real = above_zero(int), above_zero(float)
    launch.add_options(parser)
    cpus = "virtual CPU devices of each process, each a worker; 1 with --local; without it all devices that JAX finds"
    parser.add_argument("--devices-per-process", type=count, metavar="D", help=cpus)
    parser.add_argument("--method", choices=METHODS, default="variance", help="how gradients are exchanged")
    parser.add_argument("--alpha", type=real, default=1.5, help="criterion of variance")
    parser.add_argument("--density", type=real, default=0.01, help="fraction of the entries that top_k sends")
    parser.add_argument("--steps", type=count, default=300, help="training steps")
    parser.add_argument("--batch", type=count, default=32, help="images per worker and step")
    parser.add_argument("--learning-rate", type=real, default=2e-3, help="of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and batches, the same for all")
    args = parser.parse_args()
    launch.check_options(parser, args)
    if args.local and not args.devices_per_process:
        args.devices_per_process = 1
    return args


def main() -> int:
    args = parse_options()
    if args.devices_per_process:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices_per_process)
    return launch.run(args, train)


if __name__ == "__main__":
    sys.exit(main())
