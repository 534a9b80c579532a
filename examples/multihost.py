"""One training script for one machine or many: digits, data parallel, with compressed gradients.

Every machine runs this same script; JAX joins the processes, and the mesh has the devices of all of them. Each process
loads only its own workers' images. Process 0 prints. If a process dies, the others end too, within half a minute. With
--out, which all machines must share, training goes on from the last checkpoint with --resume.

    python examples/multihost.py                    # one process, to try the script
    python examples/multihost.py --local 2          # two processes on this machine's CPU
    python examples/multihost.py --coordinator 10.0.0.1:9876 --processes 2 --process 0    # on one machine, 10.0.0.1
    python examples/multihost.py --coordinator 10.0.0.1:9876 --processes 2 --process 1    # on another
    srun python examples/multihost.py --auto        # SLURM, Open MPI, Kubernetes, TPU slices: JAX finds the others
    python examples/multihost.py --help
"""

import argparse
import contextlib
import hashlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from common import launch
from common.checkpoints import Checkpoints
from common.cli import Parser, Problem, above_zero, from_zero, progress_bar, run_command
from common.images import load_digits
from common.mlp import Params, init_params, logits, loss_fn
from jax.experimental import multihost_utils

import gcjax

Labelled = tuple[np.ndarray, np.ndarray]  # images float32[n, 64], labels int32[n]
METHODS = {
    "dense": lambda args: gcjax.dense_compress(axis_name="data"),
    "power_sgd": lambda args: gcjax.power_sgd_compress(rank=2, key=jax.random.key(1), axis_name="data"),
    "top_k": lambda args: gcjax.top_k_compress(args.density, axis_name="data"),
    "variance": lambda args: gcjax.variance_compress(alpha=args.alpha, axis_name="data"),
}
SETTINGS = ("method", "alpha", "density", "steps", "batch", "learning_rate", "seed", "checkpoint_every")

# Below, only `own`, the batches and `hash_of_all` depend on the number of processes.


def load_shards(own: list[int], workers: int) -> tuple[list[Labelled], Labelled]:
    """Each own worker's training images, and the test images. Large data would be in one file for each worker.

    Args:
      own: numbers of this process's workers.
      workers: of all processes.
    """
    train, labels, test, test_labels = load_digits()
    train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    return [(train[w::workers], labels[w::workers]) for w in own], (test, test_labels)


