"""SwarmSGD with real processes that never wait for each other: digits, MPI one-sided windows, one command.

Every process (node) trains with JAX at its own pace on its own part of the images. After `--local-steps` steps it reads
a random partner's communication copy and moves both copies to their average, while the partner goes on; the partner
meets the average when it has finished its own local steps (the non-blocking algorithm of Nadiradze et al., 2021).

    python examples/swarm_mpi.py --nodes 4                     # four processes on this machine
    python examples/swarm_mpi.py --nodes 4 --slow 3:5          # one of them five times slower
    python examples/swarm_mpi.py --nodes 4 --kill 2:5          # one is killed after five seconds
    python examples/swarm_mpi.py --nodes 8 --hostfile hosts    # on the machines listed there, by ssh
    python examples/swarm_mpi.py --help

What survives. On one machine the copies are in shared memory, and MPI reads and writes them without the other process:
one that is slow, stopped or killed holds up nobody (killed: the node itself, the process that says "--process work").
Between machines MPI's progress thread answers for a process that is slow, but MPI cannot recover from a dead one: who
reads from it next hangs or fails. That part has been tried over TCP within one machine only.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common.cli import Parser, above_zero

SEQUENCE, STEPS, BEAT, STATE = range(4)  # int64 words at the head of a node's memory, followed by its copy, float32
HEADER = 64  # bytes
RUNNING, DONE, REPORTED = range(3)


class Board:
    """The communication copies of all nodes, in memory that every node reads and writes without asking.

    No torn reads: a copy has a sequence number, odd while somebody writes. A writer takes it from even to odd by an
    atomic compare-and-swap, so that there is one at a time. A reader that finds it odd, or changed when it has read,
    drops what it has read. Nobody waits for a number to change: what is busy is skipped.
    """

    def __init__(self, comm, start: np.ndarray):
        from mpi4py import MPI

        self._mpi, self.rank, self.size = MPI, comm.rank, len(start)
        self._window = MPI.Win.Allocate(HEADER + 4 * self.size, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)  # shared by all, for ever: it excludes nobody
        self._put(self.rank, 0, np.zeros(HEADER // 8, np.int64))
        self._put(self.rank, HEADER, start)

    def header(self, rank: int) -> np.ndarray:
        """The words of a node, int64."""
        return self._get(rank, 0, np.empty(HEADER // 8, np.int64))

    def say(self, word: int, value: int) -> None:
        """Set a word of this node; it alone writes them, but for the sequence number."""
        self._put(self.rank, 8 * word, np.array([value], np.int64))

    def read(self, rank: int) -> np.ndarray | None:
        """A node's copy, float32; None while it is being written."""
        before = self._sequence(rank)
        if before % 2:
            return None
        copy = self._get(rank, HEADER, np.empty(self.size, np.float32))
        return copy if self._sequence(rank) == before else None

    def add(self, rank: int, change: np.ndarray) -> bool:
        """Add to a node's copy; False, and nothing done, while somebody else writes."""
        sequence = self._sequence(rank)
        if sequence % 2 or not self._swap(rank, sequence, sequence + 1):
            return False
        copy = self._get(rank, HEADER, np.empty(self.size, np.float32))
        self._put(rank, HEADER, copy + change)
        self._swap(rank, sequence + 1, sequence + 2)
        return True

    def add_to_own(self, change: np.ndarray, live: np.ndarray, patience: float) -> np.ndarray:
        """Add to this node's copy, and return it. Others write for microseconds; one that died writing left it odd.

        Then, after `patience` seconds, the copy is replaced by `live + change`. A writer that was only stopped for so
        long and goes on in the midst of its write can tear one read.
        """
        begin = time.monotonic()
        while not self.add(self.rank, change):
            sequence = self._sequence(self.rank)
            if time.monotonic() - begin > patience and sequence % 2 and self._swap(self.rank, sequence, sequence + 2):
                self._put(self.rank, HEADER, live + change)
                self._swap(self.rank, sequence + 2, sequence + 3)
                break
        while (copy := self.read(self.rank)) is None and time.monotonic() - begin < 2 * patience:
            pass
        return live + change if copy is None else copy

    def close(self) -> None:
        """Waits for all."""
        self._window.Unlock_all()
        self._window.Free()

    def _sequence(self, rank: int) -> int:
        found = np.empty(1, np.int64)
        self._window.Fetch_and_op(np.zeros(1, np.int64), found, rank, 8 * SEQUENCE, self._mpi.NO_OP)
        self._window.Flush(rank)
        return int(found[0])

    def _swap(self, rank: int, old: int, new: int) -> bool:
        found = np.empty(1, np.int64)
        new_word, old_word = np.array([new], np.int64), np.array([old], np.int64)
        self._window.Compare_and_swap(new_word, old_word, found, rank, 8 * SEQUENCE)
        self._window.Flush(rank)
        return int(found[0]) == old

    def _get(self, rank: int, at: int, into: np.ndarray) -> np.ndarray:
        self._window.Get([into, self._mpi.BYTE], rank, [at, into.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)
        return into

    def _put(self, rank: int, at: int, values: np.ndarray) -> None:
        self._window.Put([values, self._mpi.BYTE], rank, [at, values.nbytes, self._mpi.BYTE])
        self._window.Flush(rank)


class Others:
    """Who is alive: whose beat has changed in the last `patience` seconds, or who says that it is done."""

    def __init__(self, board: Board, nodes: int, patience: float):
        self._board, self._patience, self.nodes = board, patience, nodes
        self._heard = [(-1, time.monotonic())] * nodes

    def alive(self, rank: int) -> bool:
        return self.state(rank) is not None

    def state(self, rank: int) -> int | None:
        """RUNNING, DONE or REPORTED; None of one that is silent."""
        header = self._board.header(rank)
        beat, now = int(header[BEAT]), time.monotonic()
        if beat != self._heard[rank][0]:
            self._heard[rank] = (beat, now)
        silent = header[STATE] == RUNNING and now - self._heard[rank][1] > self._patience
        return None if silent else int(header[STATE])


def load_digits_of(rank: int, nodes: int):
    """The training images of one node, and the test images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(images, labels, stratify=labels, random_state=0)
    return (train[rank::nodes], train_labels[rank::nodes]), (test, test_labels)


def make_network(args):
    """A network of one hidden layer, 9,610 parameters, as a flat vector; local steps; its accuracy."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree

    first, second = jax.random.split(jax.random.key(args.seed))
    params = {
        "hidden": {"w": jax.random.normal(first, (64, 128)) * math.sqrt(2 / 64), "b": jnp.zeros(128)},
        "out": {"w": jax.random.normal(second, (128, 10)) * math.sqrt(1 / 128), "b": jnp.zeros(10)},
    }
    start, unravel = ravel_pytree(params)
    tx = optax.sgd(args.learning_rate, momentum=0.9)

    def logits(params, images):
        hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
        return hidden @ params["out"]["w"] + params["out"]["b"]

    def loss_fn(x, images, labels):
        out = logits(unravel(x), images)
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    @jax.jit
    def step(x, opt_state, images, labels):
        loss, grad = jax.value_and_grad(loss_fn)(x, images, labels)
        updates, opt_state = tx.update(grad, opt_state)
        return optax.apply_updates(x, updates), opt_state, loss

    @jax.jit
    def accuracy(x, images, labels):
        return jnp.mean(jnp.argmax(logits(unravel(x), images), axis=-1) == labels)

    return np.asarray(start), tx.init(start), step, accuracy


def work(args) -> int:
    """One node, from its start to the report."""
    import mpi4py

    mpi4py.rc.finalize = False  # it would wait for the dead
    from mpi4py import MPI
    from tqdm import tqdm

    comm = MPI.COMM_WORLD
    rank, nodes = comm.rank, comm.size
    (images, labels), test = load_digits_of(rank, nodes)
    start, opt_state, step, accuracy = make_network(args)
    rng = np.random.default_rng((args.seed, rank))

    def batch():
        chosen = rng.choice(len(images), min(args.batch, len(images)), replace=False)
        return images[chosen], labels[chosen]

    step(start, opt_state, *batch())  # compiles
    board = Board(comm, start)
    comm.Barrier()  # the last time that anybody waits for all
    others = Others(board, nodes, args.patience)
    seconds_per_step = dict(args.slow).get(rank, 1.0) / args.pace
    dies = dict(args.kill).get(rank, math.inf)
    live, steps, met, busy = start, 0, 0, 0
    spent = []  # seconds of each exchange
    begin = time.monotonic()
    due = begin
    bar = tqdm(total=args.seconds, unit="s", file=sys.stdout, disable=rank > 0, bar_format="{l_bar}{bar}| {postfix}")
    while (now := time.monotonic()) < begin + args.seconds:
        if now - begin > dies:
            os.kill(os.getpid(), signal.SIGKILL)
        trained = live
        for _ in range(args.local_steps):
            trained, opt_state, loss = step(trained, opt_state, *batch())
            steps += 1
            board.say(BEAT, steps)
            due = max(due + seconds_per_step, time.monotonic() - seconds_per_step)
            time.sleep(max(0.0, min(due, begin + args.seconds) - time.monotonic()))
        update = np.asarray(trained) - live
        entered = time.monotonic()
        change = update
        partner = choose(rng, others, rank)
        if partner is not None:
            theirs, own = board.read(partner), board.read(rank)
            half = None if theirs is None or own is None else (theirs - own) / 2
            # What one copy loses the other gains, whoever else has added to them in between: their mean stays.
            if half is not None and board.add(partner, -half):
                change, met = update + half, met + 1
            else:
                busy += 1
        live = board.add_to_own(change, live, args.patience)
        board.say(STEPS, steps)
        spent.append(time.monotonic() - entered)
        bar.set_postfix_str(f"loss {float(loss):.3f}, {steps} steps", refresh=False)
        bar.update(min(time.monotonic() - begin, args.seconds) - bar.n)
    bar.close()
    took = time.monotonic() - begin
    own = {"rank": rank, "steps": steps, "steps_per_second": steps / took, "exchanges": met, "busy": busy}
    own |= {"exchange_ms": 1e3 * float(np.median(spent)), "slowest_exchange_ms": 1e3 * max(spent)}
    own["test_accuracy"] = float(accuracy(live, *test))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"swarm_node{rank}.json").write_text(json.dumps(own))
    board.say(STATE, DONE)
    states = report(args, board, others, rank, lambda x: float(accuracy(x, *test)))
    if None in states:
        time.sleep(0.5)  # the first to leave without MPI's farewell, which would wait for the dead, ends all
        os._exit(0)
    board.close()
    MPI.Finalize()
    return 0


