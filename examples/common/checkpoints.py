"""Checkpoints of a training run, kept by Orbax."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from common.cli import Problem

PyTree = Any
Record = dict[str, Any]


class Checkpoints:
    """The last two checkpoints of a run, each in a folder named after its step.

    A checkpoint holds the state, the settings of the run, and a record of the caller that JSON can hold. Orbax writes
    it in the background, and the context waits for the last one at its end.
    """

    def __init__(self, folder: Path, settings: Record):
        """Open the folder, or make it.

        Args:
          folder: of the checkpoints.
          settings: of the run. Another run cannot go on from these checkpoints.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs the tracebacks of errors that it raises, too
        self.folder, self.settings = folder.absolute(), json.loads(json.dumps(settings, default=str))
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True, lightweight_initialize=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def save(self, step: int, state: PyTree, record: Record) -> None:
        """Begin to save a checkpoint, once the last one is saved."""
        if step in self.manager.all_steps():  # it could not be read
            self.manager.delete(step)
        run = {"settings": self.settings, "record": record}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        self.manager.save(step, args=items, force=True)

    def start(self, state: PyTree, resume: bool) -> tuple[PyTree, int, Record | None]:
        """What a run begins with.

        Args:
          state: the initial state. It gives Orbax the shapes, dtypes and shardings.
          resume: whether to go on from the last checkpoint.

        Returns:
          State, number of steps done, and the record of the checkpoint; None for a new run.

        Raises:
          Problem: there is no readable checkpoint to go on from, one of other settings, or one that would be lost.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        if not resume:
            if steps:
                raise Problem(f"{str(self.folder)!r} already holds a run: add --resume, or choose another --out")
            return state, 0, None
        for step in steps:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(state), run=ocp.args.JsonRestore())
            try:
                restored = self.manager.restore(step, args=items)
                settings, record = restored["run"]["settings"], restored["run"]["record"]
            except Exception as error:  # Orbax raises many kinds for a damaged file
                if jax.process_count() > 1:  # the others may have read it, and would go on from another step
                    raise
                reason = " ".join(str(error).split())[:200]
                print(f"--resume: the checkpoint of step {step} cannot be read, so the one before is used ({reason})")
                continue
            self._compare(settings)
            return restored["state"], step, record
        raise Problem(f"--resume: there is no readable checkpoint in {str(self.folder)!r}")

    def _compare(self, saved: Record) -> None:
        for name in saved | self.settings:
            if saved.get(name) != self.settings.get(name):
                raise Problem(
                    f"--resume: the checkpoint is of a run with {name} {saved.get(name)!r}, "
                    f"not {self.settings.get(name)!r}. Give the same options"
                )
