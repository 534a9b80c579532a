"""SwarmSGD on digits with real processes that never wait for each other, through MPI one-sided windows.

Every process (node) trains with JAX at its own pace on its own part of the images. After `--local-steps` steps it reads
a random partner's communication copy and moves both copies to their average, while the partner goes on; the partner
sees the average when it has finished its own local steps (the non-blocking algorithm of Nadiradze et al., 2021).

    python examples/swarm_mpi.py --nodes 4                     # four processes on this machine
    python examples/swarm_mpi.py --nodes 4 --slow 3:5          # one of them is five times slower
    python examples/swarm_mpi.py --nodes 4 --kill 2:5          # one is killed after five seconds
    python examples/swarm_mpi.py --nodes 8 --hostfile hosts    # on the machines listed there, by ssh
    python examples/swarm_mpi.py --help

Failures: on one machine the copies are in shared memory, and MPI reads and writes them without the other process. A
node that is slow, stopped or killed holds up no other (to kill one, kill its process with "--process work"). Between
machines MPI's progress thread answers for a slow node, but MPI cannot recover from a dead one: the next node that reads
from it hangs or fails. That part has been tried only over TCP within one machine.
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common.board import BEAT, DONE, REPORTED, RUNNING, STATE, STEPS, Board, Peers
from common.cli import Parser, Problem, above_zero, make_folder, run_command, seed
from tqdm import tqdm

if TYPE_CHECKING:
    from common.mlp import FlatNetwork  # imports JAX, which the launcher does without

Labelled = tuple[np.ndarray, np.ndarray]  # images float32[n, 64], labels int32[n]


def load_part(rank: int, nodes: int) -> tuple[Labelled, Labelled]:
    """The training images of one node, and the test images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(images, labels, stratify=labels, random_state=0)
    return (train[rank::nodes], train_labels[rank::nodes]), (test, test_labels)


def work(args: argparse.Namespace) -> int:
    """Run one node, from its start to the report."""
    import mpi4py

    mpi4py.rc.finalize = False  # it would wait for dead nodes
    from common.mlp import flat_network
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, nodes = comm.rank, comm.size
    (images, labels), test = load_part(rank, nodes)
    network = flat_network(args.seed, args.learning_rate)
    rng = np.random.default_rng((args.seed, rank))

    def batch():
        chosen = rng.choice(len(images), min(args.batch, len(images)), replace=False)
        return images[chosen], labels[chosen]

    network.step(network.start, network.opt_state, *batch())  # compiles
    board = Board(comm, network.start)
    comm.Barrier()  # the last time that a node waits for all
    peers = Peers(board, nodes, args.patience)
    live, record = train(args, board, peers, network, batch, rng)
    record["test_accuracy"] = float(network.accuracy(live, *test))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"swarm_node{rank}.json").write_text(json.dumps(record))
    board.set_word(STATE, DONE)
    states = report(args, board, peers, lambda x: float(network.accuracy(x, *test)))
    if None in states:
        time.sleep(0.5)  # MPI.Finalize would wait for dead nodes; the first node to exit without it ends all
        os._exit(0)
    board.close()
    MPI.Finalize()
    return 0


