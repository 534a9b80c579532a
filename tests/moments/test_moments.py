import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments_cases import CASES, SIZE, assert_close, draw, quick_jit

from gcjax import check_moments, explain_moments, value_and_moments

METHODS = ["auto", "sinks", "vmap", "scan"]


def net(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def data(size=6, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {"w": normal(5, 7), "b": normal(7), "v": normal(7)}, {"x": normal(size, 5), "y": normal(size)}


def by_hand(loss_fn, params, batch, scale, groups=6):
    """One jax.grad per group, added up in a Python loop."""
    size = 6 // groups
    parts = [jax.tree.map(operator.itemgetter(slice(i * size, (i + 1) * size)), batch) for i in range(groups)]
    gradient = quick_jit(jax.grad(loss_fn))
    grads = [jax.tree.map(lambda g: np.asarray(g, np.float64) * scale, gradient(params, p)) for p in parts]
    return jax.tree.map(lambda *g: sum(g), *grads), jax.tree.map(lambda *g: sum(x * x for x in g), *grads)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_bytes", [1, 1700])
def test_moments_equal_the_loop_over_samples(method, max_bytes):
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)
        value, moments = quick_jit(value_and_moments(net, method=method, max_bytes=max_bytes))(params, batch)
        grad, squares = by_hand(net, params, batch, 1 / 6)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)
        np.testing.assert_allclose(value, net(params, batch), rtol=1e-12)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_sum_loss_gives_the_gradient_of_the_sum_and_unscaled_squares(method):
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)

        def total(params, batch):
            return net(params, batch) * batch["y"].shape[0]

        value, moments = quick_jit(value_and_moments(total, reduction="sum", method=method))(params, batch)
        grad, squares = by_hand(net, params, batch, 1.0)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)
        np.testing.assert_allclose(value, total(params, batch), rtol=1e-12)
        check_moments(total, reduction="sum")(params, batch)


@pytest.mark.parametrize("method", ["auto", "vmap", "scan"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_microbatches_square_the_gradients_of_groups(method, groups):
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)
        _, moments = quick_jit(value_and_moments(net, microbatches=groups, method=method))(params, batch)
        grad, squares = by_hand(net, params, batch, 1 / groups, groups)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)


def weighted(params, batch):
    """A sum of per-sample losses, each times a weight that was normalised outside."""
    errors = (jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] - batch["y"]) ** 2
    return jnp.sum(batch["weight"] * errors)


def test_weights_normalised_outside_give_each_sample_its_share_and_padding_none():
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)
        mask = jnp.array([1.0, 1, 1, 1, 0, 0])
        padded = {**batch, "weight": mask / mask.sum()}
        fn = quick_jit(value_and_moments(weighted, reduction="sum"))
        _, moments = fn(params, padded)
        _, real = quick_jit(value_and_moments(net))(params, jax.tree.map(lambda a: a[:4], batch))
        assert_close(moments, real)
        check_moments(weighted, reduction="sum")(params, padded)


def test_weights_may_be_normalised_over_the_sample_axis():
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)
        weight = jnp.array([2.0, 1, 0.5, 3, 0, 0])

        def loss(params, batch):
            total = jax.lax.psum(jnp.sum(batch["weight"]), "samples")
            return weighted(params, {**batch, "weight": batch["weight"] / total})

        fn = quick_jit(value_and_moments(loss, reduction="sum", sample_axis="samples"))
        inside = fn(params, {**batch, "weight": weight})
        outside = quick_jit(value_and_moments(weighted, reduction="sum"))(
            params, {**batch, "weight": weight / weight.sum()}
        )
        assert_close(inside, outside)


def test_check_moments_names_leaf_size_and_cure():
    params, batch = data()

    def coupled(params, batch):
        hidden = batch["x"] @ params["w"]
        return jnp.mean((hidden - jnp.mean(hidden, axis=0)) ** 2)

    def masked_mean(params, batch):
        return weighted(params, batch) / jnp.sum(batch["weight"])

    check_moments(net)(params, batch)
    check_moments(net, method="vmap", microbatches=3)(params, batch)
    with pytest.raises(ValueError, match=r"gradient of params\['w'\] differs .* by .* BatchNorm: set sample_axis"):
        check_moments(coupled)(params, batch)
    with pytest.raises(ValueError, match="divide the weights by their sum"):
        check_moments(masked_mean)(params, {**batch, "weight": jnp.arange(6.0)})
    with pytest.raises(TypeError, match="outside jit"):
        quick_jit(check_moments(net))(params, batch)


