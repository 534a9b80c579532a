"""Training killed, checkpoints and data files damaged, all at random: how often wrong values or tracebacks follow.

    python -m bench.damage                     # everything, about ten minutes
    python -m bench.damage --quick             # a hundredth of it, writes nothing
    python -m bench.damage --rows "flipped bits"
    python -m bench.damage --report            # table again, from the result file

Finished rows are kept in the result file, so an interrupted table continues where it stopped.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from bench import machine, provenance

sys.path.insert(0, str(machine.ROOT / "examples"))
TRAINING = "--devices-per-process 2 --batch 8 --checkpoint-every 5"
METHODS = ("variance", "power_sgd", "top_k", "dense")
KILLS_OF_A_RUN = 7
METADATA = re.compile(r"metadata|METADATA|SHA256SUMS|manifest|_sharding|commit_success")
Outcome = tuple[str, str | None]  # what came of it, and the failure


# Training.


def train(folder: Path, *options: str) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(machine.ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(machine.ROOT / "examples" / "multihost.py"), *TRAINING.split(), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, f"--out={folder}"], env=os.environ | {"PYTHONPATH": path}, **pipes)


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """The lines of results, and the errors."""
    out, errors = process.communicate(timeout=600)
    return (re.findall(r"SHA-256 \w+", out) or ["no result"])[0], errors


def kills(count: int, draw: random.Random) -> Iterator[Outcome]:
    """Runs that are killed some times each, at random, and then go on to their end."""
    for run in range(max(count // KILLS_OF_A_RUN, 1)):
        with tempfile.TemporaryDirectory() as folder:
            cut, whole, failure = Path(folder) / "cut", Path(folder) / "whole", None
            method = f"--method={METHODS[run % len(METHODS)]}"
            here = min(KILLS_OF_A_RUN, count)
            made = 0
            while made < here and failure is None:
                steps = [path.name for path in cut.glob("*") if path.name.isdigit()]
                resume = ["--resume"] if steps else []
                process = train(cut, method, "--steps=1000000", *resume)
                shown = ""
                while "loss=" not in shown and (character := process.stdout.read(1)):
                    shown += character
                time.sleep(draw.uniform(0, 2))
                ended = process.poll() is not None
                process.kill()
                _, errors = process.communicate()
                if ended:
                    failure = f"the run ended by itself: {errors[-300:]}"
                made += 1
            newest = max((int(path.name) for path in cut.glob("*") if path.name.isdigit()), default=0)
            last = f"--steps={newest + 20}"
            resume = ["--resume", "--allow", "steps"] if newest else []
            found, errors = finish(train(cut, method, last, *resume))
            expected, _ = finish(train(whole, method, last, "--checkpoint-every=1000000"))
            if failure is None and (found != expected or found == "no result"):
                failure = f"{found} after kills, {expected} without: {errors[-300:]}"
        for number in range(made):
            yield ("goes on to the bit", None) if failure is None else ("goes wrong", failure if number == 0 else None)


# Checkpoints.


class Sound:
    """Two checkpoints of a training step on two workers, in a folder."""

    def __init__(self, folder: Path):
        import jax
        import jax.numpy as jnp
        import optax
        from common.checkpoints import Checkpoints, make_record

        import gcjax

        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        tx = optax.chain(gcjax.variance_compress(alpha=1.0, axis_name="data"), optax.adam(1e-2))
        step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), tx, mesh)
        self.fresh = state = step.init(jnp.ones((40, 5)))
        self.folder, self.digests = folder, {}
        with Checkpoints(folder) as checkpoints:
            for number in (1, 2):
                state, _ = step(state, jax.random.normal(jax.random.key(number), (8, 40)))
                checkpoints.save(number, state, make_record(state, {"batch": 8}, rows=[number]))
                self.digests[number] = content_of(state)

    def outcome(self, folder: Path) -> Outcome:
        """What is restored from a copy in which the newest checkpoint was damaged."""
        from common.checkpoints import Checkpoints

        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), Checkpoints(folder) as checkpoints:
                state, record = checkpoints.restore(self.fresh, {"batch": 8}, [])
        except Exception as error:
            return "error", f"{type(error).__name__}: {str(error)[:200]}"
        (number,) = record["rows"]
        if content_of(state) != self.digests[number]:
            return "other values", f"restored values are not those of step {number}"
        if number == 1 and "the checkpoint of step 2 is damaged: " not in said.getvalue():
            return "silent", "the one before was taken without a word"
        return ("the one before" if number == 1 else "as it was"), None


def content_of(state: object) -> list[bytes]:
    import jax
    import numpy as np

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def flip_bit(folder: Path, draw: random.Random) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut_file(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
    if draw.random() < 0.3:
        path.unlink()
    else:
        os.truncate(path, int(path.stat().st_size * draw.choice([0, draw.random()])))


def damage_metadata(folder: Path, draw: random.Random) -> None:
    """Another number, another letter, a line twice, noise, or the file of the other checkpoint."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and METADATA.search(path.name)]
    path = draw.choice(found)
    content = path.read_bytes()
    kind = draw.randrange(4)
    if kind == 0:
        digits = [m.start() for m in re.finditer(rb"\d", content)] or [0]
        place = draw.choice(digits)
        content = content[:place] + str(draw.randrange(10)).encode() + content[place + 1 :]
    elif kind == 1:
        lines = content.splitlines(keepends=True) or [b""]
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
        content = b"".join(lines)
    elif kind == 2:
        content = draw.randbytes(max(len(content), 1))
    else:
        other = folder.parent / "1" / path.relative_to(folder)
        content = other.read_bytes() if other.is_file() else b"{}"
    path.write_bytes(content)


