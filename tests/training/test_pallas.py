"""Losses with Pallas kernels, which JAX runs in `shard_map` only where it does not track varying values."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
from harness import mesh_of
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention as tpu_flash_attention
from jax.sharding import AxisType

import gcjax

WORKERS = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6, 4)).astype(np.float32)  # sequences of 6 tokens
PARAMS = {name: RNG.normal(size=(4, 4)).astype(np.float32) for name in ("q", "k", "v", "out")}


def attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def in_kernel(fn, outputs, *arrays):
    """`fn` of one sequence after the other, in a kernel that Pallas interprets."""

    def kernel(*refs):
        found = fn(*(ref[...] for ref in refs[: len(arrays)]))
        for ref, x in zip(refs[len(arrays) :], found, strict=True):
            ref[...] = x

    block = pl.BlockSpec((1, *arrays[0].shape[1:]), lambda i: (i, 0, 0))
    shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pl.pallas_call(
        kernel,
        grid=arrays[0].shape[:1],
        in_specs=[block] * len(arrays),
        out_specs=[block] * outputs,
        out_shape=[shape] * outputs,
        interpret=True,
    )(*arrays)


@jax.custom_vjp
def flash_attention(q, k, v):
    return in_kernel(lambda *x: (attention(*x),), 1, q, k, v)[0]


def backward(saved, given):
    return tuple(in_kernel(lambda *x: jax.vjp(attention, *x[:-1])[1](x[-1]), 3, *saved, given))


flash_attention.defvjp(lambda *x: (flash_attention(*x), x), backward)


def loss_with(attend, params, x):
    attended = attend(*(x @ params[name] for name in ("q", "k", "v")))
    return jnp.mean((attended @ params["out"] - 1) ** 2)


plain_loss, kernel_loss = (functools.partial(loss_with, attend) for attend in (attention, flash_attention))
COMPRESSORS = {
    "variance": lambda **more: gcjax.variance_compress(1.0, axis_name="data", **more),
    "top_k": lambda **more: gcjax.top_k_compress(0.25, axis_name="data", **more),
}


def by_step(loss, tx, mesh=None, **options):
    """The parameters after three steps, the losses of the last one, and what was sent."""
    chain = optax.chain(tx, optax.adam(1e-2))
    state, metrics = loops.by_step(loss, chain, PARAMS, [X] * 3, mesh or mesh_of(WORKERS), **options)
    return state.params, metrics[-1].loss, gcjax.info(state.opt_state).sent


def by_gradient(loss, tx, mesh=None, **options):
    mesh = mesh or mesh_of(WORKERS)
    params, losses, state = loops.by_gradient(loss, tx, optax.sgd(0.1), PARAMS, [X] * 3, mesh, **options)
    return params, losses[-1], gcjax.info(state).sent


def assert_trains_alike(train, method, **options):
    params, loss, sent = train(kernel_loss, COMPRESSORS[method](), check_vma=False, **options)
    want_params, want_loss, want_sent = train(plain_loss, COMPRESSORS[method](), **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, want_params)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    np.testing.assert_array_equal(sent, want_sent)
    for x in jax.tree.leaves(params):  # the same bits on all devices
        assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


@pytest.mark.parametrize("method", COMPRESSORS)
@pytest.mark.parametrize("train", [by_step, functools.partial(by_step, accumulate=2), by_gradient])
def test_a_kernel_in_the_loss_trains_as_its_plain_version(train, method):
    assert_trains_alike(train, method)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_kernel_trains_beside_axes_that_are_left_to_jax(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind))
    assert_trains_alike(by_gradient, "variance", mesh=mesh)
    with pytest.raises(ValueError, match=r"the mesh has the axes \['model'\] beside .*compressed_value_and_grad"):
        by_step(kernel_loss, COMPRESSORS["top_k"](), mesh=mesh, check_vma=False)


def test_a_kernel_trains_where_parameters_are_gathered():
    mesh, specs = jax.make_mesh((4, 2), ("data", "chip")), {name: jax.P("chip") for name in PARAMS}
    options = {"mesh": mesh, "axis_name": ("data", "chip"), "param_specs": specs}
    params, loss, _ = by_step(kernel_loss, COMPRESSORS["variance"](), check_vma=False, **options)
    want_params, want_loss, _ = by_step(plain_loss, COMPRESSORS["variance"](), **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, want_params)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)


def test_mistakes_beside_a_kernel_are_found():
    tx = COMPRESSORS["top_k"]()
    with pytest.raises(ValueError, match="sums over its samples"):
        by_step(lambda params, x: len(x) * kernel_loss(params, x), tx, check_vma=False)
    some = optax.chain(optax.masked(tx, {name: name != "out" for name in PARAMS}), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"the update of params\['out'\] differs between workers"):
        loops.by_step(kernel_loss, some, PARAMS, [X], mesh_of(WORKERS), check_vma=False)
    with pytest.raises(ValueError, match=r"opt_state\[0\]\[0\].trace\['k'\] would differ between workers"):
        by_step(kernel_loss, optax.chain(optax.trace(0.9), tx), check_vma=False)
    with pytest.raises(
        ValueError, match=r"would differ between workers along \['data'\].*averages over the axes in its axis_name"
    ):
        by_gradient(kernel_loss, gcjax.top_k_compress(0.25), check_vma=False)


@pytest.mark.parametrize("method", COMPRESSORS)
def test_jaxs_own_flash_attention_is_lowered_for_tpus(method):
    def loss(params, x):
        heads = [jnp.einsum("bld,dhk->bhlk", x, w) for w in params.values()]
        return jnp.mean(tpu_flash_attention(*heads) ** 2)

    mesh, tx = mesh_of(WORKERS), COMPRESSORS[method]()
    params, x = {name: jnp.ones((4, 2, 128)) for name in "qkv"}, jnp.ones((WORKERS, 128, 4))
    step = gcjax.make_train_step(loss, tx, mesh, check_vma=False)
    fn = gcjax.compressed_value_and_grad(loss, tx, mesh, check_vma=False)
    for traced in (jax.jit(step).trace(step.init(params), x), jax.jit(fn).trace(params, fn.init(params), x)):
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == 3  # forward, and backward for keys with values and for queries
