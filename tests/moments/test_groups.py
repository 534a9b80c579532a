"""Squares of groups of samples: the estimate against its formula, its mean over all splits, and what it never does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments_cases import CASES, SIZE, assert_close, draw, net, net_data, scaled, weighted_net
from selection import cases

from gcjax import check_moments, explain_moments, value_and_moments
from gcjax._moments.rules import node


def sample_gradients(loss, params, batch):
    """Each sample's share in the gradient of the mean, leaves float64[SIZE, ...]; shares nothing with the package."""
    size = jax.tree.leaves(batch)[0].shape[0]
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))
    return jax.tree.map(lambda g: np.asarray(g) / size, grads)


def estimate(gradients, groups):
    """By its definition: sample z is in group z mod groups, and of each pair's product its share is taken out."""
    size = len(gradients)
    sums = [sum(gradients[z] for z in range(j, size, groups)) for j in range(groups)]
    total, squares = sum(sums), sum(x**2 for x in sums)
    together = (size // groups - 1) / (size - 1)  # how often two samples share a group
    return (squares - together * total**2) / (1 - together)


def is_estimated(loss, params, batch, **options):
    """For each leaf, whether `explain_moments` says that its squares are those of groups."""
    rows = explain_moments(loss, **options)(params, batch).rows
    return jax.tree.unflatten(jax.tree.structure(params), [row.squares < SIZE for row in rows])


@cases("name", CASES, default=20)
@pytest.mark.parametrize("groups", [2, 3])
def test_squares_are_the_estimate_from_groups_where_a_loop_makes_them(name, groups):
    with jax.enable_x64(True):
        loss, params, batch = CASES[name]()
        (value, moments) = jax.jit(value_and_moments(loss, groups=groups))(params, batch)
        gradients = sample_gradients(loss, params, batch)
        assert_close(moments.grad, jax.tree.map(lambda g: g.sum(0), gradients))
        np.testing.assert_allclose(value, loss(params, batch), rtol=1e-12)

        def wanted(g, estimated):
            return estimate(g, groups) if estimated else (g**2).sum(0)

        expected = jax.tree.map(wanted, gradients, is_estimated(loss, params, batch, groups=groups))
        assert_close(moments.sum_grad_squared, expected)


def test_what_the_two_tests_above_and_below_look_at_is_estimated():
    with jax.enable_x64(True):
        estimated = {}
        for name in CASES:
            loss, params, batch = CASES[name]()
            estimated[name] = any(jax.tree.leaves(is_estimated(loss, params, batch, groups=2)))
    for name in ("dense with positions", "conv same", "conv grouped", "tied embedding", "scanned blocks", "rnn"):
        assert estimated[name], name
    assert not estimated["dense"]


def splits(samples, size):
    """All ways to split samples into groups of a size."""
    if not samples:
        yield []
        return
    first, rest = samples[0], samples[1:]
    for others in itertools.combinations(rest, size - 1):
        left = [z for z in rest if z not in others]
        yield from ([(first, *others), *further] for further in splits(left, size))


@pytest.mark.parametrize("groups", [2, 3])
def test_the_mean_over_all_splits_is_the_sum_over_samples(groups):
    with jax.enable_x64(True):
        loss, params, batch = CASES["dense with positions"]()
        found = [np.array(split).T.ravel() for split in splits(list(range(SIZE)), SIZE // groups)]
        assert len(found) == {2: 10, 3: 15}[groups]
        fn = jax.jit(value_and_moments(loss, groups=groups))
        all_of = [fn(params, jax.tree.map(lambda a: a[order], batch))[1].sum_grad_squared for order in found]  # noqa: B023
        mean = jax.tree.map(lambda *x: sum(x) / len(x), *all_of)
        exact = jax.jit(value_and_moments(loss))(params, batch)[1].sum_grad_squared
        assert_close(mean, exact)
        assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (all_of[0], exact)), strict=True)) > 1e-3


def linear(p, batch):
    """The gradient of `w` is the mean of `d` over samples and positions, for every sample its own."""
    return jnp.mean(jnp.einsum("bti,bto,io->bt", jnp.ones((*batch["d"].shape[:2], 1)), batch["d"], p["w"]))


