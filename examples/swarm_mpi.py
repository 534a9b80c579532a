"""SwarmSGD on digits with real processes that never wait for each other, through MPI one-sided windows.

Every process (node) trains with JAX at its own pace on its own part of the images. After `--local-steps` steps it reads
a random partner's communication copy and moves both copies to their average, while the partner goes on; the partner
sees the average when it has finished its own local steps (the non-blocking algorithm of Nadiradze et al., 2021).

    python examples/swarm_mpi.py --nodes 4                     # four processes on this machine
    python examples/swarm_mpi.py --nodes 4 --slow 3:5          # one of them is five times slower
    python examples/swarm_mpi.py --help

The copies are in shared memory, and MPI reads and writes them without the other process, so a slow node holds up no
other. If a node dies, MPI ends all of them.
"""

import argparse
import collections
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common.board import Board
from common.cli import Parser, Problem, above_zero, aligned, from_zero, progress_bar, run_command

if TYPE_CHECKING:
    from common.mlp import FlatNetwork  # imports JAX, which the launcher does without

Labelled = tuple[np.ndarray, np.ndarray]  # images float32[n, 64], labels int32[n]


def work(args: argparse.Namespace) -> None:
    """Run one node, from its start to the report."""
    from common.images import load_digits
    from common.mlp import flat_network
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    images, labels, test, test_labels = load_digits()
    images, test = images.reshape(len(images), -1), test.reshape(len(test), -1)
    images, labels = images[comm.rank :: comm.size], labels[comm.rank :: comm.size]
    network = flat_network(args.seed, args.learning_rate)
    rng = np.random.default_rng((args.seed, comm.rank))

    def batch():
        chosen = rng.choice(len(images), min(args.batch, len(images)), replace=False)
        return images[chosen], labels[chosen]

    network.step(network.start, network.opt_state, *batch())  # compiles
    board = Board(comm, network.start)
    comm.Barrier()  # the last time that a node waits for another, until training ends
    live, record = train(args, board, comm.size, network, batch, rng)
    record["test_accuracy"] = float(network.accuracy(live, test, test_labels))
    records, copies = comm.gather(record), comm.gather(live)
    board.close()
    if comm.rank == 0:
        mean = np.mean(copies, axis=0)
        result = {"nodes": comm.size, "results": records, "settings": vars(args)}
        result["mean_model_accuracy"] = float(network.accuracy(mean, test, test_labels))
        result["consensus_distance"] = float(np.sqrt(np.mean([np.sum((copy - mean) ** 2) for copy in copies])))
        (args.out / "swarm_mpi.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
        print(table(result), flush=True)


def train(
    args: argparse.Namespace,
    board: Board,
    nodes: int,
    network: "FlatNetwork",
    batch: Callable[[], Labelled],
    rng: np.random.Generator,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Train this node for `args.seconds`, exchanging after every `args.local_steps` steps.

    Returns:
      The node's model float32[n], and its figures for the report.
    """
    seconds_per_step = dict(args.slow).get(board.rank, 1.0) / args.pace
    live, opt_state, steps = network.start, network.opt_state, 0
    outcomes: collections.Counter[str] = collections.Counter()
    spent = []  # seconds of each exchange
    begin = due = time.monotonic()
    end = begin + args.seconds
    bar = progress_bar(total=args.seconds, bar_format="{l_bar}{bar}| {postfix}", disable=board.rank > 0)
    while time.monotonic() < end:
        trained = live
        for _ in range(args.local_steps):
            trained, opt_state, loss = network.step(trained, opt_state, *batch())
            steps += 1
            due = max(due + seconds_per_step, time.monotonic() - seconds_per_step)
            time.sleep(max(0.0, min(due, end) - time.monotonic()))
        update = np.asarray(trained) - live
        exchange_begin = time.monotonic()
        half, outcome = average_with_partner(board, nodes, rng)
        live = board.add_to_own(update + half)
        outcomes[outcome] += 1
        spent.append(time.monotonic() - exchange_begin)
        bar.set_postfix_str(f"loss {float(loss):.3f}, {steps} steps", refresh=False)
        bar.update(min(time.monotonic() - begin, args.seconds) - bar.n)
    bar.close()
    record = {"rank": board.rank, "steps": steps, "steps_per_second": steps / (time.monotonic() - begin)}
    record |= {name: outcomes[name] for name in ("exchanges", "busy")}
    record |= {"exchange_ms": 1e3 * float(np.median(spent)), "slowest_exchange_ms": 1e3 * max(spent)}
    return live, record


def average_with_partner(board: Board, nodes: int, rng: np.random.Generator) -> tuple[np.ndarray | float, str]:
    """Move the copy of a random partner to the average with this node's copy.

    Returns:
      float32[n], to add to this node's copy, or 0; and the outcome: "exchanges", "busy" or "alone".
    """
    if nodes == 1:
        return 0.0, "alone"
    partner = (board.rank + int(rng.integers(1, nodes))) % nodes
    theirs, own = board.read(partner), board.read(board.rank)
    # One copy gains what the other loses, so that their mean stays, whatever other nodes add in between.
    half = None if theirs is None or own is None else (theirs - own) / 2
    if half is not None and board.add(partner, -half):
        return half, "exchanges"
    return 0.0, "busy"


def table(result: dict[str, Any]) -> str:
    """The report as text, with a row for each node."""
    rows = [("node", "steps", "steps/s", "exchanges", "busy", "exchange ms", "slowest", "test accuracy %")]
    for own in result["results"]:
        rates = (f"{own['steps_per_second']:.1f}", str(own["exchanges"]), str(own["busy"]))
        times = (f"{own['exchange_ms']:.2f}", f"{own['slowest_exchange_ms']:.1f}")
        rows.append((str(own["rank"]), str(own["steps"]), *rates, *times, f"{100 * own['test_accuracy']:.2f}"))
    accuracy = f"{100 * result['mean_model_accuracy']:.2f} %"
    distance = f"{result['consensus_distance']:.3f}"
    return f"\n{aligned(rows)}\nThe mean model: {accuracy}; consensus distance {distance}"


def launch(args: argparse.Namespace) -> int:
    """Run this script's nodes under mpiexec; return its exit status."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    for name, found in (("mpiexec", mpiexec), ("mpi4py", importlib.util.find_spec("mpi4py"))):
        if found is None:
            raise Problem(f"there is no {name}. Install it: pip install '.[mpi]'")
    args.out.mkdir(parents=True, exist_ok=True)
    command = [mpiexec, "-n", str(args.nodes), sys.executable, *sys.argv, "--node"]
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {single}"}
    status = subprocess.run(command, env=os.environ | variables).returncode
    if not status:
        print(f"All figures: {args.out / 'swarm_mpi.json'}")
    return status


def number_of_node(text: str) -> tuple[int, float]:
    """Parse NODE:NUMBER."""
    try:
        rank, value = text.split(":")
        return int(rank), above_zero(float)(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be NODE:NUMBER, such as 3:5, got {text!r}") from error


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(__doc__)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--nodes", type=count, default=4, help="processes")
    parser.add_argument("--seconds", type=real, default=15.0, help="of training")
    pace = "greatest steps per second of a node; keeps many processes on few cores from slowing each other"
    parser.add_argument("--pace", type=real, default=40.0, help=pace)
    slow = "a node that takes this many times longer; may be given several times"
    parser.add_argument("--slow", type=number_of_node, action="append", default=[], metavar="NODE:FACTOR", help=slow)
    parser.add_argument("--local-steps", type=count, default=2, help="steps between exchanges")
    parser.add_argument("--batch", type=count, default=16, help="images per step")
    parser.add_argument("--learning-rate", type=real, default=0.05, help="of SGD with momentum 0.9 (not exchanged)")
    parser.add_argument("--seed", type=from_zero(int), default=0, help="of the parameters and batches")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for swarm_mpi.json")
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int | None:
    """Run the command; return the exit status."""
    args = parse_options()
    return work(args) if args.node else launch(args)


if __name__ == "__main__":
    sys.exit(run_command(main))
