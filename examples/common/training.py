"""Data-parallel training of a task: steps, evaluation, checkpoints, curves, plot."""

import contextlib
import csv
import functools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

import gcjax
from common.cli import Problem
from common.options import learning_rate, make_compressor, make_optimiser

SAMPLE = "sample"  # the axis over which BatchNorm averages under value_and_moments
TOTALS = ("sent", "wire_bytes", "dense_bytes", "payload_bits")


class Task(NamedTuple):
    """What is trained.

    init(key) -> (params, model_state): model_state is BatchNorm's statistics, or None.
    loss(params, batch, key, model_state) -> loss, or (loss, model_state) where there is one.
    steps: per epoch.
    batches(epoch) -> this process's part of each batch of an epoch, numpy.
    prepare(key, batch) -> batch: augmentation of one worker's part, jitted.
    evaluate(params, model_state) -> {"accuracy": ..., ...}: what stands first is shown and plotted.
    end(params, model_state): None, or what to do after the last epoch.
    """

    init: Callable
    loss: Callable
    steps: int
    batches: Callable[[int], Iterator]
    prepare: Callable
    evaluate: Callable
    end: Callable | None = None


def use_devices(workers: int) -> jax.sharding.Mesh:
    """A mesh of `workers` devices; on CPUs virtual ones."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", workers)
    if jax.device_count() < workers or (jax.process_count() > 1 and jax.device_count() != workers):
        raise Problem(
            f"--workers {workers}, but JAX found {jax.device_count()} {jax.default_backend()} devices; give "
            f"--workers {jax.device_count()}, or set JAX_PLATFORMS=cpu for virtual devices"
        )
    return jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])


def squares(args, model_state):
    """What passes the squares to the method: `args.squares`, for the one method that uses them."""
    if not per_sample(args):
        return microbatches if args.method[0] == "variance" and args.squares == "microbatches" else None
    return functools.partial(gcjax.value_and_moments, sample_axis=None if model_state is None else SAMPLE)


def per_sample(args) -> bool:
    return args.method[0] == "variance" and args.squares == "samples"


def microbatches(loss_fn, *, has_aux, in_axes, parts: int = 4):
    """As `gcjax.value_and_moments`, with `parts` parts of the batch for samples: an estimate of the same squares."""
    del in_axes

    def run(params, inputs):
        batch, keys, model_state = inputs
        batch, keys = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, keys))
        gradient = jax.value_and_grad(loss_fn, has_aux=has_aux)
        out, grads = jax.vmap(gradient, (None, (0, 0, None)))(params, (batch, keys, model_state))
        out, mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), (out, grads))
        return out, (mean, jax.tree.map(lambda g: jnp.sum((g / parts) ** 2, axis=0), grads))

    return run


def batchnorm(args):
    """The context in which a loss applies its model: statistics go over the whole batch of a worker."""
    if not per_sample(args):
        return contextlib.nullcontext()
    from gcjax.flax import sync_batchnorm

    return sync_batchnorm(SAMPLE)


def train(task: Task, args) -> dict[str, Any]:
    """Train, and write steps.csv, epochs.csv, result.json and curves.png into `args.out`; the result."""
    mesh, speaks = use_devices(args.workers), jax.process_index() == 0
    total = args.epochs * task.steps
    rate = learning_rate(args.schedule, args.learning_rate, total, args.epochs, args.warmup_epochs)
    optimiser = make_optimiser(args.optimiser, rate, args.momentum, args.weight_decay)
    tx = optax.chain(make_compressor(args.method, "data"), optimiser)
    # Optimising the drawing of every parameter would take a third of the time to compile all there is.
    init = jax.jit(task.init, compiler_options={"xla_backend_optimization_level": 0})
    params, model_state = init(jax.random.key(args.seed))
    step = gcjax.make_train_step(task.loss, tx, mesh, axis_name="data", moments=squares(args, model_state))
    state = step.init(params, model_state=model_state, key=jax.random.key(args.seed + 1))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    if speaks:
        print(f"{parameters:,} parameters, {args.workers} workers x {args.batch}, {total} steps")

    prepare = per_worker(task.prepare, mesh)
    keys = jax.random.key(args.seed + 2)
    with Log(args, mesh) as log:
        first, state = log.start(state)
        with tqdm(total=total, initial=first * task.steps, unit="step", file=sys.stdout, disable=not speaks) as bar:
            for epoch in range(first, args.epochs):
                for number, batch in enumerate(on_mesh(task.batches(epoch), mesh)):
                    begin = time.perf_counter()
                    state, metrics = step(state, prepare(jax.random.fold_in(keys, epoch * task.steps + number), batch))
                    row = log.step(epoch, state, metrics, begin)
                    shown = {"loss": f"{row['loss']:.3f}", "compression": f"{row['compression_ratio']:.0f}"}
                    bar.set_postfix(shown | log.shown, refresh=False)
                    bar.update()
                    if not math.isfinite(row["loss"]):
                        raise Problem(
                            f"the loss is {row['loss']} in step {row['step']}: training has diverged. A smaller "
                            "--learning-rate may help; --resume goes on from the last epoch"
                        )
                log.epoch(epoch, state, task.evaluate(*trained(state)))
        if task.end is not None:
            task.end(*trained(state))
        return log.finish(parameters)


def trained(state):
    """Parameters and the workers' mean of the model state, on the host."""
    averaged = None
    if state.model_state is not None:
        averaged = jax.tree.map(lambda x: np.asarray(x.mean(axis=0)), state.model_state.stacked())
    return jax.device_get(state.params), averaged