def checkpoints(damage, count: int, draw: random.Random) -> Iterator[Outcome]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    with tempfile.TemporaryDirectory() as folder:
        sound, copy = Sound(Path(folder) / "sound"), Path(folder) / "copy"
        for _ in range(count):
            shutil.copytree(sound.folder, copy)
            damage(copy / "2", draw)
            yield sound.outcome(copy)
            shutil.rmtree(copy)


# Data files.


def damaged_pickle(content: bytes, draw: random.Random) -> bytes:
    """Flipped bits near the structure or anywhere, a cut, a piece twice, or noise inside."""
    end = draw.choice([120, len(content)])  # the structure stands at the beginning, the rest is pixels
    kind, place = draw.randrange(5), draw.randrange(end)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + draw.randbytes(draw.randrange(1, 9)) + content[place:]
    if kind == 2:
        return content[:place] + content[place + draw.randrange(1, 9) :]
    if kind == 3:
        return content[:place] + content[draw.randrange(end) :]
    found = bytearray(content)
    for _ in range(draw.randrange(1, 9)):
        found[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(found)


def pickles(count: int, draw: random.Random) -> Iterator[Outcome]:
    import numpy as np
    from common.cli import Problem
    from common.images import load_cifar10

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "cifar-10-batches-py"
        folder.mkdir()
        contents = []
        for protocol in (2, 3, 4):
            batch = {b"data": rng.integers(0, 256, (4, 3072), np.uint8), b"labels": rng.integers(0, 10, 4).tolist()}
            contents.append(pickle.dumps(batch, protocol))
        for file in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
            (folder / file).write_bytes(contents[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            (folder / "data_batch_3").write_bytes(damaged_pickle(draw.choice(contents), draw))
            try:
                images, labels, *_ = load_cifar10(folder)
            except Problem as problem:
                named = "data_batch_3" in str(problem) and "\n" not in str(problem)
                yield "named", None if named else f"the message is {str(problem)[:200]!r}"
                continue
            except Exception as error:
                yield "error", f"{type(error).__name__}: {str(error)[:200]}"
                continue
            right = images.dtype == np.uint8 and images.shape == (len(labels), 32, 32, 3) and len(labels) > 16
            right &= labels.dtype == np.int32 and 0 <= labels.min() <= labels.max() <= 9
            more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            failure = None if right else "images or labels of other types"
            yield "read, with other pixels or labels", failure if more < 100_000 else f"{more} kB of memory more"


ROWS = {
    "SIGKILL while training and saving, then --resume": (14, kills),
    "flipped bits of a checkpoint": (400, lambda *args: checkpoints(flip_bit, *args)),
    "cut, emptied and removed files of a checkpoint": (200, lambda *args: checkpoints(cut_file, *args)),
    "damaged metadata of a checkpoint": (200, lambda *args: checkpoints(damage_metadata, *args)),
    "damaged CIFAR-10 pickles": (4000, pickles),
}


def measure(row: str, count: int, seed: int) -> dict:
    outcomes: dict[str, int] = {}
    failures = []
    work = ROWS[row][1](count, random.Random(seed))
    for outcome, failure in tqdm(work, desc=row, total=count, mininterval=5):
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if failure is not None:
            failures.append(failure)
    return {
        "row": row,
        "tried": sum(outcomes.values()),
        "failed": len(failures),
        "outcomes": outcomes,
        "failures": failures[:20],
    }


def table(record: dict) -> str:
    """Markdown."""
    lines = ["| what | tried | failed | what came of it |", "|---" * 4 + "|"]
    for run in sorted(record["runs"], key=lambda run: list(ROWS).index(run["row"])):
        outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in run["outcomes"].items())
        lines.append(f"| {run['row']} | {run['tried']:,} | {run['failed']:,} | {outcomes} |")
    failures = [f"- {run['row']}: {failure}" for run in record["runs"] for failure in run["failures"]]
    parts = [provenance.machine_line(record), provenance.versions_line(record), "\n".join(lines), "\n".join(failures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def parse_options() -> argparse.Namespace:
    parser = machine.Parser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="some of the rows")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the numbers; write nothing")
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help="folder for damage.json and damage.md")
    parser.add_argument("--report", action="store_true", help="run nothing: the table from the result file")
    return parser.parse_args()


def main() -> None:
    args = parse_options()
    path = args.out / "damage.json"
    if path.is_file() and not args.quick:
        record = json.loads(path.read_text())
    elif args.report:
        raise SystemExit(f"damage.py: there is no {path} to report; leave out --report to measure")
    else:
        record = provenance.provenance("damage", ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint")) | {"runs": []}
    if not args.report:
        origin, old = provenance.origin("damage"), provenance.changed(record["runs"], "damage")
        have = {run["row"] for run in record["runs"] if run not in old and run.get("seed") == args.seed}
        for row in [row for row in args.rows if row not in have]:
            count = max(ROWS[row][0] // 100, 1) if args.quick else ROWS[row][0]
            found = measure(row, count, args.seed) | origin | {"seed": args.seed}
            record["runs"] = [run for run in record["runs"] if run["row"] != row] + [found]
            if not args.quick:
                provenance.write(path, json.dumps(record, indent=1))
    if not args.quick:
        provenance.save(args.out, "damage", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
