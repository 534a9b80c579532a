import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments_cases import CASES, SIZE, assert_close, batch_of, draw, net, net_data, scaled, weighted_net
from selection import cases

from gcjax import check_moments, explain_moments, value_and_moments

METHODS = ("auto", "sinks", "vmap", "scan")


def by_hand(loss, params, batch, scale, groups=SIZE):
    """One jax.grad per group of samples, added in a Python loop."""
    size = SIZE // groups
    parts = [jax.tree.map(operator.itemgetter(slice(i * size, (i + 1) * size)), batch) for i in range(groups)]
    gradient = jax.jit(jax.grad(loss))
    grads = [jax.tree.map(lambda g: np.asarray(g, np.float64) * scale, gradient(params, p)) for p in parts]
    return jax.tree.map(lambda *g: sum(g), *grads), jax.tree.map(lambda *g: sum(x * x for x in g), *grads)


def run_all(loss, variants, params, batch):
    """Results of `value_and_moments` with each dict of options, compiled together; prints as the options."""
    fns = {str(options): value_and_moments(loss, **options) for options in variants}
    return jax.jit(lambda *args: {name: fn(*args) for name, fn in fns.items()})(params, batch)


def test_every_method_equals_a_loop_over_samples():
    sizes = [{"method": method, "max_bytes": size} for method in ("auto", "vmap") for size in (1, 1700)]
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)
        grad, squares = by_hand(net, params, batch, 1 / SIZE)
        for name, (value, moments) in run_all(
            net, [*sizes, {"method": "sinks"}, {"method": "scan"}], params, batch
        ).items():
            assert_close(moments.grad, grad, name=name)
            assert_close(moments.sum_grad_squared, squares, name=name)
            np.testing.assert_allclose(value, net(params, batch), rtol=1e-12, err_msg=name)


def experts(params, batch):
    """A mixture of experts: each position of a sample goes to one of three."""
    x = batch["x"].reshape(-1, 5)
    chosen = jnp.argmax(x @ params["router"], axis=-1)
    order = jnp.argsort(chosen)
    out = jax.lax.ragged_dot(x[order], params["w"], jnp.bincount(chosen, length=3))
    return scaled(out[jnp.argsort(order)].reshape(*batch["x"].shape[:2], 4), batch)


@pytest.mark.parametrize("groups", [None, 3])
def test_a_loss_that_vmap_cannot_take_has_moments_by_scan(groups):
    with jax.enable_x64(True):
        params, batch = {"router": draw(3, 5, 3), "w": draw(4, 3, 5, 4)}, batch_of(4, 5)
        size = groups or SIZE
        grad, squares = by_hand(experts, params, batch, 1 / size, size)
        options = {"method": "scan", "microbatches": groups}
        _, moments = jax.jit(value_and_moments(experts, **options))(params, batch)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)
        check_moments(experts, **options)(params, batch)


def test_sum_reduction_leaves_gradient_and_squares_unscaled():
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)

        def total(params, batch):
            return net(params, batch) * batch["y"].shape[0]

        grad, squares = by_hand(total, params, batch, 1.0)
        variants = [{"reduction": "sum", "method": method} for method in ("auto", "vmap")]
        for name, (value, moments) in run_all(total, variants, params, batch).items():
            assert_close(moments.grad, grad, name=name)
            assert_close(moments.sum_grad_squared, squares, name=name)
            np.testing.assert_allclose(value, total(params, batch), rtol=1e-12, err_msg=name)
        check_moments(total, reduction="sum")(params, batch)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_microbatches_square_the_gradients_of_groups(groups):
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)
        grad, squares = by_hand(net, params, batch, 1 / groups, groups)
        variants = [{"microbatches": groups, "method": method} for method in ("auto", "vmap", "scan")]
        for name, (_, moments) in run_all(net, variants, params, batch).items():
            assert_close(moments.grad, grad, name=name)
            assert_close(moments.sum_grad_squared, squares, name=name)


def test_samples_of_weight_zero_add_nothing():
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)
        mask = jnp.array([1.0, 1, 1, 1, 0, 0])
        padded = {**batch, "weight": mask / mask.sum()}
        fn = jax.jit(value_and_moments(weighted_net, reduction="sum"))
        _, moments = fn(params, padded)
        _, real = jax.jit(value_and_moments(net))(params, jax.tree.map(lambda a: a[:4], batch))
        assert_close(moments, real)
        check_moments(weighted_net, reduction="sum")(params, padded)


def test_weights_can_be_normalised_over_the_sample_axis():
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)
        weight = jnp.array([2.0, 1, 0.5, 3, 0, 0])

        def loss(params, batch):
            total = jax.lax.psum(jnp.sum(batch["weight"]), "samples")
            return weighted_net(params, {**batch, "weight": batch["weight"] / total})

        fn = value_and_moments(loss, reduction="sum", sample_axis="samples")
        inside = jax.jit(fn)(params, {**batch, "weight": weight})
        fn = value_and_moments(weighted_net, reduction="sum")
        outside = jax.jit(fn)(params, {**batch, "weight": weight / weight.sum()})
        assert_close(inside, outside)


