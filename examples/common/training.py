"""Data-parallel training of a task."""

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gcjax
from common import launch
from common.checkpoints import settings_of
from common.cli import Problem, progress_bar
from common.log import Log
from common.options import MICROBATCHES, later, learning_rate, make_compressor, make_optimiser

SAMPLE = "sample"  # the axis over which BatchNorm averages under value_and_moments
PyTree = Any


class Task(NamedTuple):
    """What is trained.

    Attributes:
      init: `init(key) -> (params, model_state)`. The model state is BatchNorm's statistics, or None.
      loss: `loss(params, batch, key) -> loss`, or with a model state
        `loss(params, batch, key, model_state) -> (loss, model_state)`.
      steps: number of steps of an epoch.
      batches: `batches(epoch, first)` yields this process's part of each batch of an epoch, from batch `first` on, as
        NumPy arrays.
      prepare: `prepare(key, batch) -> batch`, run by each worker on its part, for example augmentation.
      evaluate: `evaluate(params, model_state) -> scores` by name. The first one is shown and plotted.
      end: `end(params, model_state)`, called after the last epoch, or None.
    """

    init: Callable[..., tuple[PyTree, PyTree]]
    loss: Callable[..., Any]
    steps: int
    batches: Callable[[int, int], Iterator[PyTree]]
    prepare: Callable[..., PyTree]
    evaluate: Callable[..., dict[str, float]]
    end: Callable[..., None] | None = None


def use_devices(workers: int) -> jax.sharding.Mesh:
    """A mesh of `workers` devices, on CPUs virtual ones. Raises Problem if JAX found another number."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", workers)
    if jax.device_count() < workers or (jax.process_count() > 1 and jax.device_count() != workers):
        raise Problem(
            f"--workers {workers}, but JAX found {jax.device_count()} {jax.default_backend()} devices; give "
            f"--workers {jax.device_count()}, or set JAX_PLATFORMS=cpu for virtual devices"
        )
    return jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])


def choose_moments(args: argparse.Namespace, model_state: PyTree) -> Callable[..., Any] | None:
    """What computes the squares for the method, as `--squares` says; None if the method uses none."""
    if args.method[0] != "variance":
        return None
    if args.squares == "microbatches":
        return microbatches
    if args.squares == "batch":  # the square of its gradient
        return functools.partial(gcjax.value_and_moments, microbatches=1, method="vmap")
    return functools.partial(gcjax.value_and_moments, sample_axis=None if model_state is None else SAMPLE)


def per_sample_squares(args: argparse.Namespace) -> bool:
    """Whether the method uses squares of each sample's gradient."""
    return args.method[0] == "variance" and args.squares == "samples"


def microbatches(
    loss_fn: Callable[..., Any], *, has_aux: bool, in_axes: tuple[int | None, ...], parts: int = MICROBATCHES
) -> Callable[..., tuple[Any, tuple[PyTree, PyTree]]]:
    """Like `gcjax.value_and_moments`, with `parts` parts of the batch in place of its samples: an estimate."""

    def split(x, axis):
        return x if axis is None else jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), x)

    def run(params, inputs):
        inputs = tuple(map(split, inputs, in_axes))
        gradient = jax.value_and_grad(loss_fn, has_aux=has_aux)
        out, grads = jax.vmap(gradient, (None, in_axes))(params, inputs)
        out, mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), (out, grads))
        return out, (mean, jax.tree.map(lambda g: jnp.sum((g / parts) ** 2, axis=0), grads))

    return run


