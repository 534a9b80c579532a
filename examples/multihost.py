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
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.cli import Parser, Problem, above_zero
from jax.experimental import multihost_utils
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import gcjax

METHODS = {
    "dense": lambda args: gcjax.dense_compress(axis_name="data"),
    "power_sgd": lambda args: gcjax.power_sgd_compress(rank=2, key=jax.random.key(1), axis_name="data"),
    "top_k": lambda args: gcjax.top_k_compress(args.density, axis_name="data"),
    "variance": lambda args: gcjax.variance_compress(alpha=args.alpha, axis_name="data"),
}
NAME = "multihost.py: "
RUNTIME = re.compile(r"[WEF]\d{4} .*(coordination_service|preemption_sync|client\.h|add_port)")  # the runtime's own log


# Training. Nothing here but `own`, the batches and the last lines knows of processes.


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
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(images, labels, stratify=labels, random_state=0)
    return [(train[w::workers], train_labels[w::workers]) for w in own], (test, test_labels)


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


# Joining the other processes.


def connect(args) -> None:
    """Join the other processes, or raise, after about `--wait` seconds."""
    if args.devices_per_process:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices_per_process)
    limits = {"heartbeat_timeout_seconds": args.heartbeat, "shutdown_timeout_seconds": args.heartbeat}
    if args.auto:
        try:
            jax.distributed.initialize(initialization_timeout=args.wait, **limits)
        except ValueError as error:
            text = f"--auto: JAX found no cluster ({error}). Give --coordinator, --processes and --process"
            raise Problem(text) from error
    if not args.coordinator:
        return
    host, port = split_address(args.coordinator)
    left = args.wait
    if args.process == 0:
        if listens("localhost", port):
            raise Problem(in_use(port))
    else:
        left -= wait_for(host, port, args.wait)
    if is_loopback(host):
        limits["coordinator_bind_address"] = args.coordinator  # by default the coordinator listens on every interface
    limits["initialization_timeout"] = max(int(left) - 5, 5)  # JAX waits 5 seconds longer than it is told
    try:
        jax.distributed.initialize(args.coordinator, args.processes, args.process, **limits)
    except jax.errors.JaxRuntimeError as error:
        raise Problem(in_use(port) if "start RPC server" in str(error) else str(error)) from error
    if jax.default_backend() == "cpu":
        check_own_name(host)
    if jax.process_count() != args.processes:
        raise Problem(
            f"--processes {args.processes} here, but process 0 expects {jax.process_count()}: give all the same number"
        )


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def in_use(port: int) -> str:
    return (
        f"port {port} of this machine is in use, perhaps by another training or one that has not ended yet. Choose "
        "another port in --coordinator, the same for all processes"
    )


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def wait_for(host: str, port: int, seconds: float) -> float:
    """Wait until somebody listens at the coordinator's address; the seconds that took."""
    begin = time.monotonic()
    while not listens(host, port):
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            raise Problem(
                f"--coordinator: the host name {host!r} cannot be resolved ({error.strerror}). Give the address of the "
                "machine that runs process 0"
            ) from error
        if time.monotonic() - begin > seconds:
            raise Problem(
                f"nobody listened at --coordinator {host}:{port} within {seconds:g} seconds. Is process 0 running "
                "there, with the same --coordinator? Does a firewall close the port? --wait gives it more time"
            )
        time.sleep(0.2)
    return time.monotonic() - begin


