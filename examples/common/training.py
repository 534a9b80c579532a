"""Parts of data-parallel training that the examples share. The loops are in the examples."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import gcjax
from common.cli import Problem
from common.options import learning_rate, make_compressor, make_optimiser

SAMPLE = "sample"  # the axis over which BatchNorm averages under value_and_moments
PyTree = Any


class Task(NamedTuple):
    """A network, its loss and its data.

    Attributes:
      init: `init(key) -> (params, model_state)`. The model state is BatchNorm's statistics, or None.
      loss: `loss(params, batch, key) -> loss`, or with a model state
        `loss(params, batch, key, model_state) -> (loss, model_state)`.
      steps: number of steps of an epoch.
      batches: `batches(first)` yields this process's part of each batch, as NumPy arrays, from step `first` of the run
        on.
      evaluate: `evaluate(params, model_state) -> scores` by name.
      prepare: `prepare(key, batch) -> batch`, run by each worker on its part, for example augmentation; or None.
    """

    init: Callable[..., tuple[PyTree, PyTree]]
    loss: Callable[..., Any]
    steps: int
    batches: Callable[[int], Iterator[PyTree]]
    evaluate: Callable[..., dict[str, float]]
    prepare: Callable[..., PyTree] | None = None


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


def steps_of_epoch(samples: int, args: argparse.Namespace) -> int:
    """Number of whole batches; the rest of an epoch is dropped. Raises Problem if there is none."""
    if steps := samples // (args.workers * args.batch):
        return steps
    raise Problem(f"--workers {args.workers} times --batch {args.batch} is more than the {samples:,} training samples")


def make_step(task: Task, args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[Any, gcjax.TrainState]:
    """The training step, and the state to begin with. Raises Problem if the method rejects its options."""
    total = args.epochs * task.steps
    rate = learning_rate(args.schedule, args.learning_rate, total, args.epochs, args.warmup_epochs)
    optimiser = make_optimiser(args.optimiser, rate, args.momentum, args.weight_decay)
    tx = optax.chain(make_compressor(args.method, "data", total), optimiser)
    # Optimising the code that draws each parameter would take a third of all compile time.
    init = jax.jit(task.init, compiler_options={"xla_backend_optimization_level": 0})
    params, model_state = init(jax.random.key(args.seed))
    step = gcjax.make_train_step(task.loss, tx, mesh, axis_name="data", moments=choose_moments(args, model_state))
    return step, step.init(params, model_state=model_state, key=jax.random.key(args.seed + 1))


def choose_moments(args: argparse.Namespace, model_state: PyTree) -> Callable[..., Any] | None:
    """The function that computes the squares for the method, as `--squares` says; None if the method uses none."""
    if args.method[0] != "variance":
        return None
    if args.squares == "batch":  # the square of its gradient
        return functools.partial(gcjax.value_and_moments, microbatches=1, method="vmap")
    groups = None if args.squares == "samples" else args.squares
    return functools.partial(
        gcjax.value_and_moments, groups=groups, sample_axis=None if model_state is None else SAMPLE
    )


def whole_batch_norm(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """The context in which a loss applies its model, so that BatchNorm averages over a worker's whole batch."""
    if args.method[0] != "variance" or args.squares == "batch":
        return contextlib.nullcontext()
    from gcjax.flax import sync_batchnorm

    return sync_batchnorm(SAMPLE)


def prepare_on_workers(prepare: Callable[..., PyTree], mesh: jax.sharding.Mesh) -> Callable[..., PyTree]:
    """Let each worker prepare its part of a batch, with a key of its own."""

    def local(key, batch):
        return prepare(jax.random.fold_in(key, jax.lax.axis_index("data")), batch)

    run = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    return jax.jit(run)


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


def on_host(state: gcjax.TrainState) -> tuple[PyTree, PyTree]:
    """The parameters and the workers' mean of the model state, on the host."""
    averaged = None
    if state.model_state is not None:
        averaged = jax.tree.map(lambda x: np.asarray(x.mean(axis=0)), state.model_state.stacked())
    return jax.device_get(state.params), averaged


def count(params: PyTree) -> int:
    """Number of entries of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
