"""Every kind of sink against plain autodiff, and what the search for sinks promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments_cases import CASES, SIZE, assert_close, batch_of_tokens, draw, scaled
from selection import cases

from gcjax import explain_moments, value_and_moments

# Cases with a matrix that no rule covers, so that its gradient is stacked over samples.
FALLBACKS = ("custom rules that start from something", "embedding of columns", "rnn with masked weight")


def reference(loss, params, batch):
    """Sums of squares from plain vmap of jax.grad, which share nothing with the package."""
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))
    return jax.tree.map(lambda g: ((g / SIZE) ** 2).sum(0), grads)


@cases("name", CASES, default=20)
def test_sinks_equal_vmap_of_grad(name):
    with jax.enable_x64(True):
        loss, params, batch = CASES[name]()

        @jax.jit
        def all_of(params, batch):
            ours = value_and_moments(loss, method="sinks")(params, batch)
            return ours, jax.value_and_grad(loss)(params, batch), reference(loss, params, batch)

        (value, moments), (expected, grad), squares = all_of(params, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        assert_close(moments.grad, grad)
        assert_close(moments.sum_grad_squared, squares)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_ids_of_eight_bits_find_their_rows_in_a_longer_table(mode):
    params, batch = {"t": draw(3, 260, 5)}, batch_of_tokens()
    fn = jax.jit(value_and_moments(lambda p, b: scaled(jnp.take(p["t"], b["x"], axis=0, mode=mode), b)))
    jax.tree.map(
        np.testing.assert_array_equal,
        fn(params, {**batch, "x": batch["x"].astype(jnp.uint8)}),
        fn(params, batch),
    )


def all_shapes(jaxpr):
    """Shapes of everything that a jaxpr computes, also inside its calls and loops."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from all_shapes(inner)


@cases("name", [name for name in CASES if name not in (*FALLBACKS, "control flow and sorts")], default=14)
def test_no_array_of_batch_times_matrix(name):
    """The "vmap" method makes one, which shows that this test would see it."""
    loss, params, batch = CASES[name]()
    sizes = {leaf.size for leaf in jax.tree.leaves(params) if sum(d > 1 for d in leaf.shape) > 1 and leaf.size > 60}

    def stacked(method):
        shapes = all_shapes(jax.make_jaxpr(value_and_moments(loss, method=method))(params, batch).jaxpr)
        return [shape for shape in shapes if shape and shape[0] == SIZE and np.prod(shape[1:]) in sizes]

    if sizes:
        assert stacked("vmap")
        # In these two, activations have as many entries as a kernel.
        assert name in ("conv dilated input", "conv many taps") or not stacked("auto")


@pytest.mark.parametrize("name", CASES)
def test_explain_reports_a_fallback_where_no_rule_applies(name):
    loss, params, batch = CASES[name]()
    explanation = explain_moments(loss)(params, batch)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert [(row.leaf, row.shape) for row in explanation.rows] == [
        (jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves
    ]
    assert any(row.fallback for row in explanation.rows) == (name in FALLBACKS)


@pytest.mark.parametrize("name", ["scanned twice", "layers of rnns"])
def test_tracing_again_gives_the_same_program(name):
    """Processes that run one computation together must compile the same program."""
    loss, params, batch = CASES[name]()
    programs = {str(jax.make_jaxpr(value_and_moments(loss))(params, batch)) for _ in range(4)}
    assert len(programs) == 1