def batches(shards: list[Labelled], own: list[int], size: int, seed: int) -> Iterator[Labelled]:
    """Yield this process's part of each batch, without end.

    A worker's samples do not depend on the number of processes.

    Args:
      shards: each own worker's images.
      own: numbers of this process's workers.
      size: images per worker.
      seed: the same on all processes.
    """
    rngs = [np.random.default_rng((seed, worker)) for worker in own]
    while True:
        parts = []
        for rng, (images, labels) in zip(rngs, shards, strict=True):
            chosen = rng.choice(len(images), size, replace=False)
            parts.append((images[chosen], labels[chosen]))
        yield np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def train(args: argparse.Namespace) -> None:
    """Train, once the processes are joined; process 0 prints a table."""
    workers, is_first = jax.device_count(), jax.process_index() == 0
    mesh = jax.make_mesh((workers,), ("data",))
    own = [worker for worker, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    shards, test = load_shards(own, workers)
    settings = {"workers": workers} | {name: getattr(args, name) for name in SETTINGS}
    gcjax.check_agreement(mesh, settings=settings, resume=args.resume)

    tx = optax.chain(METHODS[args.method](args), optax.adam(args.learning_rate))
    step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data")
    state = step.init(init_params(jax.random.key(args.seed)))
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    seconds, done, sent = [], 0, {"wire": 0.0, "dense": 0.0}  # bytes
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(args.out, settings)) if args.out else None
        if checkpoints:
            state, done, record = checkpoints.start(state, args.resume)
            sent = record or sent
        bar = stack.enter_context(progress_bar(initial=done, total=args.steps, unit="step", disable=not is_first))
        for batch in itertools.islice(batches(shards, own, args.batch, args.seed), done, args.steps):
            begin = time.perf_counter()
            placed = [jax.make_array_from_process_local_data(over_workers, part) for part in batch]
            state, metrics = step(state, placed)
            loss = float(metrics.loss.addressable_shards[0].data[0])  # of one worker; waits for the step
            seconds.append(time.perf_counter() - begin)
            info, done = gcjax.info(state.opt_state), done + 1
            sent = {"wire": sent["wire"] + info.wire_bytes, "dense": sent["dense"] + info.wire_ratio * info.wire_bytes}
            bar.set_postfix(loss=f"{loss:.3f}", wire_ratio=f"{info.wire_ratio:.1f}", refresh=False)
            bar.update()
            if checkpoints and (done % args.checkpoint_every == 0 or done == args.steps):
                checkpoints.save(done, state, sent)

    params = jax.device_get(state.params)  # each process has all of them
    digest = hash_of_all(params)
    if is_first:
        correct = np.argmax(logits(params, test[0]), axis=-1) == test[1]
        row = {
            "method": args.method,
            "processes": jax.process_count(),
            "workers": workers,
            "steps": args.steps,
            "test accuracy %": f"{100 * correct.mean():.2f}",
            "wire bytes/step/worker": f"{sent['wire'] / args.steps:,.0f}",
            "wire ratio": f"{sent['dense'] / max(sent['wire'], 1):.1f}" if workers > 1 else "-",
            "ms/step": f"{1e3 * np.median(seconds):.1f}" if seconds else "-",
        }
        print("  ".join(name.rjust(len(str(value))) for name, value in row.items()))
        print("  ".join(str(value).rjust(len(name)) for name, value in row.items()))
        print(f"Parameters are bit-equal on all processes: SHA-256 {digest[:16]}", flush=True)


def hash_of_all(params: Params) -> str:
    """SHA-256 of the parameters, in hex. Raises Problem if it differs between processes."""
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params))).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)).reshape(-1, 32)
    if (digests != digests[0]).any():
        raise Problem(f"the processes ended with different parameters: {[d.tobytes().hex()[:8] for d in digests]}")
    return digest.hex()


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(__doc__)
    count, real = above_zero(int), above_zero(float)
    launch.add_options(parser)
    parser.add_argument("--local", type=count, metavar="N", help="run N processes on this machine's CPU, a device each")
    cpus = "virtual CPU devices of each process, each a worker; without it all devices that JAX finds"
    parser.add_argument("--devices-per-process", type=count, metavar="D", help=cpus)
    parser.add_argument("--method", choices=METHODS, default="variance", help="how gradients are exchanged")
    parser.add_argument("--alpha", type=real, default=1.5, help="criterion of variance")
    parser.add_argument("--density", type=real, default=0.01, help="fraction of the entries that top_k sends")
    parser.add_argument("--steps", type=count, default=300, help="training steps")
    parser.add_argument("--batch", type=count, default=32, help="images per worker and step")
    parser.add_argument("--learning-rate", type=real, default=2e-3, help="of Adam")
    parser.add_argument("--seed", type=from_zero(int), default=0, help="of the parameters and batches")
    parser.add_argument("--out", type=Path, help="folder for checkpoints; without it there are none")
    text = "steps between checkpoints"
    parser.add_argument("--checkpoint-every", type=count, default=100, metavar="STEPS", help=text)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args(arguments)
    launch.check_options(parser, args)
    if args.resume and not args.out:
        parser.error("--resume needs --out, the folder with the checkpoints")
    return args


def main() -> int | None:
    """Run the command; return the exit status."""
    args = parse_options()
    if args.local and not args.coordinator:
        return launch.run_locally(args.local)
    if args.local or args.devices_per_process:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices_per_process or 1)
    launch.connect(args)
    return train(args)


if __name__ == "__main__":
    sys.exit(run_command(main))
