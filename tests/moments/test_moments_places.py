"""The places from which training code calls it: meshes, jit, gradient accumulation, checkpoints."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moments_cases import CASES, SIZE, assert_close, draw, quick_jit

from gcjax import value_and_moments

PLACED = [
    ("dense with positions", True),
    ("conv grouped", True),
    ("tied embedding", True),
    ("scanned checkpointed blocks", True),
    ("rnn tied", True),
    ("layers of rnns", True),
    ("factors on the weight", True),
    ("attention", True),
    ("conv same", False),
    ("rnn tied", False),
    ("attention", False),
]


def two_workers():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))


def per_worker(loss, params, batch, **keywords):
    """Moments of the two halves of the batch, each on its own, stacked."""
    halves = [jax.tree.map(operator.itemgetter(part), batch) for part in (slice(SIZE // 2), slice(SIZE // 2, None))]
    out = [quick_jit(value_and_moments(loss, method="vmap", **keywords))(params, half) for half in halves]
    return jax.tree.map(lambda *a: jnp.stack(a), *out)


@pytest.mark.parametrize(("name", "check_vma"), PLACED)
def test_inside_shard_map_moments_are_local_to_the_worker(name, check_vma):
    with jax.enable_x64(True):
        loss, params, batch = CASES[name]()
        mesh = two_workers()

        def worker(params, batch):
            return jax.tree.map(lambda a: a[None], value_and_moments(loss)(params, batch))

        step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma)
        assert_close(quick_jit(step)(params, batch), per_worker(loss, params, batch))


@pytest.mark.parametrize("method", ["vmap", "scan"])
def test_inside_shard_map_the_plain_methods_are_local_too(method):
    with jax.enable_x64(True):
        loss, params, batch = CASES["attention"]()
        mesh = two_workers()

        def worker(params, batch):
            fn = value_and_moments(loss, method=method, max_bytes=1)
            return jax.tree.map(lambda a: a[None], fn(params, batch))

        step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        assert_close(quick_jit(step)(params, batch), per_worker(loss, params, batch))


def test_inside_pmap_moments_are_local_to_the_worker():
    with jax.enable_x64(True):
        loss, params, batch = CASES["rnn"]()
        split = jax.tree.map(lambda a: a.reshape(2, SIZE // 2, *a.shape[1:]), batch)
        step = jax.pmap(value_and_moments(loss), in_axes=(None, 0), devices=jax.devices()[:2])
        assert_close(step(params, split), per_worker(loss, params, batch))


def test_without_jit_the_result_is_the_same():
    loss, params, batch = CASES["scanned blocks"]()
    eager = value_and_moments(loss)(params, batch)
    assert_close(eager, quick_jit(value_and_moments(loss))(params, batch), 1e-6)


def test_inside_scan_the_moments_of_parts_accumulate():
    with jax.enable_x64(True):
        loss, params, batch = CASES["conv same"]()
        parts = jax.tree.map(lambda a: a.reshape(3, SIZE // 3, *a.shape[1:]), batch)

        @quick_jit
        def accumulate(params, parts):
            zeros = jax.tree.map(jnp.zeros_like, params)

            def step(total, part):
                _, moments = value_and_moments(loss)(params, part)
                return jax.tree.map(jnp.add, total, tuple(moments)), None

            return jax.lax.scan(step, (zeros, zeros), parts)[0]

        grad, squares = accumulate(params, parts)
        _, whole = quick_jit(value_and_moments(loss))(params, batch)
        assert_close(jax.tree.map(lambda g: g / 3, grad), whole.grad)
        assert_close(jax.tree.map(lambda s: s / 9, squares), whole.sum_grad_squared)


def test_under_vmap_over_models_each_has_its_own_moments():
    with jax.enable_x64(True):
        loss, params, batch = CASES["rnn tied"]()
        other = jax.tree.map(lambda p: 2 * p, params)
        both = jax.tree.map(lambda *p: jnp.stack(p), params, other)
        got = quick_jit(jax.vmap(value_and_moments(loss), in_axes=(0, None)))(both, batch)
        one = quick_jit(value_and_moments(loss))
        want = jax.tree.map(lambda *a: jnp.stack(a), *(one(p, batch) for p in (params, other)))
        assert_close(got, want)


def batch_norm_loss(params, batch):
    y = batch["x"] @ params["w"]
    mean, square = jax.lax.pmean((y.mean(0), jnp.square(y).mean(0)), "samples")
    y = jnp.tanh((y - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3) * params["scale"])
    return jnp.mean(batch["s"] * jnp.sum(y @ params["v"], axis=-1))


def test_with_a_sample_axis_each_sample_counts_through_the_batch_statistics():
    """Reference: every sample gets its own copy of the weights; its contribution is the gradient of that copy."""
    with jax.enable_x64(True):
        params = {"w": draw(3, 5, 7), "scale": 1 + draw(4, 7), "v": draw(5, 7, 3)}
        batch = {"x": draw(1, SIZE, 5), "s": draw(2, SIZE)}

        def with_copies(copies):
            y = jnp.einsum("zi,zij->zj", batch["x"], copies["w"])
            y = (y - y.mean(0)) * jax.lax.rsqrt(jnp.square(y).mean(0) - y.mean(0) ** 2 + 1e-3)
            y = jnp.tanh(y * copies["scale"])
            return jnp.mean(batch["s"] * jnp.sum(jnp.einsum("zi,zij->zj", y, copies["v"]), axis=-1))

        parts = quick_jit(jax.grad(with_copies))(jax.tree.map(lambda p: jnp.stack([p] * SIZE), params))
        for method in ("vmap", "auto"):
            fn = value_and_moments(batch_norm_loss, sample_axis="samples", method=method, max_bytes=1)
            _, moments = quick_jit(fn)(params, batch)
            assert_close(moments.grad, jax.tree.map(lambda c: c.sum(0), parts))
            assert_close(moments.sum_grad_squared, jax.tree.map(lambda c: (c * c).sum(0), parts))


@pytest.mark.parametrize("check_vma", [True, False])
def test_sample_axis_inside_shard_map_keeps_statistics_per_worker(check_vma):
    with jax.enable_x64(True):
        params = {"w": draw(3, 5, 7), "scale": 1 + draw(4, 7), "v": draw(5, 7, 3)}
        batch = {"x": draw(1, SIZE, 5), "s": draw(2, SIZE)}
        mesh = two_workers()

        def worker(params, batch):
            fn = value_and_moments(batch_norm_loss, sample_axis="samples")
            return jax.tree.map(lambda a: a[None], fn(params, batch))

        step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma)
        want = per_worker(batch_norm_loss, params, batch, sample_axis="samples")
        assert_close(quick_jit(step)(params, batch), want)


def test_dropout_can_fold_the_sample_into_its_key():
    """Dropout of a weight's entries: the mask is a factor on the weight that differs between samples."""
    with jax.enable_x64(True):
        params, x, key = {"w": draw(3, 5, 7)}, draw(1, SIZE, 5), jax.random.key(0)

        def sample_loss(params, x, key):
            keep = jax.random.bernoulli(key, 0.5, (5, 7))
            return jnp.mean(jnp.sum(jnp.tanh(x @ (params["w"] * keep)), axis=-1))

        def loss(params, batch):
            return sample_loss(params, batch["x"], jax.random.fold_in(batch["key"], jax.lax.axis_index("samples")))

        fn = value_and_moments(loss, in_axes={"x": 0, "key": None}, sample_axis="samples")
        _, moments = quick_jit(fn)(params, {"x": x, "key": key})
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(SIZE))
        grads = jax.vmap(jax.grad(sample_loss), (None, 0, 0))(params, x[:, None], keys)["w"] / SIZE
        np.testing.assert_allclose(moments.grad["w"], grads.sum(0), atol=1e-12)
        np.testing.assert_allclose(moments.sum_grad_squared["w"], (grads**2).sum(0), atol=1e-12)