def choose(rng, others: Others, rank: int) -> int | None:
    """A random node that is alive; None where there is none."""
    for partner in map(int, rng.permutation(others.nodes)):
        if partner != rank and others.alive(partner):
            return partner
    return None


def report(args, board: Board, others: Others, rank: int, accuracy) -> list:
    """Waits until all are done or silent; the first of the living sums up, the others wait for it. Their states."""
    ranks = range(others.nodes)
    while RUNNING in (states := [others.state(r) for r in ranks]):
        time.sleep(0.05)
    first = next(r for r in ranks if states[r] is not None)
    if first == rank:
        living = [r for r in ranks if states[r] is not None]
        copies = [board.read(r) for r in living]
        mean = np.mean([copy for copy in copies if copy is not None], axis=0)
        distance = float(np.sqrt(np.mean([np.sum((copy - mean) ** 2) for copy in copies if copy is not None])))
        found = [json.loads((args.out / f"swarm_node{r}.json").read_text()) for r in living if _is_here(args, r)]
        record = {"nodes": others.nodes, "lost": [r for r in ranks if states[r] is None], "results": found}
        record |= {"mean_model_accuracy": accuracy(mean), "consensus_distance": distance}
        record |= {"settings": {"pace": args.pace}}
        (args.out / "swarm_mpi.json").write_text(json.dumps(record, indent=1) + "\n")
        print(table(record), flush=True)
    board.say(STATE, REPORTED)
    deadline = time.monotonic() + 10 * args.patience
    while others.state(first) != REPORTED and time.monotonic() < deadline:
        time.sleep(0.05)
    return states


