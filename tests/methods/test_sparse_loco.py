"""sparse_loco_compress: rounding by hand, words by hand, both averages, fixed bytes, the residual's decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chunk_oracle import ChunkedLeaf
from harness import Runner, messages
from optimum import decaying, distance_after_training
from rows import SHAPES, Row

import gcjax
from gcjax._kernels.bits import unpack_planes


def rounded(values, bits):
    """What the receivers see of these values of one leaf: each bin's mean."""
    bins = 2**bits
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    width = 6 * deviation / bins or 1.0
    codes = np.clip(np.round((values - values.mean()) / width) + bins // 2, 0, bins - 1)
    return np.array([values[codes == code].mean() for code in codes])


class LeafOracle(ChunkedLeaf):
    """One leaf of one worker."""

    def __init__(self, shape, top_k, chunk, decay, bits):
        super().__init__(shape, chunk)
        self.k, self.decay, self.bits = min(top_k, self.height * self.width), decay, bits
        self.left = np.zeros(self.size)

    def step(self, g):
        """What the receivers see of the gradient g, and the number of entries sent."""
        self.left = self.decay * self.left + g
        x, magnitudes = self.matrix(self.left), self.matrix(np.abs(self.left), fill=-1)
        chosen = np.zeros(x.shape, bool)
        for part in self.chunks:
            kept = np.argsort(-magnitudes[part], axis=None, kind="stable")[: self.k]
            mask = np.zeros(magnitudes[part].size, bool)
            mask[kept] = True
            chosen[part] = mask.reshape(magnitudes[part].shape) & (magnitudes[part] >= 0)
        sent = np.zeros_like(x)
        sent[chosen] = x[chosen] if self.bits is None else rounded(x[chosen], self.bits)
        self.left = self.left - self.flat(sent)
        return self.flat(sent), self.flat(chosen)


class SparseLocoOracle:
    def __init__(self, workers, sizes, average="senders", **options):
        del sizes
        self.average = average
        self.workers = [[LeafOracle(shape, **options) for shape in SHAPES.values()] for _ in range(workers)]

    def step(self, gradients, squares):
        del squares
        seen = [
            [leaf.step(g) for leaf, g in zip(leaves, own, strict=True)]
            for leaves, own in zip(self.workers, gradients, strict=True)
        ]
        mean = []
        for leaf in zip(*seen, strict=True):
            total, senders = np.sum([x for x, _ in leaf], axis=0), np.sum([n for _, n in leaf], axis=0)
            by = len(leaf) if self.average == "workers" else np.maximum(senders, 1)
            mean.append((total / by).astype(np.float32))
        return mean, [(n, n, 0, 0) for n in (sum(chosen.sum() for _, chosen in own) for own in seen)]


def row(name, rare=False, **options):
    def make(axis_name=None, **more):
        return gcjax.sparse_loco_compress(**options, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return SparseLocoOracle(workers, sizes, **options)

    conserves = options["decay"] == 1 and options.get("average") == "workers"
    return Row(f"sparse_loco-{name}", "sparse_loco_compress", make, make_oracle, conserves, rtol=1e-5, rare=rare)


# As many entries as chunks have runs, so that of equal magnitudes the first are sent, as in the oracle.
ROWS = [
    row("2-bits", top_k=7, chunk=7, decay=1.0, bits=2, average="workers"),
    row("senders", top_k=7, chunk=7, decay=0.5, bits=2),
    row("float32", rare=True, top_k=5, chunk=6, decay=1.0, bits=None, average="workers"),
    row("whole", rare=True, top_k=4096, chunk=64, decay=0.9, bits=4),
]


def chain(axis_name, learning_rate):
    sparse = gcjax.sparse_loco_compress(decay=1.0, average="workers", axis_name=axis_name)
    return optax.chain(sparse, optax.sgd(learning_rate))


CHAINS = {"sparse_loco_compress": chain}

RNG = np.random.default_rng(0)


def first_update(g, **options):
    tx = gcjax.sparse_loco_compress(**options)
    update, state = jax.jit(tx.update)(g, tx.init(g))
    return np.asarray(update), state


def test_bins_are_one_and_a_half_deviations_wide_with_two_bits():
    # Mean 0, deviation 1 (of 8 values): bins end at -2.25, -0.75 and 0.75.
    g = np.array([-2.3, -0.76, -0.74, 0.0, 0.74, 0.76, 1.5, 0.8])
    g = np.float32((g - g.mean()) / g.std(ddof=1))
    at = np.digitize(g, [-2.25, -0.75, 0.75])
    expected = [g[at == code].mean() for code in at]
    assert len(set(at)) > 2
    np.testing.assert_allclose(first_update(g, chunk=8)[0], expected, rtol=1e-6)


def test_values_that_are_equal_are_sent_but_for_the_last_bit():
    for g in (np.full(9, 0.3, np.float32), np.float32(-7.5), np.zeros(5, np.float32)):
        update, state = first_update(g)
        np.testing.assert_allclose(update, g, rtol=1e-6)
        assert gcjax.info(state).residual_norm == pytest.approx(0, abs=1e-6)


def test_every_leaf_has_its_own_table():
    g = {"large": np.full(50, 1e20, np.float32), "small": np.full((3, 3), 1e-20, np.float32)}
    tx = gcjax.sparse_loco_compress()
    update = jax.jit(tx.update)(g, tx.init(g))[0]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), update, g)