def test_squares_are_never_below_those_of_equal_samples():
    """Without noise the estimate is that of all samples, `G^2 / B`: groups let no entry pass less or more easily."""
    d = jnp.broadcast_to(draw(1, 1, 1, 50), (64, 4, 50))
    options = ({}, {"groups": 2}, {"groups": 8})
    params = {"w": jnp.zeros((1, 50))}
    exact, *estimates = (jax.jit(value_and_moments(linear, **o))(params, {"d": d})[1] for o in options)
    for moments in estimates:
        np.testing.assert_allclose(moments.sum_grad_squared["w"], exact.sum_grad_squared["w"], rtol=2e-5)
    noisy = d + 1e-3 * draw(2, 64, 4, 50)
    for groups in (2, 8, 32):
        _, (grad, squares) = jax.jit(value_and_moments(linear, groups=groups))(params, {"d": noisy})
        assert (squares["w"] >= (1 - 1e-6) * grad["w"] ** 2 / 64).all()


def test_a_batch_sorted_by_class_is_dealt_not_cut():
    """Groups of one class each would take the difference of classes, which the batch does not have, for noise."""
    classes = jnp.repeat(jnp.array([-1.0, 1.0]), 32)
    d = jnp.broadcast_to(classes[:, None, None], (64, 4, 3)) + 0.1 * draw(1, 64, 4, 3)
    params = {"w": jnp.zeros((1, 3))}
    _, exact = jax.jit(value_and_moments(linear))(params, {"d": d})
    _, moments = jax.jit(value_and_moments(linear, groups=2))(params, {"d": d})
    assert (moments.sum_grad_squared["w"] < 1.5 * exact.sum_grad_squared["w"]).all()


@pytest.mark.parametrize("name", ["dense with positions", "conv same", "scanned blocks"])
def test_squares_fall_by_the_square_of_the_losses_factor(name):
    loss, params, batch = CASES[name]()
    _, moments = jax.jit(value_and_moments(loss, groups=3))(params, batch)
    _, small = jax.jit(value_and_moments(lambda p, b: loss(p, b) / 64, groups=3))(params, batch)
    assert_close(small.grad, jax.tree.map(lambda g: g / 64, moments.grad), 1e-6)
    assert_close(small.sum_grad_squared, jax.tree.map(lambda s: s / 64**2, moments.sum_grad_squared), 1e-5)


def test_samples_of_weight_zero_and_sums_need_no_other_loss():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(5, 3)))}
        batch = {"x": jnp.asarray(rng.normal(size=(8, 4, 5))), "weight": jnp.array([1.0, 2, 1, 3, 1, 0, 0, 0])}

        def loss(p, b):
            return jnp.sum(b["weight"] * jnp.sum(jnp.sin(b["x"] @ p["w"]), axis=(1, 2)))

        _, moments = jax.jit(value_and_moments(loss, reduction="sum", groups=4))(params, batch)
        gradients = sample_gradients(lambda p, b: 8 * loss(p, b), params, batch)
        assert_close(moments.grad, jax.tree.map(lambda g: g.sum(0), gradients))
        assert_close(moments.sum_grad_squared, jax.tree.map(lambda g: estimate(g, 4), gradients))


def test_chunks_have_groups_of_their_own():
    """Stacked gradients that no rule covers limit the samples at a time; then each chunk has that many groups."""
    with jax.enable_x64(True):
        params = {"table": draw(3, 4, 9), "w": draw(4, 4, 3)}
        batch = {"x": jnp.asarray(np.random.default_rng(0).integers(0, 9, (12, 5))), "s": draw(2, 12)}

        def loss(p, b):
            return scaled(jnp.moveaxis(p["table"][:, b["x"]], 0, -1) @ p["w"], b)

        options = {"groups": 2, "max_bytes": 5 * 8 * 36}
        explanation = explain_moments(loss, **options)(params, batch)
        assert (explanation.chunk, [row.squares for row in explanation.rows]) == (4, [4, 2])
        _, moments = jax.jit(value_and_moments(loss, **options))(params, batch)
        gradients = sample_gradients(loss, params, batch)
        by_chunk = sum(estimate(gradients["w"][i : i + 4], 2) for i in (0, 4, 8))
        assert_close(moments.sum_grad_squared["w"], by_chunk)
        assert_close(moments.sum_grad_squared["table"], (gradients["table"] ** 2).sum(0))
        _, moments = jax.jit(value_and_moments(loss, groups=2, max_bytes=1))(params, batch)  # one sample at a time
        assert_close(moments.sum_grad_squared["w"], (gradients["w"] ** 2).sum(0))


def test_large_gradients_are_made_fewer_at_a_time(monkeypatch):
    with jax.enable_x64(True):
        loss, params, batch = CASES["conv same"]()
        wanted = jax.jit(value_and_moments(loss, groups=3))(params, batch)
        monkeypatch.setattr(node, "UNROLLED_BYTES", 1)
        assert_close(jax.jit(value_and_moments(loss, groups=3))(params, batch), wanted)