def _is_here(args, rank: int) -> bool:
    return (args.out / f"swarm_node{rank}.json").exists()  # not where nodes on other machines have no common folder


def table(record: dict) -> str:
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


def launch(args) -> int:
    """Run this script under mpiexec; 0 if a report was written, whoever died on the way."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        print("swarm_mpi.py: there is no mpiexec. Install one: pip install 'gcjax[mpi]'", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("swarm_*.json"):
        old.unlink()
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
        print(f"What mpiexec says of a bad termination is about the lost nodes, {lost}; the others have finished.")
    print(f"All figures: {result}")
    return 0


def watch(args) -> int:
    """Run the node in a process of its own, and outlive it.

    mpiexec ends all processes when it sees one die; told not to (-disable-auto-cleanup), it still does at times. So it
    sees this one, which shares the node's connection to it and stays until the others have finished.
    """
    status = subprocess.run([sys.executable, *sys.argv[:-1], "work"], close_fds=False).returncode
    if status < 0:  # killed
        time.sleep(args.seconds + 20 * args.patience)
    return abs(status)


def of_rank(text: str) -> tuple[int, float]:
    try:
        rank, value = text.split(":")
        return int(rank), above_zero(float)(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be NODE:NUMBER, such as 3:5, got {text!r}") from error


def parse_options():
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--nodes", type=count, default=4, help="processes")
    parser.add_argument("--hostfile", type=Path, help="machines, one a line, for mpiexec; this one alone without")
    parser.add_argument("--seconds", type=real, default=15.0, help="of training")
    pace = "steps a second of a node at most; keeps many processes on few cores from slowing each other"
    parser.add_argument("--pace", type=real, default=40.0, help=pace)
    each = {"type": of_rank, "action": "append", "default": []}
    parser.add_argument("--slow", **each, metavar="NODE:FACTOR", help="a node that takes so many times longer")
    parser.add_argument("--kill", **each, metavar="NODE:SECONDS", help="a node that is killed after so many seconds")
    parser.add_argument("--local-steps", type=count, default=2, help="steps between two exchanges")
    parser.add_argument("--batch", type=count, default=16, help="images a step")
    parser.add_argument("--learning-rate", type=real, default=0.05, help="of SGD with momentum 0.9, which stays local")
    parser.add_argument(
        "--patience", type=real, default=3.0, help="seconds of silence after which a node counts as lost"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and batches")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for swarm_mpi.json")
    parser.add_argument("--process", choices=("launch", "watch", "work"), default="launch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, pairs in (("--slow", args.slow), ("--kill", args.kill)):
        for rank, _ in pairs:
            if not 0 <= rank < args.nodes:
                parser.error(f"argument {name}: nodes are 0 to {args.nodes - 1}, got {rank}")
    if args.hostfile and not args.hostfile.is_file():
        parser.error(f"argument --hostfile: no such file: {str(args.hostfile)!r}")
    return args


def main() -> int:
    args = parse_options()
    return {"launch": launch, "watch": watch, "work": work}[args.process](args)


if __name__ == "__main__":
    sys.exit(main())
