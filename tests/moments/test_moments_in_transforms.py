"""`value_and_moments` where training code calls it: in shard_map, pmap, scan and vmap, and without jit."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from moments_cases import CASES, SIZE, assert_close, batch_of, draw
from selection import cases

from gcjax import value_and_moments

SHARDED = [
    "conv grouped",
    "conv same",
    "factors on the weight",
    "layers of rnns",
    "rnn tied",
    "scanned checkpointed blocks",
    "tied embedding",
    "attention",
    "dense with positions",
]
COVERED = ("attention", "dense with positions")  # their rules are those of "factors on the weight"
CHECK_VMA = {"attention": (True, False), "conv same": (False,), "rnn tied": (True, False)}  # the others: only True


def two_workers():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))


def sharded(loss, check_vma=True, **options):
    """`value_and_moments` on each of two workers with its half of the batch; results are stacked."""

    def worker(params, batch):
        return jax.tree.map(lambda a: a[None], value_and_moments(loss, **options)(params, batch))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(worker, mesh=two_workers(), check_vma=check_vma, **specs)


def one_by_one(loss, params, batch, **options):
    """Moments of the two halves of the batch, each on its own, stacked."""
    halves = [jax.tree.map(operator.itemgetter(part), batch) for part in (slice(SIZE // 2), slice(SIZE // 2, None))]
    fn = jax.jit(value_and_moments(loss, method="vmap", **options))
    return jax.tree.map(lambda *a: jnp.stack(a), *(fn(params, half) for half in halves))


@cases("name", SHARDED, default=(lambda name: name not in COVERED, 3))
def test_in_shard_map_moments_are_local_to_the_worker(name):
    checks = CHECK_VMA.get(name, (True,))
    with jax.enable_x64(True):
        loss, params, batch = CASES[name]()
        got = jax.jit(lambda *args: [sharded(loss, check_vma)(*args) for check_vma in checks])(params, batch)
        want = one_by_one(loss, params, batch)
        for check_vma, moments in zip(checks, got, strict=True):
            assert_close(moments, want, name=f"check_vma={check_vma}")


def test_in_shard_map_vmap_and_scan_methods_are_local_too():
    with jax.enable_x64(True):
        loss, params, batch = CASES["attention"]()
        fns = [sharded(loss, method=method, max_bytes=1) for method in ("vmap", "scan")]
        want = one_by_one(loss, params, batch)
        for moments in jax.jit(lambda *args: [fn(*args) for fn in fns])(params, batch):
            assert_close(moments, want)


def test_in_pmap_moments_are_local_to_the_worker():
    with jax.enable_x64(True):
        loss, params, batch = CASES["rnn"]()
        split = jax.tree.map(lambda a: a.reshape(2, SIZE // 2, *a.shape[1:]), batch)
        step = jax.pmap(value_and_moments(loss), in_axes=(None, 0), devices=jax.devices()[:2])
        assert_close(step(params, split), one_by_one(loss, params, batch))


def test_without_jit_the_moments_are_the_same():
    loss, params, batch = CASES["scanned blocks"]()
    eager = value_and_moments(loss)(params, batch)
    assert_close(eager, jax.jit(value_and_moments(loss))(params, batch), 1e-6)


def test_in_scan_the_moments_of_parts_accumulate():
    with jax.enable_x64(True):
        loss, params, batch = CASES["conv same"]()
        parts = jax.tree.map(lambda a: a.reshape(3, SIZE // 3, *a.shape[1:]), batch)

        @jax.jit
        def accumulate(params, parts):
            zeros = jax.tree.map(jnp.zeros_like, params)

            def step(total, part):
                _, moments = value_and_moments(loss)(params, part)
                return jax.tree.map(jnp.add, total, tuple(moments)), None

            return jax.lax.scan(step, (zeros, zeros), parts)[0]

        grad, squares = accumulate(params, parts)
        _, whole = jax.jit(value_and_moments(loss))(params, batch)
        assert_close(jax.tree.map(lambda g: g / 3, grad), whole.grad)
        assert_close(jax.tree.map(lambda s: s / 9, squares), whole.sum_grad_squared)


def test_in_vmap_each_model_has_its_own_moments():
    with jax.enable_x64(True):
        loss, params, batch = CASES["rnn tied"]()
        other = jax.tree.map(lambda p: 2 * p, params)
        both = jax.tree.map(lambda *p: jnp.stack(p), params, other)
        got = jax.jit(jax.vmap(value_and_moments(loss), in_axes=(0, None)))(both, batch)
        one = jax.jit(value_and_moments(loss))
        want = jax.tree.map(lambda *a: jnp.stack(a), *(one(p, batch) for p in (params, other)))
        assert_close(got, want)


def batch_norm_loss(params, batch):
    y = batch["x"] @ params["w"]
    mean, square = jax.lax.pmean((y.mean(0), jnp.square(y).mean(0)), "samples")
    y = jnp.tanh((y - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3) * params["scale"])
    return jnp.mean(batch["s"] * jnp.sum(y @ params["v"], axis=-1))


def test_sample_axis_reaches_through_the_batch_statistics():
    """Reference: every sample gets its own copy of the weights; its contribution is the gradient of that copy."""
    with jax.enable_x64(True):
        params = {"w": draw(3, 5, 7), "scale": 1 + draw(4, 7), "v": draw(5, 7, 3)}
        batch = batch_of(5)

        def with_copies(copies):
            y = jnp.einsum("zi,zij->zj", batch["x"], copies["w"])
            y = (y - y.mean(0)) * jax.lax.rsqrt(jnp.square(y).mean(0) - y.mean(0) ** 2 + 1e-3)
            y = jnp.tanh(y * copies["scale"])
            return jnp.mean(batch["s"] * jnp.sum(jnp.einsum("zi,zij->zj", y, copies["v"]), axis=-1))

        parts = jax.jit(jax.grad(with_copies))(jax.tree.map(lambda p: jnp.stack([p] * SIZE), params))
        for method in ("vmap", "auto"):
            fn = value_and_moments(batch_norm_loss, sample_axis="samples", method=method, max_bytes=1)
            _, moments = jax.jit(fn)(params, batch)
            assert_close(moments.grad, jax.tree.map(lambda c: c.sum(0), parts))
            assert_close(moments.sum_grad_squared, jax.tree.map(lambda c: (c * c).sum(0), parts))


def test_in_shard_map_sample_axis_keeps_statistics_per_worker():
    with jax.enable_x64(True):
        params = {"w": draw(3, 5, 7), "scale": 1 + draw(4, 7), "v": draw(5, 7, 3)}
        batch = batch_of(5)
        fns = [sharded(batch_norm_loss, check_vma, sample_axis="samples") for check_vma in (True, False)]
        want = one_by_one(batch_norm_loss, params, batch, sample_axis="samples")
        for moments in jax.jit(lambda *args: [fn(*args) for fn in fns])(params, batch):
            assert_close(moments, want)


def test_dropout_key_can_fold_in_the_sample():
    """Dropout of a weight's entries: the mask is a factor on the weight that differs between samples."""
    with jax.enable_x64(True):
        params, x, key = {"w": draw(3, 5, 7)}, draw(1, SIZE, 5), jax.random.key(0)

        def sample_loss(params, x, key):
            keep = jax.random.bernoulli(key, 0.5, (5, 7))
            return jnp.mean(jnp.sum(jnp.tanh(x @ (params["w"] * keep)), axis=-1))

        def loss(params, batch):
            return sample_loss(params, batch["x"], jax.random.fold_in(batch["key"], jax.lax.axis_index("samples")))

        fn = value_and_moments(loss, in_axes={"x": 0, "key": None}, sample_axis="samples")
        _, moments = jax.jit(fn)(params, {"x": x, "key": key})
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(SIZE))
        grads = jax.jit(jax.vmap(jax.grad(sample_loss), (None, 0, 0)))(params, x[:, None], keys)["w"] / SIZE
        np.testing.assert_allclose(moments.grad["w"], grads.sum(0), atol=1e-12)
        np.testing.assert_allclose(moments.sum_grad_squared["w"], (grads**2).sum(0), atol=1e-12)