@pytest.mark.parametrize("bits", [2, None])
def test_words_by_hand(bits):
    # Two chunks of 2 x 3 of which two entries go each, at 3 bits; a vector that is sent whole. All equal in magnitude.
    matrix = np.zeros((4, 3), np.float32)
    matrix[0, 2], matrix[1, 1], matrix[2, 0], matrix[3, 2] = 8.0, 8.0, 8.0, 8.0
    payload, info = messages(gcjax.sparse_loco_compress(2, chunk=3, bits=bits), {"m": matrix, "v": np.float32([2, 2])})
    (words,) = payload
    places = unpack_planes(jnp.asarray(words[:3]), 3)[0, :, 0][:4]
    assert [sorted(pair) for pair in np.asarray(places).reshape(2, 2)] == [[2, 4], [0, 5]]
    if bits is None:
        np.testing.assert_array_equal(words[3:].view(np.float32), [2, 2, 8, 8, 8, 8])
        assert info.payload_bits == 3 * 4 + 32 * 6
    else:
        codes = unpack_planes(jnp.asarray(words[3:5]), 2)[0, :, 0]
        assert codes[:6].tolist() == [2] * 6
        np.testing.assert_array_equal(words[5:].view(np.float32), [0, 0, 8, 0, 0, 0, 2, 0])
        assert info.payload_bits == 3 * 4 + 2 * 6 + 32 * 8
    assert info.sent == 6


def test_the_message_has_a_fixed_size():
    params = {"matrix": np.zeros((130, 70)), "vector": np.zeros(100)}  # 6 chunks of 44 x 35, 2 of 50 entries
    runner = Runner(gcjax.sparse_loco_compress(axis_name="data"), params, 4)
    placed, whole = 6 * 64, 100
    words = 11 * placed // 32 + 2 * math.ceil((placed + whole) / 32) + 8
    for g in (RNG.normal(size=(4, 130, 70)), np.zeros((4, 130, 70))):
        runner.step({"matrix": g.astype(np.float32), "vector": np.ones((4, 100), np.float32)})
        info = gcjax.info(runner.state)
        assert info.payload_bits.tolist() == [11 * placed + 2 * (placed + whole) + 32 * 8] * 4
        assert info.wire_bytes == 3 * 4 * (-(-words // 8) * 8) + 2 * 3 / 4 * 20  # 20 bytes are for the checks


@pytest.mark.parametrize(("average", "expected"), [("workers", [1.25, 2.0]), ("senders", [2.5, 4.0])])
def test_an_entry_is_averaged_over_all_workers_or_those_that_send_it(average, expected):
    tx = gcjax.sparse_loco_compress(1, chunk=2, average=average, axis_name="data")
    gradients = np.array([[4.0, 3.0], [1.0, 0.0], [0.0, 5.0], [2.0, 3.0]], np.float32)
    update = Runner(tx, {"x": gradients[0]}, 4).step({"x": gradients})["x"][0]
    np.testing.assert_array_equal(update, expected)


@pytest.mark.parametrize(("shape", "chunk"), [((5, 5), 4), ((4, 7), 3), ((23,), 4), ((2, 2, 3), 2)])
def test_padding_is_never_sent_in_place_of_an_entry(shape, chunk):
    g = RNG.normal(size=shape).astype(np.float32)
    update, state = first_update(g, top_k=chunk**2 - 1 if len(shape) > 1 else 3, chunk=chunk, bits=None)
    info = gcjax.info(state)
    assert info.sent == np.count_nonzero(update)
    assert info.residual_norm == pytest.approx(np.linalg.norm(g - update), abs=1e-6)


SCHEDULED = optax.inject_hyperparams(
    gcjax.sparse_loco_compress, static_args=("top_k", "chunk", "bits", "average")
)  # the decay is traced


@pytest.mark.parametrize("make", [gcjax.sparse_loco_compress, SCHEDULED], ids=["fixed", "traced"])
def test_the_residual_decays(make):
    tx = make(top_k=1, chunk=2, decay=0.5)
    state, updates = tx.init(jnp.zeros(2)), []
    for g in ([3.0, 1.0], [0.0, 0.0], [0.0, 0.0]):
        update, state = jax.jit(tx.update)(jnp.array(g), state)
        updates.append(update.tolist())
    assert updates == [[3, 0], [0, 0.5], [0, 0]]


def test_training():
    def distance(**options):
        tx = gcjax.sparse_loco_compress(4, chunk=8, axis_name="data", **options)
        return distance_after_training(optax.chain(tx, optax.scale_by_learning_rate(decaying)), 500)

    assert distance(decay=1.0, average="workers") < 0.05
    assert distance(average="workers") < 0.15  # what waits too long is lost
    assert distance() < 0.2
    assert distance(decay=0.0) > 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 0.01}, TypeError, "top_k must be an int, got 0.01"),
        ({"chunk": 257}, ValueError, "chunk must be from 1 to 256, got 257"),
        ({"decay": 1.001}, ValueError, r"decay must be in \[0, 1\], got 1.001"),
        ({"bits": 1}, ValueError, "bits must be from 2 to 4, got 1"),
        ({"bits": 5}, ValueError, "bits must be from 2 to 4, got 5"),
        ({"bits": 2.0}, TypeError, "bits must be an int, got 2.0"),
        ({"average": "all"}, ValueError, "average must be one of.*'all'"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.sparse_loco_compress(**options)