def test_aux_has_the_shapes_of_the_whole_batch():
    params, batch = data()

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        aux = {
            "hidden": hidden,
            "mean": hidden.mean(),
            "step": batch["step"] + 1,
            "equal": params["b"].sum() / 3,
            "signs": hidden > 0,
        }
        return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2), aux

    batch = {**batch, "step": jnp.asarray(4)}
    axes = {"x": 0, "y": 0, "step": None}
    (expected, want), _ = quick_jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    for keywords in ({}, {"method": "scan"}, {"method": "vmap", "max_bytes": 1000}, {"microbatches": 2}):
        fn = value_and_moments(loss, has_aux=True, in_axes=axes, **keywords)
        (value, aux), _ = quick_jit(fn)(params, batch)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), aux) == jax.tree.map(lambda a: (a.shape, a.dtype), want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), aux, want)
        assert aux["equal"] == want["equal"]
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "name", ["dense with positions", "dense", "conv same", "embedding by index", "scanned blocks", "rnn"]
)
def test_squares_of_half_precision_gradients_accumulate_in_float32(name, dtype):
    loss, params, batch = CASES[name]()
    cast = jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, (params, batch))
    # In float16 the squares of these gradients are below the smallest number.
    scale = 1e-3
    _, moments = quick_jit(value_and_moments(lambda p, b: scale * loss(p, b)))(*cast)
    _, wide = quick_jit(value_and_moments(lambda p, b: scale * loss(p, b)))(params, batch)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(moments.grad))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(moments.sum_grad_squared))
    assert_close(moments.sum_grad_squared, wide.sum_grad_squared, 0.1)


@pytest.mark.parametrize("name", ["dense", "conv same", "embedding by index", "tied embedding", "rnn"])
def test_a_nan_sample_makes_nan_moments_and_no_crash(name):
    loss, params, batch = CASES[name]()
    batch = {**batch, "s": batch["s"].at[2].set(jnp.nan)}
    value, moments = quick_jit(value_and_moments(loss))(params, batch)
    assert jnp.isnan(value)
    for leaf in jax.tree.leaves(moments):
        assert jnp.isnan(leaf).any()


def test_a_batch_of_one_sample_has_the_squared_gradient():
    with jax.enable_x64(True):
        params, batch = data(1, jnp.float64)
        for method in METHODS:
            _, moments = value_and_moments(net, method=method)(params, batch)
            assert_close(moments.sum_grad_squared, jax.tree.map(lambda g: g * g, moments.grad))


def test_an_empty_tree_of_parameters_works():
    value, moments = value_and_moments(lambda p, b: jnp.mean(b))({}, jnp.arange(4.0))
    assert value == 1.5
    assert moments == ({}, {})


def loss_of(output):
    return lambda params, batch: output(jnp.mean(batch["x"] @ params["w"]))


