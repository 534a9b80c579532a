"""The first door: what a training step checks when it is made, and when its state is."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gcjax._comm.collectives import axis_tuple, sharded_dimensions
from gcjax._core.own_models import GossipState, gossip_states, is_gossip_state, without_gossip
from gcjax._core.state import compress_states
from gcjax._kernels.layout import check_is_array
from gcjax._training.chain_check import reject_two_compressors
from gcjax._training.frozen import Split
from gcjax._types import Array, AxisNames, PyTree
from gcjax._validation import check_integer, check_random_key


def checked_axes(mesh: jax.sharding.Mesh, axis_name: AxisNames, accumulate: int) -> tuple[str, ...]:
    """The worker axes of a training step, after checking its arguments.

    Raises:
      ValueError: the mesh lacks an axis, or `accumulate` is below 1.
      TypeError: `accumulate` is not an int.
    """
    axes = axis_tuple(axis_name)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(f"axis_name={axis_name!r} must name axes of the mesh, which has {tuple(mesh.shape)}")
    check_integer("accumulate", accumulate, 1)
    return axes


def check_start(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    split: Split,
    model_state: PyTree,
    key: Array | None,
    axes: tuple[str, ...],
    sharding: Collection[str],
) -> tuple[str, ...]:
    """What `TrainStep.init` checks of its arguments and of the chain.

    Args:
      tx: the chain, whose `init` takes all parameters.
      params, model_state, key: the arguments.
      split: of the parameters.
      axes: of the batch.
      sharding: axes over which parameters are sharded.

    Returns:
      The axes along which workers have parameters of their own, as a gossip transform in `tx` says; () without one.

    Raises:
      ValueError, TypeError: see `make_train_step`.
    """
    if key is not None:
        check_random_key("key", key)
    _check_params(params, split(params)[0])
    _check_model_state(model_state)
    opt_state = jax.eval_shape(tx.init, params)
    found = gossip_states(opt_state)
    if not found:
        reject_two_compressors(tx, params, lambda params: split(params)[0])
    else:
        _check_gossip(opt_state, found, axes, sharding)
    _check_compressors(without_gossip(opt_state), axes)
    return found[0].traffic.axes if found else ()


def _check_gossip(
    opt_state: PyTree, found: list[GossipState], axes: tuple[str, ...], sharding: Collection[str]
) -> None:
    """Raise ValueError if something spoils what a gossip transform does."""
    models = found[0].traffic.axes
    if len(found) > 1:
        raise ValueError(f"the chain has {len(found)} gossip transforms; end it with one, which averages the models")
    if not models or not set(models) <= set(axes):
        raise ValueError(
            f"the step's workers are along {axes}, but the gossip transform names {models}; give it some of these axes "
            "as axis_name. Along the others the step averages the gradients"
        )
    if sharding:
        raise ValueError(
            f"param_specs shards parameters over {sorted(sharding)}, but with a gossip transform every worker has a "
            "whole model of its own: leave param_specs out"
        )
    if beside := compress_states(without_gossip(opt_state)):
        raise ValueError(
            f"a compressor over {beside[0].report.axes} stands beside the gossip transform: it averages the gradients "
            "in every step, which leaves gossip nothing to do. Leave it out; to compress what is exchanged, use "
            "gcjax.gossip.local_sgd(compressor=...) or swarm_average(bits=...)"
        )
    _check_place(opt_state)


def _check_place(opt_state: PyTree) -> None:
    """Raise ValueError if a transform follows the gossip transform, or may keep a worker from an exchange."""
    if is_gossip_state(opt_state) or not isinstance(opt_state, tuple):
        return
    for kind, name in ((optax.ApplyIfFiniteState, "apply_if_finite"), (optax.MultiStepsState, "MultiSteps")):
        if isinstance(opt_state, kind) and gossip_states(opt_state):
            raise ValueError(
                f"optax.{name} stands around the gossip transform: a worker that skips an update would miss an "
                f"exchange, and the others would wait for it. Put optax.{name} around the optimiser alone"
            )
    if type(opt_state) is tuple and gossip_states(opt_state[:-1]):  # the state of optax.chain
        raise ValueError(
            "another transform follows the gossip transform in the chain, and would change the step to the averaged "
            "models. Put the gossip transform last"
        )
    for node in opt_state:
        _check_place(node)


def _check_compressors(opt_state: PyTree, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a compressor exchanges nothing along the axes of the step, or not in every step.

    Raises:
      TypeError: `optax.lookahead`, which takes no parameters but pairs of them.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_is_special):
        if isinstance(node, optax.LookaheadState):
            raise TypeError(
                "optax.lookahead trains pairs of parameters (LookaheadParams), but a loss takes single ones. Give the "
                "step the inner optimiser, and every k steps move the slow parameters yourself: "
                "slow = optax.incremental_update(state.params, slow, 0.5), then "
                "state = state._replace(params=jax.tree.map(jnp.copy, slow))"
            )
        if isinstance(node, optax.ApplyIfFiniteState) and compress_states(node):
            raise ValueError(
                "optax.apply_if_finite wraps a compressor, which must take part in every step. Leave it out: "
                "the training step skips bad steps by itself"
            )
    for compressor in compress_states(opt_state):
        if not set(compressor.report.axes) & set(axes):
            named = axes[0] if len(axes) == 1 else axes
            raise ValueError(
                f"a compressor in tx has no axis_name, so the workers' parameters would drift apart; give it "
                f"axis_name={named!r}, the axis of the training step"
            )


def _check_params(params: PyTree, trained: PyTree) -> None:
    """Raise TypeError for a parameter that is no array, or that is to be trained and has no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_is_array(path, leaf)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    for path, leaf in leaves:  # first, as counters come with keys
        if _is_key(leaf):
            raise TypeError(f"params{jax.tree_util.keystr(path)} is a random key, which cannot be trained. {_OWN_KEYS}")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, which cannot be trained; make "
                "it part of the model_state, or freeze it with make_train_step(trainable=...)"
            )


