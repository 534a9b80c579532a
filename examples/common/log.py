"""Curves, checkpoints and the plot of a training run."""

import argparse
import csv
import json
import math
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp

import gcjax
from common.cli import Problem

TOTALS = ("sent", "wire_bytes", "dense_bytes", "payload_bits")


class Log:
    """Curves and checkpoints of a run, in the folder `args.out`. Only process 0 writes the curves.

    Attributes:
      rows: the rows of steps.csv and epochs.csv so far.
      totals: of what a worker sent since the start.
      shown: the last score, for the progress bar.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, Path(args.out)
        self.totals = dict.fromkeys(TOTALS, 0.0)
        self.shown: dict[str, str] = {}
        self.rows: dict[str, list[dict]] = {"steps": [], "epochs": []}
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Problem(f"--out: cannot make the folder {str(self.out)!r} ({error.strerror})") from error
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.checkpoints = ocp.CheckpointManager((self.out / "checkpoints").absolute(), options=options)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: object) -> None:
        self.checkpoints.close()

    def start(self, state: gcjax.TrainState) -> tuple[int, gcjax.TrainState]:
        """The first epoch and the state to begin with: with `--resume` those of the last checkpoint.

        Raises:
          Problem: there is no checkpoint, or an unwanted one, or one of another model.
        """
        last = self.checkpoints.latest_step()
        if not self.args.resume:
            if last is not None:
                raise Problem(
                    f"{str(self.out)!r} already holds a run: --resume goes on with it, or choose another --out"
                )
            return 0, state
        if last is None:
            raise Problem(f"--resume: there is no checkpoint in {str(self.out / 'checkpoints')!r}")
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), without_keys(state))
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(like), totals=ocp.args.JsonRestore())
        try:
            found = self.checkpoints.restore(last, args=wanted)
        except ValueError as error:
            raise Problem(
                f"--resume: the checkpoint is of another model, method or number of workers ({error})"
            ) from None
        self.totals = found["totals"]
        for name, rows in self.rows.items():
            with open(self.out / f"{name}.csv", newline="") as file:
                rows.extend(row for row in read_rows(file) if row["epoch"] < last)
        return last, with_keys(found["state"], state)

    def add_step(self, epoch: int, state: gcjax.TrainState, metrics: gcjax.Metrics, begin: float) -> dict[str, Any]:
        """Wait for a step that began at the time `begin`, and return its row."""
        loss = float(np.mean([shard.data[0] for shard in metrics.loss.addressable_shards]))  # waits for the step
        seconds = time.perf_counter() - begin
        sent = gcjax.info(state.opt_state)
        entries = float(sent.sent.mean())
        self.totals["sent"] += entries
        self.totals["wire_bytes"] += sent.wire_bytes
        self.totals["dense_bytes"] += sent.wire_ratio * sent.wire_bytes
        self.totals["payload_bits"] += float(sent.payload_bits.mean())
        row = {
            "step": int(state.step),
            "epoch": epoch,
            "loss": loss,
            "sent": entries,
            "overflow": float(sent.overflow.mean()),
            "compression_ratio": sent.compression_ratio,
            "wire_bytes": sent.wire_bytes,
            "residual_norm": float(sent.residual_norm.mean()),
            "seconds": seconds,
        }
        self.rows["steps"].append(row)
        return row

    def end_epoch(self, epoch: int, state: gcjax.TrainState, scores: dict[str, float]) -> None:
        """Add the row of an epoch, save a checkpoint and write the curves."""
        own = [row for row in self.rows["steps"] if row["epoch"] == epoch]
        loss = float(np.mean([row["loss"] for row in own]))
        seconds = float(np.sum([row["seconds"] for row in own]))
        row = {"epoch": epoch, "step": own[-1]["step"], "loss": loss, **scores, **self.totals, "seconds": seconds}
        self.rows["epochs"].append(row)
        name, score = next(iter(scores.items()))
        self.shown = {name: f"{score:.4f}"}
        saved = ocp.args.Composite(
            state=ocp.args.StandardSave(without_keys(state)), totals=ocp.args.JsonSave(self.totals)
        )
        self.checkpoints.save(epoch + 1, args=saved)
        self.checkpoints.wait_until_finished()
        if jax.process_index() == 0:
            for name, rows in self.rows.items():
                with open(self.out / f"{name}.csv", "w", newline="") as file:
                    table = csv.DictWriter(file, rows[0])
                    table.writeheader()
                    table.writerows(rows)

    def finish(self, parameters: int) -> dict[str, Any]:
        """Write result.json and curves.png.

        Args:
          parameters: number of entries of the model.

        Returns:
          What result.json holds.
        """
        epochs, steps = self.rows["epochs"], self.rows["steps"]
        versions = {module.__name__: module.__version__ for module in (gcjax, jax, flax, optax, np)}
        result = {
            "settings": {name: json_value(value) for name, value in vars(self.args).items()},
            "parameters": parameters,
            "steps": len(steps),
            "epochs": epochs,
            "compression_ratio": parameters * len(steps) / self.totals["sent"] if self.totals["sent"] else math.inf,
            "wire_ratio": self.totals["dense_bytes"] / self.totals["wire_bytes"] if self.totals["wire_bytes"] else 1.0,
            "ms_per_step": 1e3 * float(np.median([row["seconds"] for row in steps])),
            "cpu_seconds": time.process_time(),
            "versions": {"python": platform.python_version(), **versions},
            "machine": f"{platform.machine()}, {jax.default_backend()}",
        }
        if jax.process_index() == 0:
            (self.out / "result.json").write_text(json.dumps(result, indent=1))
            plot(self.rows, f"{self.args.method[0]}, {self.args.optimiser}", self.out / "curves.png")
        return result


def without_keys(state: gcjax.TrainState) -> gcjax.TrainState:
    """The state with random keys as plain arrays, as checkpoints need them."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def with_keys(found: gcjax.TrainState, like: gcjax.TrainState) -> gcjax.TrainState:
    """Undo `without_keys`; `like` says where the keys are."""

    def restore(x, original):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(original)) if is_key(original) else x

    return jax.tree.map(restore, found, like)


def is_key(x: jax.Array) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def read_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of steps.csv or epochs.csv, as numbers."""
    for row in csv.DictReader(file):
        yield {name: int(text) if name in ("step", "epoch") else float(text) for name, text in row.items()}


def json_value(value: object) -> object:
    """A value as it is, or as text if JSON does not know its type."""
    return value if isinstance(value, int | float | str | bool | list | tuple | dict | None) else str(value)


def plot(rows: dict[str, list[dict]], title: str, path: Path) -> None:
    """Plot score against bytes, and compression against steps."""
    plt.switch_backend("Agg")  # draws without a display
    epochs, steps = rows["epochs"], rows["steps"]
    score = list(epochs[0])[3]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot([row["wire_bytes"] / 1e6 for row in epochs], [row[score] for row in epochs], "o-", color="#0072B2")
    left.set(xlabel="sent per worker since the start (MB)", ylabel=score.replace("_", " "))
    left.set_title(title)
    right.plot([row["step"] for row in steps], [row["compression_ratio"] for row in steps], lw=0.8, color="#0072B2")
    right.set(yscale="log", xlabel="step", ylabel="compression ratio (parameters / entries sent)")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
