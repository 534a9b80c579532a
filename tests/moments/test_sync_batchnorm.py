import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gcjax import check_moments, value_and_moments

flax = pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

from gcjax.flax import sync_batchnorm  # noqa: E402

IN_AXES = {"x": 0, "y": 0, "stats": None}


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.BatchNorm(use_running_average=False)(linen.Conv(4, (3, 3))(x)))
        return linen.Dense(3)(linen.BatchNorm(use_running_average=False)(x.mean((1, 2))))


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=False)(x.mean((1, 2))))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(jax.nn.relu(self.norm(self.conv(x))).mean((1, 2)))


def make_batch(dtype):
    rng = np.random.default_rng(0)
    return {"x": jnp.asarray(rng.normal(size=(6, 6, 5, 2)), dtype), "y": jnp.asarray(rng.normal(size=(6, 3)), dtype)}


def linen_losses(dtype, model=None):
    """The loss as trained without moments, the same under `sync_batchnorm`, and their arguments."""
    batch, model = make_batch(dtype), model or LinenNet()
    variables = jax.tree.map(lambda a: a.astype(dtype), jax.jit(model.init)(jax.random.key(0), batch["x"]))

    def plain(params, batch):
        state = {"params": params, "batch_stats": batch["stats"]}
        out, updated = model.apply(state, batch["x"], mutable=["batch_stats"])
        return jnp.mean(jnp.sum((out - batch["y"]) ** 2, axis=-1)), updated["batch_stats"]

    def synced(params, batch):
        with sync_batchnorm("samples"):
            return plain(params, batch)

    return plain, synced, variables["params"], {**batch, "stats": variables["batch_stats"]}


def nnx_losses(dtype):
    batch = make_batch(dtype)
    graph, params, stats = nnx.split(NnxNet(), nnx.Param, ...)
    params, stats = jax.tree.map(lambda a: a.astype(dtype), (params, stats))

    def build(context):
        def loss(params, batch):
            model = nnx.merge(graph, params, batch["stats"], copy=True)
            with context(model):
                out = model(batch["x"])
            updated = nnx.split(model, nnx.Param, ...)[2]
            return jnp.mean(jnp.sum((out - batch["y"]) ** 2, axis=-1)), updated

        return loss

    plain, synced = (
        build(lambda model: sync_batchnorm("samples")),
        build(lambda model: sync_batchnorm("samples", model)),
    )
    return plain, synced, params, {**batch, "stats": stats}


@pytest.mark.parametrize("losses", [linen_losses, nnx_losses])
def test_synced_batchnorm_equals_the_whole_batch(losses):
    with jax.enable_x64(True):
        plain, synced, params, batch = losses(jnp.float64)
        fn = value_and_moments(synced, has_aux=True, sample_axis="samples", in_axes=IN_AXES)

        @jax.jit
        def both(params, batch):
            return fn(params, batch), jax.value_and_grad(plain, has_aux=True)(params, batch)

        ((value, stats), moments), ((expected, expected_stats), grad) = both(params, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), moments.grad, grad)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), stats, expected_stats)


def test_check_moments_catches_batchnorm_that_is_not_synced():
    plain, synced, params, batch = linen_losses(jnp.float32, LinenNorm())
    check_moments(synced, has_aux=True, sample_axis="samples", in_axes=IN_AXES)(params, batch)
    with pytest.raises(ValueError, match=r"sync_batchnorm"):
        check_moments(plain, has_aux=True, in_axes=IN_AXES)(params, batch)


def test_models_keep_no_axis_name_after_the_context():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with sync_batchnorm("samples", norm):
        assert norm.axis_name == "samples"
    assert norm.axis_name is None
    with pytest.raises(TypeError, match="NNX"), sync_batchnorm("samples", LinenNet()):
        pass