@pytest.mark.parametrize("size", [5, 9, 17])
def test_numbers_of_samples_that_are_no_multiple_of_a_steps_gradients(size):
    with jax.enable_x64(True):
        params, batch = {"w": draw(3, 5, 3)}, {"x": draw(1, size, 4, 5), "s": draw(2, size)}

        def loss(p, b):
            return scaled(b["x"] @ p["w"], b)

        _, moments = jax.jit(value_and_moments(loss))(params, batch)
        gradients = sample_gradients(loss, params, batch)
        assert_close(moments.sum_grad_squared, jax.tree.map(lambda g: (g**2).sum(0), gradients))


@pytest.mark.parametrize(
    ("size", "groups"), [(64, 8), (48, 8), (36, 6), (10, 5), (8, 4), (7, None), (6, None), (15, 5)]
)
def test_auto_takes_the_largest_fitting_number_or_all_samples(size, groups):
    params, batch = {"w": draw(3, 5, 3)}, {"x": draw(1, size, 4, 5), "s": draw(2, size)}
    loss = lambda p, b: scaled(b["x"] @ p["w"], b)  # noqa: E731
    explanation = explain_moments(loss, groups="auto")(params, batch)
    assert explanation.rows[0].squares == (groups or size)
    assert f"{groups or size}" in str(explanation).splitlines()[2]
    for options in ({"method": "scan"}, {"method": "vmap"}, {"microbatches": size}):
        explain_moments(loss, groups="auto", **options)(params, batch)


BAD = {
    "no divisor": ({"groups": 4}, ValueError, "groups=4 does not divide the batch size 6: choose a divisor, pad"),
    "one group": ({"groups": 1}, ValueError, "groups must be at least 2, got 1"),
    "more groups than samples": ({"groups": 12}, ValueError, "groups=12 does not divide the batch size 6"),
    "a fraction": ({"groups": 2.5}, TypeError, "groups must be an int, got 2.5"),
    "a word": ({"groups": "all"}, ValueError, "'auto' or None, got 'all'"),
    "with microbatches": ({"groups": 2, "microbatches": 3}, ValueError, "not both"),
    "with scan": ({"groups": 2, "method": "scan"}, ValueError, "method='scan' takes every sample by itself"),
    "with vmap": ({"groups": 2, "method": "vmap"}, ValueError, "method='vmap' takes every sample by itself"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("of", [value_and_moments, explain_moments, check_moments])
def test_bad_numbers_of_groups_raise(name, of):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        of(net, **options)(*net_data())


def test_check_moments_checks_a_loss_with_groups():
    params, batch = net_data()
    check_moments(net, groups=2)(params, batch)
    check = check_moments(lambda p, b: weighted_net(p, b) / jnp.sum(b["weight"]), groups=2)
    with pytest.raises(ValueError, match="divide the weights by their sum"):
        check(params, {**batch, "weight": jnp.arange(6.0)})


def test_samples_that_see_each_other_are_grouped_by_their_shares():
    """Under a sample axis each sample has its own use of the weights in one loss, as with BatchNorm."""
    with jax.enable_x64(True):
        params, batch = {"w": draw(3, 5, 3)}, {"x": draw(1, 8, 4, 5)}

        def loss(p, b):
            y = b["x"] @ p["w"]
            y = y - jax.lax.pmean(y.mean((0, 1)), "samples")
            return jnp.mean(jnp.sum(jnp.sin(y), axis=(1, 2)) * y.std((1, 2)))

        _, moments = jax.jit(value_and_moments(loss, sample_axis="samples", groups=4))(params, batch)
        shares = jax.vmap(jax.grad(loss), (None, 0), axis_name="samples")(params, {"x": batch["x"][:, None]})
        shares = jax.tree.map(lambda g: np.asarray(g) / 8, shares)
        assert_close(moments.grad, jax.tree.map(lambda g: g.sum(0), shares))
        assert_close(moments.sum_grad_squared, jax.tree.map(lambda g: estimate(g, 4), shares))


def test_a_nan_sample_makes_nan_squares():
    loss, params, batch = CASES["dense with positions"]()
    batch = {**batch, "s": batch["s"].at[2].set(jnp.nan)}
    _, moments = jax.jit(functools.partial(value_and_moments(loss, groups=2)))(params, batch)
    assert all(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(moments))
