"""ef_sign_compress: words by hand, and the contraction of the paper."""

import jax
import jax.numpy as jnp
import numpy as np

import gcjax
from gcjax._kernels.layout import layout_of
from gcjax.methods import ef_sign


def test_words_by_hand():
    a = jnp.zeros(34).at[jnp.array([1, 33])].set(jnp.array([-3.0, -14.0]))  # mean magnitude 17 / 34
    b = jnp.array([3.0, -1.0, 2.0])
    (bucket,) = layout_of((a, b)).buckets
    payload, bits = ef_sign._encode(bucket.join([a, b]), bucket, None)
    # The even entries of a, the odd ones, then b.
    assert [hex(word) for word in payload.tolist()] == ["0x3f000000", "0x40000000", "0x0", "0x10001", "0x2"]
    assert bits == 34 + 3 + 2 * 32
    decoded = bucket.split(ef_sign._decode(payload, bucket))
    assert decoded[0].tolist() == np.where(a < 0, -0.5, 0.5).tolist()
    assert decoded[1].tolist() == [2.0, -2.0, 2.0]


def test_the_contraction_of_a_leaf_is_the_papers():
    """|a - C(a)|^2 = (1 - |a|_1^2 / (d |a|_2^2)) |a|^2, independent of the other leaf."""
    rng = np.random.default_rng(0)
    g = {"a": rng.normal(size=1000), "b": 1e3 * rng.standard_cauchy(size=(20, 30))}
    g = jax.tree.map(lambda x: x.astype(np.float32), g)
    tx = gcjax.ef_sign_compress()
    sent, _ = jax.jit(tx.update)(g, tx.init(g))
    for name, a in g.items():
        a = a.astype(np.float64)
        left = np.sum((a - sent[name]) ** 2)
        contraction = 1 - np.abs(a).sum() ** 2 / (a.size * np.sum(a**2))
        np.testing.assert_allclose(left, contraction * np.sum(a**2), rtol=1e-5)