BAD_CALLS = {
    "vector loss": ({"loss_fn": loss_of(lambda y: y[None])}, {}, ValueError, r"scalar, got shape \(1,\)"),
    "empty loss": ({"loss_fn": loss_of(lambda y: jnp.zeros((0,)) * y)}, {}, ValueError, r"shape \(0,\)"),
    "tuple loss": ({"loss_fn": loss_of(lambda y: (y, y))}, {}, TypeError, "has_aux=True"),
    "no aux": ({"loss_fn": loss_of(lambda y: y), "has_aux": True}, {}, TypeError, r"must return \(loss, aux\)"),
    "integer loss": ({"loss_fn": loss_of(lambda y: y.astype(int))}, {}, TypeError, "dtype int32"),
    "complex loss": ({"loss_fn": loss_of(lambda y: y + 1j)}, {}, TypeError, "dtype complex64"),
    "unequal sizes": ({}, {"batch": {"x": jnp.ones((6, 5)), "y": jnp.ones(4)}}, ValueError, r"'x'\]: 6, .*'y'\]: 4"),
    "scalar leaf": ({}, {"batch": {"x": jnp.ones((6, 5)), "y": jnp.ones(())}}, ValueError, r"'y'\] is a scalar"),
    "empty batch": ({}, {"batch": {"x": jnp.ones((0, 5)), "y": jnp.ones(0)}}, ValueError, r"'x'\] has leading size 0"),
    "no batch": ({}, {"batch": {}}, ValueError, "no leaf to split"),
    "integer parameter": ({}, {"params": {"w": jnp.ones(5, int)}}, TypeError, r"params\['w'\] has dtype int32"),
    "complex parameter": ({}, {"params": {"w": jnp.ones(5, complex)}}, TypeError, "complex64"),
    "microbatches": ({"microbatches": 4}, {}, ValueError, "microbatches=4 does not divide the batch size 6"),
    "negative microbatches": ({"microbatches": -1}, {}, ValueError, "at least 1, got -1"),
    "method": ({"method": "fast"}, {}, ValueError, "method must be one of .* got 'fast'"),
    "reduction": ({"reduction": "none"}, {}, ValueError, "got 'none'"),
    "in_axes": ({"in_axes": {"x": 1, "y": 0}}, {}, ValueError, "got 1"),
    "in_axes tree": ({"in_axes": {"z": 0}}, {}, ValueError, "not a prefix"),
    "max_bytes": ({"max_bytes": 0}, {}, ValueError, "got 0"),
    "scan with an axis": ({"method": "scan", "sample_axis": "s"}, {}, ValueError, "cannot bind sample_axis"),
    "no function": ({"loss_fn": 3}, {}, TypeError, "must be a function"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("entry", [value_and_moments, explain_moments])
def test_bad_input_raises_with_the_name_the_value_and_the_cure(name, entry):
    options, arguments, error, message = BAD_CALLS[name]
    options = {"loss_fn": loss_of(lambda y: y), **options}
    arguments = {"params": {"w": jnp.ones(5)}, "batch": {"x": jnp.ones((6, 5)), "y": jnp.ones(6)}, **arguments}
    with pytest.raises(error, match=message):
        entry(options.pop("loss_fn"), **options)(**arguments)


def test_closed_over_arrays_and_pytree_batches_work():
    with jax.enable_x64(True):
        params, batch = data(dtype=jnp.float64)
        offset = draw(9, 7)

        def loss(params, batch):
            (x, _), y = batch
            return net({**params, "b": params["b"] + offset}, {"x": x, "y": y})

        @quick_jit
        def outer(params, offset_scale):
            shifted = {**params, "w": params["w"] * offset_scale}
            return value_and_moments(lambda p, b: loss(p, b) * offset_scale)(shifted, ((batch["x"], None), batch["y"]))

        _, moments = outer(params, 1.0)
        _, expected = value_and_moments(net)({**params, "b": params["b"] + offset}, batch)
        assert_close(moments, expected)


def all_shapes(jaxpr):
    """Shapes of everything computed by a jaxpr, also inside its calls and loops."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from all_shapes(inner)


STACKED = [
    "custom rules that start from something",
    "control flow and sorts",
    "embedding of columns",
    "rnn with masked weight",
]


@pytest.mark.parametrize("name", [name for name in CASES if name not in STACKED])
def test_no_array_of_batch_times_parameter_is_made_for_a_matrix(name):
    """By the sinks; the plain method makes one, so that the test is seen to find it."""
    loss, params, batch = CASES[name]()
    sizes = {leaf.size for leaf in jax.tree.leaves(params) if sum(d > 1 for d in leaf.shape) > 1 and leaf.size > 60}

    def stacked(method):
        shapes = all_shapes(jax.make_jaxpr(value_and_moments(loss, method=method))(params, batch).jaxpr)
        return [shape for shape in shapes if shape and shape[0] == SIZE and np.prod(shape[1:]) in sizes]

    if sizes:
        assert stacked("vmap")
    if name not in ("conv dilated input", "conv many taps"):  # activations happen to have the size of a kernel
        assert not stacked("auto")


def test_explain_moments_tells_rules_and_fallbacks():
    loss, params, batch = CASES["conv grouped"]()
    text = str(explain_moments(loss)(params, batch))
    assert "grouped conv" in text
    assert "6 samples by sinks, 6 at a time" in text
    loss, params, batch = CASES["embedding of columns"]()
    explanation = explain_moments(loss, max_bytes=1000)(params, batch)
    assert [(row.rule, row.fallback) for row in explanation.rows] == [("vmap", True), ("dense", False)]
    assert explanation.chunk < 6
    assert all(row.fallback for row in explain_moments(loss, method="scan")(params, batch).rows)
