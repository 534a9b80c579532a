"""Runs a transform over real devices: shard_map or pmap, one worker or eight."""

import contextlib
import copy
import functools

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax._comm.collectives import SingleWorker, replaced_comm
from gcjax._kernels.layout import bucket_limit

NAMES = ("a", "b", "c", "d")


def mesh_of(workers, axis="data"):
    return jax.make_mesh((workers,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])


def tree_of(leaves):
    """A list of leaves as a dict, in the order of the list."""
    return dict(zip(NAMES, leaves, strict=False))


def stacked(per_worker):
    """One list of leaves per worker -> a dict of arrays (workers, ...)."""
    return tree_of([np.stack(leaves) for leaves in zip(*per_worker, strict=True)])


def axes_of(mode):
    """The axis names that a transform must be made with for a mode of `Runner`."""
    return ("x", "y") if mode == "two axes" else "data"


class Runner:
    """Steps of a transform on `workers` devices; gradients, squares and updates are arrays (workers, ...).

    mode: "shard_map", "unchecked shard_map" (check_vma=False), "two axes" (the workers along two mesh axes) or "pmap".
    mesh, axes: instead of those of the mode; one gradient for each index of the axes.
    """

    def __init__(self, tx, params, workers=None, mode="shard_map", *, mesh=None, axes=None):
        self.tx, self.workers, self.mode = tx, workers, mode
        if mode == "pmap":
            over = {"axis_name": "data", "devices": jax.devices()[:workers]}
            self.start = jax.pmap(lambda worker: tx.init(params), **over)(np.arange(workers))
            self._step = jax.pmap(self._local, **over)
        else:
            state = tx.init(params)
            axes = axes or axes_of(mode)
            if mode == "two axes":
                mesh = jax.make_mesh((2, workers // 2), axes, (AxisType.Auto,) * 2)
            mesh = mesh or mesh_of(workers)
            self.start = gcjax.distribute(state, mesh)
            specs = (gcjax.state_specs(state), P(axes), P(axes))
            sharded = jax.shard_map(
                self._one_of_stack,
                mesh=mesh,
                in_specs=specs,
                out_specs=((P(axes), P()), specs[0]),
                check_vma=mode != "unchecked shard_map",
            )
            self._step = jax.jit(sharded)
        self.state = self.start
        self._compiled = []

    def restart(self):
        """The same compiled step with fresh state."""
        fresh = copy.copy(self)
        fresh.state = self.start
        return fresh

    def _local(self, state, gradients, squares):
        extra = {} if squares is None else {"sum_grad_squared": squares}
        return self.tx.update(gradients, state, **extra)

    def _one_of_stack(self, state, gradients, squares):
        gradients, squares = jax.tree.map(lambda x: x[0], (gradients, squares))
        updates, state = self._local(state, gradients, squares)
        # Stacked as varying, so that bits can be compared between workers.
        return (jax.tree.map(lambda x: x[None], updates), updates), state

    def step(self, gradients, squares=None):
        """Returns the updates of all workers, numpy arrays (workers, ...)."""
        updates, self.state = jax.block_until_ready(self._step(self.state, gradients, squares))
        if self.mode != "pmap":
            updates, self.replicated = updates
        return jax.tree.map(np.asarray, updates)

    def times_compiled(self):
        return self._step._cache_size()

    def compiled_text(self, gradients, squares=None):
        if not self._compiled:  # shared by all restarts
            self._compiled.append(self._step.lower(self.state, gradients, squares).compile().as_text())
        return self._compiled[0]


def draws(tx, gradient, steps):
    """The updates of one worker with the same gradient in every step, (steps, *shape)."""

    def step(state, _):
        updates, state = tx.update(gradient, state)
        return state, updates

    return np.asarray(jax.lax.scan(step, tx.init(gradient), length=steps)[1])


def shared_draws(tx, gradients, steps):
    """The same of several workers with gradients (workers, *shape), along the axis "data"."""
    state, mesh = gcjax.distribute(tx.init(gradients[0]), mesh_of(len(gradients))), mesh_of(len(gradients))

    def run(state, gradients):
        def step(state, _):
            updates, state = tx.update(gradients[0], state)
            return state, updates

        return jax.lax.scan(step, state, length=steps)[1]

    specs = (gcjax.state_specs(state), P("data"))
    return np.asarray(jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P()))(state, gradients))


def messages(tx, gradients):
    """What a single worker gives to be gathered, added up or swapped, a list of numpy arrays; and the step's info."""
    comm, given = SingleWorker(), []

    def listening(collective):
        def call(x):
            given.append(x)
            return collective(x)

        return call

    for name in ("gather", "sum", "all_to_all"):
        setattr(comm, name, listening(getattr(comm, name)))
    comm.metered = lambda: lambda: comm  # of a sparse exchange: one capacity only

    def update(gradients):
        given.clear()
        state = tx.update(gradients, tx.init(gradients))[1]
        return tuple(given), state

    with replaced_comm(lambda *axes: comm):
        payloads, state = jax.jit(update)(gradients)
    return [np.asarray(x) for x in payloads], gcjax.info(state)


@contextlib.contextmanager
def limited_buckets(entries):
    """Inside, a bucket holds at most so many entries when a transform is made or traced."""
    token = bucket_limit.set(entries)
    try:
        yield
    finally:
        bucket_limit.reset(token)


def compress_state(state):
    """The first compressor's state within that of a transform."""
    return next(s for s in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(s))


def residuals(state, workers, sizes):
    """Every worker's residual as a list of leaves: from the state of the first compressor found."""
    local = jax.tree.map(np.asarray, compress_state(state).buckets.stacked())
    parts = [jax.tree.map(np.asarray, _residual_leaves(bucket, workers)) for bucket in local]
    result = []
    for w in range(workers):
        leaves = {}
        for bucket, part in zip(local, parts, strict=True):
            for s, x in zip(bucket.bucket.segments, part, strict=True):
                leaves.setdefault(s.leaf, []).append(np.ravel(x[w]))
        result.append([np.concatenate(leaves[i]) if i in leaves else np.zeros(0) for i in range(len(sizes))])
    return result


def _is_state(node):
    return isinstance(node, gcjax.CompressState)


@functools.partial(jax.jit, static_argnums=1)
def _residual_leaves(bucket_state, workers):
    return jax.vmap(lambda state: state.bucket.split(state.residual), axis_size=workers)(bucket_state)


@functools.cache
def sample_gradients(workers, sizes, steps, seed=0):
    """Dyadic gradients and squares, so that float32 arithmetic is exact and numpy must agree to the bit.

    Returns two lists over steps of lists over workers of lists of leaves. A third of the entries have small squares and
    are sent soon, others are noise; magnitudes spread over 2**-10 to 4, so that some are too small to be encoded.
    """
    rng = np.random.default_rng(seed)
    gradients, squares = [], []
    for _ in range(steps):
        g_step, s_step = [], []
        for _ in range(workers):
            scale = [2.0 ** rng.integers(-10, 2, n) for n in sizes]
            g = [(rng.integers(-4, 5, n) * k / 4).astype(np.float32) for n, k in zip(sizes, scale, strict=True)]
            factor = [rng.choice([0.25, 0.5, 4.0], n) for n in sizes]
            s = [(x.astype(np.float64) ** 2 * f).astype(np.float32) for x, f in zip(g, factor, strict=True)]
            g_step.append(g)
            s_step.append(s)
        gradients.append(g_step)
        squares.append(s_step)
    return gradients, squares
