import jax
import jax.numpy as jnp
import pytest
from moments_cases import CASES, net, net_data, weighted_net

from gcjax import check_moments, explain_moments
from gcjax._moments.rules.dense import Dense


def test_check_moments_names_leaf_size_and_cure():
    params, batch = net_data()

    def coupled(params, batch):
        hidden = batch["x"] @ params["w"]
        return jnp.mean((hidden - jnp.mean(hidden, axis=0)) ** 2)

    def masked_mean(params, batch):
        return weighted_net(params, batch) / jnp.sum(batch["weight"])

    check_moments(net)(params, batch)
    check_moments(net, method="vmap", microbatches=3)(params, batch)
    with pytest.raises(ValueError, match=r"gradient of params\['w'\] differs .* by .* BatchNorm: set sample_axis"):
        check_moments(coupled)(params, batch)
    with pytest.raises(ValueError, match="divide the weights by their sum"):
        check_moments(masked_mean)(params, {**batch, "weight": jnp.arange(6.0)})
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(check_moments(net))(params, batch)


@pytest.mark.parametrize("planted", [lambda s: 1.5 * s, lambda s: s.astype(jnp.complex64)])
def test_check_moments_compares_squares_and_dtypes(planted, monkeypatch):
    right = Dense.moments

    def wrong(*args):
        total, squares = right(*args)
        return total, planted(squares)

    monkeypatch.setattr(Dense, "moments", wrong)
    loss, params, batch = CASES["dense"]()
    with pytest.raises(ValueError, match=r"sum_grad_squared of params\['v'\] differs .* use method='vmap'"):
        check_moments(loss)(params, batch)
    check_moments(loss, method="vmap")(params, batch)


def test_explain_moments_names_rules_and_chunks():
    loss, params, batch = CASES["conv grouped"]()
    text = str(explain_moments(loss)(params, batch))
    assert "grouped conv" in text
    assert "6 samples by sinks, 6 at a time" in text
    loss, params, batch = CASES["embedding of columns"]()
    explanation = explain_moments(loss, max_bytes=1000)(params, batch)
    assert [(row.rule, row.fallback) for row in explanation.rows] == [("vmap", True), ("dense", False)]
    assert explanation.chunk < 6
    assert all(row.fallback for row in explain_moments(loss, method="vmap")(params, batch).rows)
    assert [row[2:] for row in explain_moments(loss, method="scan")(params, batch).rows] == [
        ("scan", 1, 4 * leaf.size, False) for leaf in jax.tree.leaves(params)
    ]


def test_explain_moments_counts_bytes_in_nested_scans():
    loss, params, batch = CASES["rnn of shared layers"]()
    (row,) = explain_moments(loss)(params, batch).rows
    # 5 outer and 3 inner steps, each with an activation and a cotangent of 4 float32, in 6 samples.
    assert (row.rule, row.positions, row.bytes) == ("dense over time over time", 15, 15 * 2 * 4 * 4 * 6)