def whole_batch_norm(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """The context in which a loss applies its model, so that BatchNorm averages over a worker's whole batch."""
    if not per_sample_squares(args):
        return contextlib.nullcontext()
    from gcjax.flax import sync_batchnorm

    return sync_batchnorm(SAMPLE)


def train(task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Train a task, and write steps.csv, epochs.csv, result.json and curves.png into `args.out`.

    Args:
      task: what to train.
      args: the options of `common.options.add_training`, and `out`.

    Returns:
      What result.json holds.

    Raises:
      Problem: the options do not fit the devices, the method or the checkpoints, or the loss is not finite.
      RuntimeError: (on all processes) they have different options or numbers of batches.
    """
    mesh, is_first = use_devices(args.workers), jax.process_index() == 0
    total = args.epochs * task.steps
    step, state = make_step(task, args, mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    if is_first:
        print(f"{parameters:,} parameters, {args.workers} workers x {args.batch}, {total} steps")

    prepare = prepare_on_workers(task.prepare, mesh)
    keys = jax.random.key(args.seed + 2)
    same = {"steps": task.steps, "resume": args.resume, "checkpoint_every": args.checkpoint_every}
    gcjax.check_agreement(mesh, options=settings_of(args) | same)
    with Log(args, task.steps) as log:
        first_epoch, done, state = log.start(state)
        initial = first_epoch * task.steps + done
        if ahead := initial - int(state.step):  # --allow has changed the number of steps
            step, _ = make_step(task, args, mesh, ahead)
        with progress_bar(total=total, initial=initial, unit="step", disable=not is_first) as bar:
            for epoch in range(first_epoch, args.epochs):
                batches = exactly(task.steps - done, task.batches(epoch, done))
                for batch in place_batches(batches, mesh):
                    begin = time.perf_counter()
                    key = jax.random.fold_in(keys, epoch * task.steps + done)
                    state, metrics = step(state, prepare(key, batch))
                    done += 1
                    row = log.add_step(epoch, state, metrics, begin)
                    launch.step_finished()
                    shown = {"loss": f"{row['loss']:.3f}", "compression": f"{row['compression_ratio']:.0f}"}
                    bar.set_postfix(shown | log.shown, refresh=False)
                    bar.update()
                    if not math.isfinite(row["loss"]):
                        raise Problem(
                            f"the loss is {row['loss']} in step {row['step']}: training has diverged. A smaller "
                            "--learning-rate may help; --resume goes on from the last checkpoint. If it fails too, "
                            f"that one is of a ruined model: remove the newest folder in {str(args.out)!r}/checkpoints"
                        )
                    if done < task.steps:
                        log.save(state, epoch, done)
                log.end_epoch(epoch, task.evaluate(*on_host(state)))
                done = 0
                log.save(state, epoch + 1, done)
        if task.end is not None:
            task.end(*on_host(state))
        return log.finish(parameters)


def make_step(
    task: Task, args: argparse.Namespace, mesh: jax.sharding.Mesh, ahead: int = 0
) -> tuple[Any, gcjax.TrainState]:
    """The training step, and the state to begin with. Raises Problem if the method rejects its options.

    Args:
      task, args: as for `train`.
      mesh: of the workers.
      ahead: by how many steps schedules are further than the state has counted.
    """
    total = args.epochs * task.steps
    rate = learning_rate(args.schedule, args.learning_rate, total, args.epochs, args.warmup_epochs)
    optimiser = make_optimiser(args.optimiser, later(rate, ahead), args.momentum, args.weight_decay)
    tx = optax.chain(make_compressor(args.method, "data", total, ahead), optimiser)
    # Optimising the code that draws each parameter would take a third of all compile time.
    init = jax.jit(task.init, compiler_options={"xla_backend_optimization_level": 0})
    params, model_state = init(jax.random.key(args.seed))
    step = gcjax.make_train_step(task.loss, tx, mesh, axis_name="data", moments=choose_moments(args, model_state))
    return step, step.init(params, model_state=model_state, key=jax.random.key(args.seed + 1))


def on_host(state: gcjax.TrainState) -> tuple[PyTree, PyTree]:
    """The parameters and the workers' mean of the model state, on the host."""
    averaged = None
    if state.model_state is not None:
        averaged = jax.tree.map(lambda x: np.asarray(x.mean(axis=0)), state.model_state.stacked())
    return jax.device_get(state.params), averaged


def prepare_on_workers(prepare: Callable[..., PyTree], mesh: jax.sharding.Mesh) -> Callable[..., PyTree]:
    """Let each worker prepare its part of a batch, with a key of its own."""

    def local(key, batch):
        return prepare(jax.random.fold_in(key, jax.lax.axis_index("data")), batch)

    run = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    return jax.jit(run)


def exactly(count: int, batches: Iterable[PyTree]) -> Iterator[PyTree]:
    """Yield the batches. Raises Problem if they are not `count`: another process would wait for this one for ever."""
    number = 0
    for number, batch in enumerate(batches, 1):
        if number > count:
            break
        yield batch
    if number != count:
        found = "more" if number > count else f"{number}"
        raise Problem(f"this process has {found} batches where {count} remain in the epoch")


def place_batches(batches: Iterable[PyTree], mesh: jax.sharding.Mesh) -> Iterator[PyTree]:
    """Yield each batch as global arrays, having placed the next one already."""
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    waiting = None
    for batch in batches:
        placed = jax.tree.map(lambda part: jax.make_array_from_process_local_data(over_workers, part), batch)
        if waiting is not None:
            yield waiting
        waiting = placed
    if waiting is not None:
        yield waiting