def per_worker(prepare, mesh):
    """Each worker prepares its own part of a batch, with a key of its own."""

    def local(key, batch):
        return prepare(jax.random.fold_in(key, jax.lax.axis_index("data")), batch)

    run = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    return jax.jit(run)


def on_mesh(batches, mesh):
    """Each batch as global arrays, one ahead of its use."""
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    waiting = None
    for batch in batches:
        placed = jax.tree.map(lambda part: jax.make_array_from_process_local_data(over_workers, part), batch)
        if waiting is not None:
            yield waiting
        waiting = placed
    if waiting is not None:
        yield waiting


class Log:
    """Curves and checkpoints of a run, in the folder `args.out`. Only process 0 writes the curves."""

    def __init__(self, args, mesh):
        self.args, self.mesh, self.out = args, mesh, Path(args.out)
        self.totals = dict.fromkeys(TOTALS, 0.0)
        self.shown: dict[str, str] = {}
        self.rows: dict[str, list[dict]] = {"steps": [], "epochs": []}
        self.seconds = self.losses = 0.0
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Problem(f"--out: cannot make the folder {str(self.out)!r} ({error.strerror})") from error
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.checkpoints = ocp.CheckpointManager((self.out / "checkpoints").absolute(), options=options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.checkpoints.close()

    def start(self, state):
        """The epoch to begin with, and the state: of the last checkpoint with `--resume`."""
        last = self.checkpoints.latest_step()
        if not self.args.resume:
            if last is not None:
                raise Problem(
                    f"{str(self.out)!r} holds a run already: --resume goes on with it, or choose another --out"
                )
            return 0, state
        if last is None:
            raise Problem(f"--resume: there is no checkpoint in {str(self.out / 'checkpoints')!r}")
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays(state))
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
                rows.extend(row for row in read(file) if row["epoch"] < last)
        self.shown = {}
        return last, unarrays(found["state"], state)

    def step(self, epoch: int, state, metrics, begin: float) -> dict:
        loss = float(np.mean([shard.data[0] for shard in metrics.loss.addressable_shards]))  # waits for the step
        seconds = time.perf_counter() - begin
        sent = gcjax.info(state.opt_state)
        dense = sent.wire_ratio * sent.wire_bytes
        self.totals["sent"] += float(sent.sent.mean())
        self.totals["wire_bytes"] += sent.wire_bytes
        self.totals["dense_bytes"] += dense
        self.totals["payload_bits"] += float(sent.payload_bits.mean())
        row = {
            "step": int(state.step),
            "epoch": epoch,
            "loss": loss,
            "sent": float(sent.sent.mean()),
            "overflow": float(sent.overflow.mean()),
            "compression_ratio": sent.compression_ratio,
            "wire_bytes": sent.wire_bytes,
            "residual_norm": float(sent.residual_norm.mean()),
            "seconds": seconds,
        }
        self.rows["steps"].append(row)
        return row

    def epoch(self, epoch: int, state, scores: dict[str, float]) -> None:
        own = [row for row in self.rows["steps"] if row["epoch"] == epoch]
        loss = float(np.mean([row["loss"] for row in own]))
        seconds = float(np.sum([row["seconds"] for row in own]))
        row = {"epoch": epoch, "step": own[-1]["step"], "loss": loss, **scores, **self.totals, "seconds": seconds}
        self.rows["epochs"].append(row)
        self.shown = {next(iter(scores)): f"{next(iter(scores.values())):.4f}"}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(arrays(state)), totals=ocp.args.JsonSave(self.totals))
        self.checkpoints.save(epoch + 1, args=saved)
        self.checkpoints.wait_until_finished()
        if jax.process_index() == 0:
            for name, rows in self.rows.items():
                with open(self.out / f"{name}.csv", "w", newline="") as file:
                    table = csv.DictWriter(file, rows[0])
                    table.writeheader()
                    table.writerows(rows)

    def finish(self, parameters: int) -> dict[str, Any]:
        epochs, steps = self.rows["epochs"], self.rows["steps"]
        versions = {module.__name__: module.__version__ for module in (gcjax, jax, flax, optax, np)}
        result = {
            "settings": {name: plain(value) for name, value in vars(self.args).items()},
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
            plot(self.rows, self.args, self.out / "curves.png")
        return result


def arrays(state):
    """Random keys as their data: checkpoints hold plain arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)


def unarrays(found, like):
    def back(x, shape):
        if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(shape))

    return jax.tree.map(back, found, like)


def read(file):
    for row in csv.DictReader(file):
        yield {name: int(text) if name in ("step", "epoch") else float(text) for name, text in row.items()}


def plain(value):
    return value if isinstance(value, int | float | str | bool | list | tuple | dict | None) else str(value)


def plot(rows, args, path: Path) -> None:
    """Score against bytes, and compression against steps."""
    plt.switch_backend("Agg")  # draws without a display
    epochs, steps = rows["epochs"], rows["steps"]
    score = list(epochs[0])[3]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot([row["wire_bytes"] / 1e6 for row in epochs], [row[score] for row in epochs], "o-", color="#0072B2")
    left.set(xlabel="sent per worker since the start (MB)", ylabel=score.replace("_", " "))
    left.set_title(f"{args.method[0]}, {args.optimiser}")
    right.plot([row["step"] for row in steps], [row["compression_ratio"] for row in steps], lw=0.8, color="#0072B2")
    right.set(yscale="log", xlabel="step", ylabel="compression ratio (parameters / entries sent)")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