def check_own_name(coordinator: str) -> None:
    """On CPUs the processes exchange data with gloo, which tells the others the address of this machine's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address == "no address" or (is_loopback(address) and not is_loopback(coordinator)):
        raise Problem(
            f"this machine's name {name!r} resolves to {address}, which gloo would tell the other machines to connect "
            f"to. Put a line with the address that they see and {name!r} into /etc/hosts"
        )


# When something goes wrong. If a process dies, the others notice in one of two ways. Inside a collective: the exchange
# raises, on CPUs at once. Elsewhere: the runtime misses heartbeats, or its connection to process 0, and aborts the
# process, which no Python code can catch. So a process here is a child of one that watches it and can still speak.


def work(args) -> None:
    """Train in this process. A failure ends it at once: leaving in an orderly way means waiting for the others."""
    try:
        connect(args)
        if jax.process_index():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints, too
        train(args)
        return
    except Problem as problem:
        explain(str(problem))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        text = str(error).split("\n")[0]
        if isinstance(error, RuntimeError) and re.search("do not agree|never came", text):  # as gcjax.check_agreement
            explain(text)
            sys.exit(1)  # in an orderly way: this is raised on all of them, and all may say it
        if args.child and re.search("gloo|nccl|socket|connection|unavailable|heartbeat", text, re.IGNORECASE):
            explain(lost(text))
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def explain(text: str) -> None:
    print(textwrap.fill(NAME + text, 110, break_long_words=False, break_on_hyphens=False), file=sys.stderr, flush=True)


def lost(said: str) -> str:
    return (
        "lost another process: it has died or cannot be reached any more, so training stops here too. The cause is "
        "where this was not printed: look there for an error, a kill for lack of memory, a broken link. Then start "
        f"all processes again. The runtime said: {textwrap.shorten(said, 200, placeholder=' ...')}"
    )


def missing(args) -> str:
    return (
        f"not all {args.processes or ''} processes came together at {args.coordinator or 'the coordinator'} in time. "
        "Start every one of them, with the same --coordinator and --processes, and with --process 0, 1, ..., each "
        f"once; what listens there must be process 0 and nothing else. --wait gives them more than {args.wait} seconds"
    )


def supervise(commands, args) -> int:
    """Run processes of this machine to their end. When one fails, say why and end the rest."""
    children = [subprocess.Popen(c, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    ended: queue.SimpleQueue = queue.SimpleQueue()
    live = len(children) == 1
    watches = [threading.Thread(target=watch, args=(i, child, live, ended)) for i, child in enumerate(children)]
    for thread in watches:
        thread.start()
    try:
        for _ in children:
            number, status, errors, log, explained = ended.get()
            if not live:
                sys.stderr.write(errors)
            if status:
                break
    except KeyboardInterrupt:
        status, log, explained = 130, "", True
    for child, thread in zip(children, watches, strict=True):
        child.kill()
        thread.join()
        child.stdin.close()
    if status == 0:
        return 0
    said = re.search(r"absl::Status: (.*?)(\n\n|\n\*\*\*|$)", log, re.DOTALL)
    if not explained and "RegisterTask" in log:
        explain(missing(args))
    elif not explained and said:
        explain(lost(said[1]))
    elif not explained and status < 0:
        number = number if args.local else args.process
        explain(f"process {number} was ended by {signal.Signals(-status).name} (by the system, if memory ran out)")
    elif not explained:
        sys.stderr.write(log)
    return 130 if status == 130 else 1


def watch(number: int, child, live: bool, ended) -> None:
    """Collect what a child writes to its standard error: its errors, and apart from them the runtime's log."""
    errors, log, quiet, explained = [], [], False, False
    with child.stderr:
        for line in child.stderr:
            explained |= line.startswith(NAME)
            quiet = not line.startswith(NAME) and (quiet or bool(RUNTIME.match(line)))
            (log if quiet else errors).append(line)
            if live and not quiet:
                sys.stderr.write(line)
    ended.put((number, child.wait(), "".join(errors), "".join(log), explained))


def end_with_parent() -> None:
    """The pipe from the parent closes when it dies, however it dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def address(text: str) -> str:
    split_address(text)
    return text


def parse_options():
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--coordinator", type=address, metavar="HOST:PORT", help="where process 0 runs; any free port")
    parser.add_argument("--processes", type=count, help="number of processes, the same for all")
    parser.add_argument("--process", type=int, help="number of this one, from 0")
    parser.add_argument("--auto", action="store_true", help="let JAX find the three (SLURM, Open MPI, TPU slices)")
    parser.add_argument("--local", type=count, metavar="N", help="run N processes on this machine's CPU")
    cpus = "virtual CPU devices of each process, each a worker; 1 with --local; without it all devices that JAX finds"
    parser.add_argument("--devices-per-process", type=count, metavar="D", help=cpus)
    parser.add_argument("--wait", type=count, default=10, metavar="SECONDS", help="for the other processes to start")
    parser.add_argument("--heartbeat", type=count, default=10, metavar="SECONDS", help="of silence that mean death")
    parser.add_argument("--method", choices=METHODS, default="variance", help="how gradients are exchanged")
    parser.add_argument("--alpha", type=real, default=1.5, help="criterion of variance")
    parser.add_argument("--density", type=real, default=0.01, help="fraction of the entries that top_k sends")
    parser.add_argument("--steps", type=count, default=300, help="training steps")
    parser.add_argument("--batch", type=count, default=32, help="images per worker and step")
    parser.add_argument("--learning-rate", type=real, default=2e-3, help="of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and batches, the same for all")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    joined = [args.coordinator, args.processes, args.process]
    if any(x is not None for x in joined) and None in joined:
        parser.error("--coordinator, --processes and --process go together")
    if not args.child and bool(args.coordinator) + args.auto + bool(args.local) > 1:
        parser.error("--coordinator, --auto and --local exclude each other")
    if args.process is not None and not 0 <= args.process < args.processes:
        parser.error(f"--process must be from 0 to {args.processes - 1}, --processes less one; got {args.process}")
    if args.local and not args.devices_per_process:
        args.devices_per_process = 1
    return args


def main() -> int:
    args = parse_options()
    command = [sys.executable, *sys.argv, "--child"]
    if args.child:
        threading.Thread(target=end_with_parent, daemon=True).start()
    elif args.local:
        with socket.socket() as held:  # bound but not listening: JAX can have the port, no other program is given it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            join = [f"--coordinator=127.0.0.1:{held.getsockname()[1]}", f"--processes={args.local}"]
            return supervise([[*command, *join, f"--process={i}"] for i in range(args.local)], args)
    elif args.coordinator or args.auto:
        return supervise([command], args)
    work(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
