"""Checkpoints of a training run: saved by Orbax in the background, verified before they are read, and after SIGTERM."""

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import gcjax
from common.cli import Problem, Stopped

SUMS = "SHA256SUMS"
UNCHECKED = {SUMS, "commit_success.txt", "_CHECKPOINT_METADATA"}  # Orbax writes them last, and restores without them
# Where data and results lie, who takes part, and what follows training. All other options are hyperparameters.
NOT_HYPERPARAMETERS = {
    *("data", "text", "out", "resume", "allow", "checkpoint_every", "decoders", "sample", "temperature"),
    *("coordinator", "processes", "process", "auto", "local", "wait", "heartbeat", "stall", "child"),
    *("devices_per_process"),
}
UNHARMED = "Those before it are as they were: --resume goes on from the last"
PyTree = Any
Record = dict[str, Any]


class Manager(ocp.CheckpointManager):
    """A manager that leaves SIGTERM to `Checkpoints.should_stop`.

    All processes stop at the step after the largest number that any has given to JAX. Orbax would also give those of
    checkpoints, which are past when they are written: then no process might ever stop.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The last two checkpoints of a run, each in a folder named after its step.

    A checkpoint holds the state and a record, which JSON can hold. Its file SHA256SUMS, which `sha256sum -c` reads too,
    has the checksums of all its files, so that a damaged file is noticed before anything is made of it.

    As a context it turns SIGTERM into a request to stop, see `should_stop`.
    """

    def __init__(self, folder: Path):
        """Open the folder, or make it. Raises Problem if it cannot be made."""
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs the tracebacks of errors that it raises too
        self.folder, self.terminated, self._saving, self._asked = folder.absolute(), False, 0, 0
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            cleanup_tmp_directories=True,  # of saves that were cut off
            lightweight_initialize=True,  # without metadata, which may be damaged
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_sums),
        )
        try:
            self.manager = Manager(self.folder, options=options)
        except OSError as error:
            raise Problem(f"--out: cannot make the folder {str(folder)!r} ({error.strerror})") from error

    def __enter__(self) -> "Checkpoints":
        if not jax.distributed.is_initialized():  # it has a handler of its own
            self._handler = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self._handler)
        if kind in (None, Stopped):
            with self._named():
                self.manager.close()
        elif jax.process_count() == 1:  # otherwise it might wait for a process that is lost
            with contextlib.suppress(OSError, ValueError):
                self.manager.close()

    def _terminate(self, *_: object) -> None:
        self.terminated = True

    def should_stop(self) -> bool:
        """Whether SIGTERM came to any process. Called once after each step, it is true on all processes together."""
        self._asked += 1  # from 1 in a resumed run too: SIGTERM before the first step names step 1
        return self.terminated or multihost_utils.reached_preemption_sync_point(self._asked)

    def save(self, step: int, state: PyTree, record: Record) -> None:
        """Begin to save a checkpoint, once the last one is saved. Raises Problem if that or this one fails."""
        size, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self.folder).free
        if size > free:
            raise Problem(
                f"the disk of {str(self.folder)!r} has {free / 1e6:,.1f} MB left, and the checkpoint of step {step} "
                f"may take {size / 1e6:,.1f} MB. {UNHARMED}"
            )
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(record))
        with self._named():
            self.manager.wait_until_finished()
            self._saving = step
            if step in self.manager.all_steps():  # threads of a save that failed may have ended it later
                self.manager.delete(step)
            self.manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Wait until the last checkpoint is saved. Raises Problem if it fails."""
        with self._named():
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueError, for a full disk too
            reason = " ".join(str(error).split())
            raise Problem(
                f"cannot save the checkpoint of step {self._saving} in {str(self.folder)!r} ({reason[:600]}). "
                f"{UNHARMED}"
            ) from None

    def _write_sums(self) -> None:
        """Add the checksums to a checkpoint that Orbax is about to give its final name."""
        (folder,) = self.folder.glob(f"{self._saving}.*-tmp*")
        (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in checksums(folder).items()))

    def start(self, state: PyTree, args: argparse.Namespace) -> tuple[PyTree, Record | None]:
        """What to begin with: the initial state and None, or with `--resume` what `restore` returns.

        Raises:
          Problem: see `restore`; or there are checkpoints, without `--resume`.
        """
        if args.resume:
            return self.restore(state, settings_of(args), args.allow)
        if self.manager.latest_step() is not None:
            raise Problem(
                f"{str(self.folder)!r} already holds a run: --resume goes on with it, or choose another --out"
            )
        return state, None

    def restore(self, state: PyTree, settings: Record, allow: list[str]) -> tuple[PyTree, Record]:
        """The state and the record of the newest checkpoint that is not damaged; newer ones get other names.

        Args:
          state: the initial state, for shapes, dtypes and shardings.
          settings: the hyperparameters of this run, as `record["settings"]` has those of the checkpoint.
          allow: names of settings that may differ. With "workers" their number may: `gcjax.resize` makes the state.

        Raises:
          Problem: no checkpoint is whole, or it is of a run with other settings or another model.
        """
        step, mesh = self._newest_whole(), mesh_of(state)
        record = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        check_settings(record["settings"], settings | {"workers": mesh.size}, allow)
        workers = record["settings"].get("workers", mesh.size)
        target = state if workers == mesh.size else gcjax.restore_target(state, workers)
        here = describe(target)
        for name in record["leaves"] | here:
            saved, own = record["leaves"].get(name, "missing"), here.get(name, "missing")
            if saved != own:
                raise Problem(
                    "--resume: the checkpoint is of another model or method: "
                    f"state{name} is {saved} in the checkpoint and {own} here"
                )
        like = ocp.args.StandardRestore(target)
        restored = self.manager.restore(step, args=ocp.args.Composite(state=like))["state"]
        if workers == mesh.size:
            return restored, record
        state = gcjax.resize(restored, mesh)
        before, after = mean_residuals(restored), mean_residuals(state)
        error = np.abs(after - before).max(initial=0) / max(np.abs(before).max(initial=0), 1e-30)
        if jax.process_index() == 0:
            print(
                f"--resume: from {workers} workers to {mesh.size}, after step {step}. The mean of the residuals is "
                f"kept to {error:.1e} of its largest entry",
                flush=True,
            )
        return state, record

    def _newest_whole(self) -> int:
        """The step of the newest checkpoint that is not damaged, on all processes what process 0 finds."""
        steps, found, damages = sorted(self.manager.all_steps(), reverse=True), -1, []
        if jax.process_index() == 0:
            for step in steps:
                damage = find_damage(self.folder / str(step))
                if damage is None:
                    found = step
                    break
                damages.append(f"the checkpoint of step {step} is damaged: {damage}")
            if found >= 0:
                for step, damage in zip(steps, damages, strict=False):
                    (self.folder / str(step)).rename(unused(self.folder / f"{step}.damaged"))
                    print(f"--resume: {damage}. It is now named {step}.damaged; going on from step {found}")
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if found < 0:
            lost = "; ".join(damages) or "process 0 says more"
            reason = f"no checkpoint is whole ({lost})" if steps else "there is no checkpoint"
            raise Problem(f"--resume: {reason} in {str(self.folder)!r}")
        self.manager.reload()
        return found


def settings_of(args: argparse.Namespace) -> Record:
    """The hyperparameters: the options that decide what is computed."""
    return {name: json_value(value) for name, value in vars(args).items() if name not in NOT_HYPERPARAMETERS}


def json_value(value: object) -> object:
    """A value as it is, or as text if JSON does not know its type."""
    return value if isinstance(value, int | float | str | bool | list | tuple | dict | None) else str(value)


def make_record(state: PyTree, settings: Record, **more: Any) -> Record:
    """What `Checkpoints.save` needs beside the state so that `Checkpoints.restore` can compare it."""
    return {"settings": settings | {"workers": mesh_of(state).size}, "leaves": describe(state), **more}


def mesh_of(state: PyTree) -> jax.sharding.Mesh:
    """The mesh of the workers, on which all of the state lies."""
    return jax.tree.leaves(state)[0].sharding.mesh


def mean_residuals(state: PyTree) -> np.ndarray:
    """float32[n], what the workers have not sent yet, in the mean over the workers, of all compressors."""

    def is_compressor(node: object) -> bool:
        return isinstance(node, gcjax.CompressState)

    def whole(x: jax.Array | np.ndarray) -> np.ndarray:
        held_here = isinstance(x, np.ndarray) or x.is_fully_addressable
        return np.asarray(x if held_here else multihost_utils.process_allgather(x, tiled=True))

    nodes = [node.buckets for node in jax.tree.leaves(state, is_leaf=is_compressor) if is_compressor(node)]
    buckets = [bucket for node in nodes for bucket in jax.tree.map(whole, node).stacked()]
    means = [jax.vmap(lambda own: own.residual)(bucket).mean(0) for bucket in buckets]
    return np.concatenate([np.zeros(0, np.float32), *(np.ravel(x) for x in means)])


def describe(state: PyTree) -> dict[str, str]:
    """From the name of each leaf to dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def check_settings(saved: Record, here: Record, allow: list[str]) -> None:
    """Raise Problem, with the first difference, if settings differ that `allow` does not name."""
    allowed = {name.lstrip("-").replace("-", "_") for name in allow}
    if unknown := sorted(allowed - here.keys()):
        raise Problem(f"--allow {unknown[0]}: no such setting; there are {', '.join(here)}")
    here = json.loads(json.dumps(here))
    for name in here:
        if name in saved and name not in allowed and saved[name] != here[name]:
            option = name.replace("_", "-")
            if name == "workers":
                raise Problem(
                    f"--resume: the checkpoint is of {saved[name]} workers, and here are {here[name]}. Run as many, or "
                    "--allow workers: then gcjax.resize makes the state of as many as are here"
                )
            raise Problem(
                f"--resume: the checkpoint is of a run with --{option} {shown(saved[name])}, not "
                f"{shown(here[name])}. Give the same, or --allow {option} if the change is meant"
            )


def shown(value: Any) -> str:
    """A setting as on the command line; a method is a name and its options."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict):
        return f"{value[0]}({', '.join(f'{name}={option!r}' for name, option in value[1].items())})"
    return "not given" if value is None else str(value)


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in UNCHECKED:
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def find_damage(folder: Path) -> str | None:
    """What is damaged in a checkpoint, or None."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
        saved = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        changed = saved.items() ^ checksums(folder).items()
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read ({getattr(error, 'strerror', None) or error})"
    return f"its file {min(changed)[0]!r} does not agree with {SUMS}" if changed else None


def unused(path: Path) -> Path:
    """The path, with a number if it is in use."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(name for name in names if not name.exists())
