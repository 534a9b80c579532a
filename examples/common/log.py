"""Curves, checkpoints and the plot of a training run."""

import argparse
import csv
import io
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import flax
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import gcjax
from common.checkpoints import Checkpoints, json_value, make_record, settings_of
from common.cli import Problem, Stopped, make_folder

RESIZING = {"workers", "batch", "images", "context"}  # options that may change the number of steps of an epoch
TOTALS = ("sent", "wire_bytes", "dense_bytes", "payload_bits")


class Log:
    """Curves and checkpoints of a run, in the folder `args.out`. Only process 0 writes the curves.

    The curves belong to the checkpoints: each has all rows up to its step, and the CSV files are written from them.

    Attributes:
      rows: the rows of steps.csv and epochs.csv so far.
      totals: of what a worker sent since the start.
      shown: the last score, for the progress bar.
    """

    def __init__(self, args: argparse.Namespace, steps: int):
        """Open the folder.

        Args:
          args: the options of `common.options.add_training`, and `out`.
          steps: number of steps of an epoch.

        Raises:
          Problem: it cannot be made.
        """
        self.args, self.out, self.steps = args, Path(args.out), steps
        self.totals = dict.fromkeys(TOTALS, 0.0)
        self.shown: dict[str, str] = {}
        self.rows: dict[str, list[dict]] = {"steps": [], "epochs": []}
        make_folder(self.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints")

    def __enter__(self) -> "Log":
        self.checkpoints.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpoints.__exit__(*error)

    def start(self, state: gcjax.TrainState) -> tuple[int, int, gcjax.TrainState]:
        """Epoch, number of the step in it, and the state to begin with: with `--resume` those of the last checkpoint.

        Raises:
          Problem: there is no checkpoint, or an unwanted one, or one of another or a longer run.
        """
        state, record = self.checkpoints.start(state, self.args)
        if record is None:
            return 0, 0, state
        if record["steps"] != self.steps and not RESIZING & {name.lstrip("-") for name in self.args.allow}:
            raise Problem(
                f"--resume: the checkpoint is of a run with {record['steps']} steps in an epoch, and here are "
                f"{self.steps}: these are other data"
            )
        if record["epoch"] + (record["number"] > 0) > self.args.epochs:
            raise Problem(f"--resume: the checkpoint is past the end of --epochs {self.args.epochs}")
        self.totals, self.shown, self.rows = record["totals"], record["shown"], record["rows"]
        # If --allow has changed the number of steps, go on after the same share of the epoch.
        return record["epoch"], record["number"] * self.steps // record["steps"], state

    def add_step(self, epoch: int, state: gcjax.TrainState, metrics: gcjax.Metrics, begin: float) -> dict[str, Any]:
        """Wait for a step that began at the time `begin`, and return its row. The loss is of this process's workers."""
        loss = float(np.mean([shard.data[0] for shard in metrics.loss.addressable_shards]))  # waits for the step
        seconds = time.perf_counter() - begin
        sent = gcjax.info(state.opt_state)
        entries = float(sent.sent.mean())
        self.totals["sent"] += entries
        self.totals["wire_bytes"] += sent.wire_bytes
        if sent.wire_bytes:  # otherwise the ratio is of nothing
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

    def end_epoch(self, epoch: int, scores: dict[str, float]) -> None:
        """Add the row of an epoch."""
        own = [row for row in self.rows["steps"] if row["epoch"] == epoch]
        loss = float(np.mean([row["loss"] for row in own]))
        seconds = float(np.sum([row["seconds"] for row in own]))
        row = {"epoch": epoch, "step": own[-1]["step"], "loss": loss, **scores, **self.totals, "seconds": seconds}
        self.rows["epochs"].append(row)
        name, score = next(iter(scores.items()))
        self.shown = {name: f"{score:.4f}"}

    def save(self, state: gcjax.TrainState, epoch: int, number: int) -> None:
        """Save a checkpoint if one is due: after an epoch, after each `--checkpoint-every` steps, after SIGTERM.

        Args:
          state: after the last step.
          epoch: of the next step.
          number: of the next step in it.

        Raises:
          Stopped: SIGTERM came; the checkpoint is saved.
          Problem: it cannot be saved.
        """
        done = len(self.rows["steps"])
        stop = self.checkpoints.should_stop()
        if stop or number == 0 or (self.args.checkpoint_every and done % self.args.checkpoint_every == 0):
            own = {"epoch": epoch, "number": number, "steps": self.steps, "totals": dict(self.totals)}
            rows = {name: list(rows) for name, rows in self.rows.items()}
            record = make_record(state, settings_of(self.args), **own, shown=self.shown, rows=rows)
            self.checkpoints.save(done, state, record)
        if stop or number == 0:
            self._write_curves()
        if stop:
            self.checkpoints.wait()
            raise Stopped(f"SIGTERM: ended after step {done}, which is saved; --resume goes on from there")

    def _write_curves(self) -> None:
        if jax.process_index() == 0:
            for name, rows in self.rows.items():
                text = io.StringIO(newline="")
                table = csv.DictWriter(text, rows[0] if rows else ())
                table.writeheader()
                table.writerows(rows)
                write(self.out / f"{name}.csv", text.getvalue())

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
        self._write_curves()
        if jax.process_index() == 0:
            write(self.out / "result.json", json.dumps(result, indent=1))
            plot(self.rows, f"{self.args.method[0]}, {self.args.optimiser}", self.out / "curves.png")
        return result


def write(path: Path, text: str) -> None:
    """Write a file in one go: it is never cut off, whenever this process ends. Raises Problem if it cannot be."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8", newline="")
        new.replace(path)
    except OSError as error:
        raise Problem(
            f"cannot write {str(path)!r} ({error.strerror}); --resume goes on from the last checkpoint"
        ) from None


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