def test_aux_has_the_shapes_of_the_whole_batch():
    params, batch = net_data()

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
    (expected, want), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    variants = ({}, {"method": "scan"}, {"method": "vmap", "max_bytes": 1000}, {"microbatches": 2})
    variants = [{"has_aux": True, "in_axes": axes, **options} for options in variants]
    for (value, aux), _ in run_all(loss, variants, params, batch).values():
        assert jax.tree.map(lambda a: (a.shape, a.dtype), aux) == jax.tree.map(lambda a: (a.shape, a.dtype), want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), aux, want)
        assert aux["equal"] == want["equal"]
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@cases("name", ["dense with positions", "dense", "conv same", "embedding by index", "scanned blocks", "rnn"], default=3)
def test_half_precision_squares_accumulate_in_float32(name):
    loss, params, batch = CASES[name]()

    @jax.jit
    def all_dtypes(params, batch):
        # In float16 the squares of gradients this small would underflow.
        fn = value_and_moments(lambda p, b: 1e-3 * loss(p, b))

        def moments(dtype):
            cast = jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, (params, batch))
            return fn(*cast)[1]

        return [moments(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]

    wide, *narrow = all_dtypes(params, batch)
    for moments, dtype in zip(narrow, (jnp.bfloat16, jnp.float16), strict=True):
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(moments.grad))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(moments.sum_grad_squared))
        assert_close(moments.sum_grad_squared, wide.sum_grad_squared, 0.1)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_eight_bit_parameters_have_squares_in_float32(method):
    loss, params, batch = CASES["dense"]()
    narrow = jax.tree.map(lambda p: p.astype(jnp.float8_e5m2), params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), narrow)
    eight_bits = value_and_moments(
        lambda p, b: loss(jax.tree.map(lambda x: x.astype(jnp.float32), p), b), method=method
    )
    _, moments = jax.jit(eight_bits)(narrow, batch)
    _, expected = jax.jit(value_and_moments(loss))(wide, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.grad)} == {jnp.dtype(jnp.float8_e5m2)}
    assert_close(moments.sum_grad_squared, expected.sum_grad_squared, 0.3)


@pytest.mark.parametrize("name", ["dense", "conv same", "embedding by index", "tied embedding", "rnn"])
def test_a_nan_sample_makes_nan_moments(name):
    loss, params, batch = CASES[name]()
    batch = {**batch, "s": batch["s"].at[2].set(jnp.nan)}
    value, moments = jax.jit(value_and_moments(loss))(params, batch)
    assert jnp.isnan(value)
    for leaf in jax.tree.leaves(moments):
        assert jnp.isnan(leaf).any()


def test_a_batch_of_one_sample_squares_the_gradient():
    with jax.enable_x64(True):
        params, batch = net_data(1, jnp.float64)
        for name, (_, moments) in run_all(net, [{"method": method} for method in METHODS], params, batch).items():
            assert_close(moments.sum_grad_squared, jax.tree.map(lambda g: g * g, moments.grad), name=name)


def test_params_may_be_empty():
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
def test_bad_input_raises_with_name_value_and_cure(name, entry):
    options, arguments, error, message = BAD_CALLS[name]
    options = {"loss_fn": loss_of(lambda y: y), **options}
    arguments = {"params": {"w": jnp.ones(5)}, "batch": {"x": jnp.ones((6, 5)), "y": jnp.ones(6)}, **arguments}
    with pytest.raises(error, match=message):
        entry(options.pop("loss_fn"), **options)(**arguments)


def test_losses_may_close_over_arrays_and_take_tree_batches():
    with jax.enable_x64(True):
        params, batch = net_data(dtype=jnp.float64)
        offset = draw(9, 7)

        def loss(params, batch):
            (x, _), y = batch
            return net({**params, "b": params["b"] + offset}, {"x": x, "y": y})

        @jax.jit
        def outer(params, offset_scale):
            shifted = {**params, "w": params["w"] * offset_scale}
            return value_and_moments(lambda p, b: loss(p, b) * offset_scale)(shifted, ((batch["x"], None), batch["y"]))

        _, moments = outer(params, 1.0)
        _, expected = jax.jit(value_and_moments(net))({**params, "b": params["b"] + offset}, batch)
        assert_close(moments, expected)


def test_aux_whose_samples_are_not_in_front_raises():
    def loss(w, x):
        return jnp.mean((x @ w) ** 2), x.T

    with pytest.raises(ValueError, match=r"aux of shape \(3, 1\) for a part of the batch, and \(3, 4\).*transpose"):
        value_and_moments(loss, has_aux=True)(jnp.ones(3), jnp.arange(12.0).reshape(4, 3))
