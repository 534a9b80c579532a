"""The curves of a training run: progress bar, tables, result and plot."""

import argparse
import csv
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
from common.cli import Problem, progress_bar

Rows = dict[str, list[dict[str, Any]]]
TOTALS = ("sent", "wire_bytes", "dense_bytes", "payload_bits")
NOT_SETTINGS = {"data", "text", "out", "resume", "coordinator", "process", "auto"}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is computed: all but those of where data, results and processes are."""
    return {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}


class Log:
    """The curves of a run, in the folder `args.out`. With several processes only the first one shows and writes them.

    Attributes:
      rows: the rows of steps.csv and epochs.csv so far.
      done: number of steps so far.
    """

    def __init__(self, args: argparse.Namespace, total: int, rows: Rows | None):
        """Begin.

        Args:
          args: the options of `common.options.add_training`, and `out`.
          total: number of steps of the run.
          rows: those of the part that was done before, or None.
        """
        self.args, self.rows, self.is_first = args, rows or {"steps": [], "epochs": []}, jax.process_index() == 0
        self.done, self.shown = len(self.rows["steps"]), {}
        self.bar = progress_bar(total=total, initial=self.done, unit="step", disable=not self.is_first)

    def add_step(self, state: gcjax.TrainState, metrics: gcjax.Metrics, begin: float) -> None:
        """Wait for a step that began at the time `begin`, and add its row. The loss is of this process's workers.

        Raises:
          Problem: the loss is not finite.
        """
        loss = float(np.mean([shard.data[0] for shard in metrics.loss.addressable_shards]))  # waits for the step
        seconds, sent = time.perf_counter() - begin, gcjax.info(state.opt_state)
        self.done += 1
        row = {
            "step": self.done,
            "loss": loss,
            "sent": float(sent.sent.mean()),
            "overflow": float(sent.overflow.mean()),
            "compression_ratio": sent.compression_ratio,
            "wire_bytes": sent.wire_bytes,
            "dense_bytes": sent.wire_ratio * sent.wire_bytes if sent.wire_bytes else 0.0,  # of a float32 ring
            "payload_bits": float(sent.payload_bits.mean()),
            "residual_norm": float(sent.residual_norm.mean()),
            "seconds": seconds,
        }
        self.rows["steps"].append(row)
        shown = {"loss": f"{loss:.3f}", "compression": f"{sent.compression_ratio:.0f}"} | self.shown
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        if not math.isfinite(loss):
            raise Problem(f"the loss is {loss} in step {self.done}: training has diverged; lower the --learning-rate")

    def end_epoch(self, scores: dict[str, float]) -> None:
        """Add the row of an epoch. The first score is shown and plotted."""
        epochs, steps = self.rows["epochs"], self.rows["steps"]
        own = steps[epochs[-1]["step"] if epochs else 0 :]
        loss, seconds = float(np.mean([row["loss"] for row in own])), float(np.sum([row["seconds"] for row in own]))
        row = {"epoch": len(epochs), "step": self.done, "loss": loss, **scores, **self._totals(), "seconds": seconds}
        epochs.append(row)
        name, score = next(iter(scores.items()))
        self.shown = {name: f"{score:.4f}"}
        self._write_curves()

    def _write_curves(self) -> None:
        if self.is_first:
            for name, rows in self.rows.items():
                with open(self.args.out / f"{name}.csv", "w", newline="") as file:
                    table = csv.DictWriter(file, rows[0])
                    table.writeheader()
                    table.writerows(rows)

    def _totals(self) -> dict[str, float]:
        return {name: sum(row[name] for row in self.rows["steps"]) for name in TOTALS}

    def finish(self, parameters: int) -> dict[str, Any]:
        """Write result.json and curves.png. (steps.csv and epochs.csv are written after each epoch.)

        Args:
          parameters: number of entries of the model.

        Returns:
          The content of result.json.
        """
        self.bar.close()
        totals, steps = self._totals(), self.rows["steps"]
        result = {
            "settings": vars(self.args),
            "parameters": parameters,
            "steps": len(steps),
            "epochs": self.rows["epochs"],
            "compression_ratio": parameters * len(steps) / totals["sent"] if totals["sent"] else math.inf,
            "wire_ratio": totals["dense_bytes"] / totals["wire_bytes"] if totals["wire_bytes"] else 1.0,
            "ms_per_step": 1e3 * float(np.median([row["seconds"] for row in steps])),
            "cpu_seconds": time.process_time(),
            **made_with(),
        }
        self._write_curves()
        if self.is_first:
            (self.args.out / "result.json").write_text(json.dumps(result, indent=1, default=str))
            plot(self.rows, f"{self.args.method[0]}, {self.args.optimiser}", self.args.out / "curves.png")
        return result


def plot(rows: Rows, title: str, path: Path) -> None:
    """Plot score against bytes, and compression against steps."""
    epochs, steps = rows["epochs"], rows["steps"]
    score = list(epochs[0])[3]
    figure, left, right = two_panels()
    left.plot([row["wire_bytes"] / 1e6 for row in epochs], [row[score] for row in epochs], "o-", color="#0072B2")
    left.set(xlabel="sent per worker since the start (MB)", ylabel=score.replace("_", " "))
    left.set_title(title)
    right.plot([row["step"] for row in steps], [row["compression_ratio"] for row in steps], lw=0.8, color="#0072B2")
    right.set(yscale="log", xlabel="step", ylabel="compression ratio (parameters / entries sent)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def two_panels(**options: Any) -> tuple[plt.Figure, plt.Axes, plt.Axes]:
    """A figure with two panels, with the options of `plt.subplots`."""
    plt.switch_backend("Agg")  # draws without a display
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", **options)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, *panels


def made_with() -> dict[str, Any]:
    """Versions and machine, for a result file."""
    versions = {module.__name__: module.__version__ for module in (gcjax, jax, flax, optax, np)}
    machine = f"{platform.machine()}, {jax.default_backend()}"
    return {"versions": {"python": platform.python_version(), **versions}, "machine": machine}