def _check_model_state(model_state: PyTree) -> None:
    """Raise TypeError for a random key in the model state: all workers and samples would draw the same from it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if _is_key(leaf):
            raise TypeError(
                f"model_state{jax.tree_util.keystr(path)} is a random key, which would be the same for all workers and "
                f"samples. {_OWN_KEYS}"
            )


def _is_key(leaf: object) -> bool:
    return jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


_OWN_KEYS = (
    "Leave random keys out of both, and give step.init(key=...): loss_fn(params, batch, key=...) then gets another key "
    "for each worker, step and sample. With Flax NNX: graphdef, params, rest = nnx.split(model, nnx.Param, ...); in "
    "loss_fn: model = nnx.merge(graphdef, params, rest, copy=True), then gcjax.flax.reseed(model, default=key) if the "
    "model was made with nnx.Rngs(0), or dropout=key for a stream of that name"
)


def checked_specs(param_specs: PyTree, mesh: jax.sharding.Mesh) -> list[PartitionSpec]:
    """The leaves of `param_specs`.

    Raises:
      TypeError: one is no `PartitionSpec`.
      ValueError: one shards over no axis of the mesh.
    """
    found = jax.tree_util.tree_leaves_with_path(param_specs)
    for path, spec in found:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"param_specs{jax.tree_util.keystr(path)} must be a jax.sharding.PartitionSpec, got {spec!r}"
            )
        if unknown := sorted({name for entry in spec for name in axis_tuple(entry)} - set(mesh.shape)):
            raise ValueError(f"param_specs has {spec}, but the mesh has no axis {unknown}, only {tuple(mesh.shape)}")
    return [spec for _, spec in found]


def check_dimensions(spec: PartitionSpec, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a spec shards a dimension over axes of both sorts."""
    for _, names in sharded_dimensions(spec, tuple(mesh.shape)):
        if set(names) & set(axes) and not set(names) <= set(axes):
            raise ValueError(
                f"param_specs has {spec}, which shards one dimension over {names}, some of them axes of the batch and "
                "some not; shard different dimensions over them"
            )


def check_no_further_axes(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Raise ValueError if a loss could use axes of the mesh along which the workers do not lie.

    Without its tracking JAX would count a gradient once for every device along an axis over which the loss sums.
    """
    if others := [name for name, size in mesh.shape.items() if size > 1 and name not in axes]:
        raise ValueError(
            f"check_vma=False, but the mesh has the axes {others} beside axis_name={axes}: without JAX's tracking, "
            "gradients of a loss that calls collectives over them would be wrong. Use gcjax.compressed_value_and_grad, "
            "which leaves them to JAX, or a mesh of the workers' axes alone"
        )


def _is_special(node: object) -> bool:
    return isinstance(node, (optax.ApplyIfFiniteState, optax.LookaheadState))