def train(
    args: argparse.Namespace,
    board: Board,
    peers: Peers,
    network: "FlatNetwork",
    batch: Callable[[], Labelled],
    rng: np.random.Generator,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Train this node for `args.seconds`, exchanging after every `args.local_steps` steps.

    Returns:
      The node's model float32[n], and its figures for the report.
    """
    seconds_per_step = dict(args.slow).get(board.rank, 1.0) / args.pace
    dies = dict(args.kill).get(board.rank, math.inf)
    live, opt_state, steps = network.start, network.opt_state, 0
    outcomes: collections.Counter[str] = collections.Counter()
    spent = []  # seconds of each exchange
    begin = due = time.monotonic()
    bar_format, silent = "{l_bar}{bar}| {postfix}", board.rank > 0
    bar = tqdm(total=args.seconds, unit="s", file=sys.stdout, disable=silent, bar_format=bar_format)
    while (now := time.monotonic()) < begin + args.seconds:
        if now - begin > dies:
            os.kill(os.getpid(), signal.SIGKILL)
        trained = live
        for _ in range(args.local_steps):
            trained, opt_state, loss = network.step(trained, opt_state, *batch())
            steps += 1
            board.set_word(BEAT, steps)
            due = max(due + seconds_per_step, time.monotonic() - seconds_per_step)
            time.sleep(max(0.0, min(due, begin + args.seconds) - time.monotonic()))
        update = np.asarray(trained) - live
        exchange_begin = time.monotonic()
        half, outcome = average_with_partner(board, peers, rng)
        live = board.add_to_own(update if half is None else update + half, live, args.patience)
        board.set_word(STEPS, steps)
        outcomes[outcome] += 1
        spent.append(time.monotonic() - exchange_begin)
        bar.set_postfix_str(f"loss {float(loss):.3f}, {steps} steps", refresh=False)
        bar.update(min(time.monotonic() - begin, args.seconds) - bar.n)
    bar.close()
    rate = steps / (time.monotonic() - begin)
    record = {"rank": board.rank, "steps": steps, "steps_per_second": rate}
    record |= {name: outcomes[name] for name in ("exchanges", "busy")}
    record |= {"exchange_ms": 1e3 * float(np.median(spent)), "slowest_exchange_ms": 1e3 * max(spent)}
    return live, record


def average_with_partner(board: Board, peers: Peers, rng: np.random.Generator) -> tuple[np.ndarray | None, str]:
    """Move the copy of a random partner to the average with this node's copy.

    Returns:
      float32[n], what to add to this node's copy, or None; and the outcome: "exchanges", "busy" or "alone".
    """
    partner = peers.choose(rng)
    if partner is None:
        return None, "alone"
    theirs, own = board.read(partner), board.read(board.rank)
    # One copy gains what the other loses, so that their mean stays, whatever other nodes add in between.
    half = None if theirs is None or own is None else (theirs - own) / 2
    if half is not None and board.add(partner, -half):
        return half, "exchanges"
    return None, "busy"


def report(
    args: argparse.Namespace, board: Board, peers: Peers, accuracy: Callable[[np.ndarray], float]
) -> list[int | None]:
    """Wait until every node is done or lost. Then the first of the living writes the report, the others wait for it.

    Returns:
      The states of the nodes.
    """
    ranks = range(peers.nodes)
    while RUNNING in (states := [peers.state(r) for r in ranks]):
        time.sleep(0.05)
    first = next(r for r in ranks if states[r] is not None)
    if first == board.rank:
        living = [r for r in ranks if states[r] is not None]
        copies = [copy for r in living if (copy := board.read(r)) is not None]
        mean = np.mean(copies, axis=0)
        distance = float(np.sqrt(np.mean([np.sum((copy - mean) ** 2) for copy in copies])))
        # Nodes on other machines may not share this folder.
        files = [file for r in living if (file := args.out / f"swarm_node{r}.json").exists()]
        results = [json.loads(file.read_text()) for file in files]
        record = {"nodes": peers.nodes, "lost": [r for r in ranks if states[r] is None], "results": results}
        record |= {"mean_model_accuracy": accuracy(mean), "consensus_distance": distance}
        record |= {"settings": {"pace": args.pace}}
        (args.out / "swarm_mpi.json").write_text(json.dumps(record, indent=1) + "\n")
        print(table(record), flush=True)
    board.set_word(STATE, REPORTED)
    deadline = time.monotonic() + 10 * args.patience
    while peers.state(first) != REPORTED and time.monotonic() < deadline:
        time.sleep(0.05)
    return states


def table(record: dict[str, Any]) -> str:
    """The report as aligned text, with a row for each node."""
    rows = [("node", "steps", "steps/s", "exchanges", "busy", "exchange ms", "slowest", "test accuracy %")]
    for own in record["results"]:
        rates = (f"{own['steps_per_second']:.1f}", own["exchanges"], own["busy"])
        times = (f"{own['exchange_ms']:.2f}", f"{own['slowest_exchange_ms']:.1f}")
        rows.append((own["rank"], own["steps"], *rates, *times, f"{100 * own['test_accuracy']:.2f}"))
    text = "\n".join(
        "  ".join(str(cell).rjust(len(name)) for cell, name in zip(row, rows[0], strict=True)) for row in rows
    )
    lost = f"; lost: {', '.join(map(str, record['lost']))}" if record["lost"] else ""
    accuracy = f"{100 * record['mean_model_accuracy']:.2f} %"
    return f"\n{text}\nThe mean model: {accuracy}; consensus distance {record['consensus_distance']:.3f}{lost}"


def launch(args: argparse.Namespace) -> int:
    """Run this script under mpiexec. Returns 0 if a report was written, even if nodes died."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    for name, found in (("mpiexec", mpiexec), ("mpi4py", importlib.util.find_spec("mpi4py"))):
        if found is None:
            raise Problem(f"there is no {name}. Install it: pip install '.[mpi]'")
    make_folder(args.out)
    for old in (args.out / "swarm_mpi.json", *args.out.glob("swarm_node[0-9]*.json")):
        old.unlink(missing_ok=True)
    where = ["-f", str(args.hostfile)] if args.hostfile else []
    command = [mpiexec, *where, "-n", str(args.nodes), sys.executable, *sys.argv, "--process", "watch"]
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {single}"}
    if args.hostfile:
        variables["MPICH_ASYNC_PROGRESS"] = "1"  # a thread of each process answers while JAX computes
    status = subprocess.run(command, env=os.environ | variables).returncode
    result = args.out / "swarm_mpi.json"
    if not result.exists():
        return status or 1
    if lost := json.loads(result.read_text())["lost"]:
        print(f"mpiexec's message about bad termination concerns the lost nodes {lost}; the others have finished.")
    print(f"All figures: {result}")
    return 0


def watch(args: argparse.Namespace) -> int:
    """Run the node in a process of its own, and outlive it.

    mpiexec ends all processes when it sees one die, at times even with -disable-auto-cleanup. So mpiexec sees this
    process, which shares the node's connection to it and stays until the others have finished.
    """
    status = subprocess.run([sys.executable, *sys.argv[:-1], "work"], close_fds=False).returncode
    if status < 0:  # killed
        time.sleep(args.seconds + 20 * args.patience)
    return abs(status)


def number_of_node(text: str) -> tuple[int, float]:
    """Parse NODE:NUMBER."""
    try:
        rank, value = text.split(":")
        return int(rank), above_zero(float)(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be NODE:NUMBER, such as 3:5, got {text!r}") from error


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--nodes", type=count, default=4, help="processes")
    parser.add_argument("--hostfile", type=Path, help="machines for mpiexec, one per line; this one if left out")
    parser.add_argument("--seconds", type=real, default=15.0, help="of training")
    pace = "greatest steps per second of a node; keeps many processes on few cores from slowing each other"
    parser.add_argument("--pace", type=real, default=40.0, help=pace)
    each: dict[str, Any] = {"type": number_of_node, "action": "append", "default": []}
    parser.add_argument("--slow", **each, metavar="NODE:FACTOR", help="a node that takes this many times longer")
    parser.add_argument("--kill", **each, metavar="NODE:SECONDS", help="a node that is killed after this many seconds")
    parser.add_argument("--local-steps", type=count, default=2, help="steps between exchanges")
    parser.add_argument("--batch", type=count, default=16, help="images per step")
    parser.add_argument("--learning-rate", type=real, default=0.05, help="of SGD with momentum 0.9 (not exchanged)")
    parser.add_argument(
        "--patience", type=real, default=3.0, help="seconds of silence after which a node counts as lost"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the parameters and batches")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for swarm_mpi.json")
    parser.add_argument("--process", choices=("launch", "watch", "work"), default="launch", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name, pairs in (("--slow", args.slow), ("--kill", args.kill)):
        for rank, _ in pairs:
            if not 0 <= rank < args.nodes:
                parser.error(f"argument {name}: nodes are 0 to {args.nodes - 1}, got {rank}")
    if args.hostfile and not args.hostfile.is_file():
        parser.error(f"argument --hostfile: no such file: {str(args.hostfile)!r}")
    return args


def main() -> int:
    """Run the command; return the exit status."""
    args = parse_options()
    return {"launch": launch, "watch": watch, "work": work}[args.process](args)


if __name__ == "__main__":
    sys.exit(run_command(main))
