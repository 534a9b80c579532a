"""drive_compress: the transform, the papers' errors, their mean, words by hand, and where it is biased."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
import scipy.stats
from codec_oracle import CodecOracle
from harness import Runner, messages
from optimum import decaying, distance_after_training
from oracle import hash_bits
from rows import Row, seed_words

import gcjax
from gcjax.methods import drive

KEY = jax.random.key(11)
BLOCK = 256
LEVELS = {1: [1.0], 3: [0.2451, 0.7560, 1.3439, 2.1520]}


def sylvester(d):
    """The Hadamard matrix by its definition: entry (i, j) is -1 where i and j share an odd number of bits."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)])


def signs_of(words, index):
    """The signs of a rotation at index i of the wire: negative where bit i % 32 of the hash of i // 32 is set."""
    return np.where(hash_bits(words, index // 32) >> (index % 32).astype(np.uint32) & 1, -1.0, 1.0)


def quantised(u, levels):
    return np.copysign([min(levels, key=lambda level: abs(level - abs(x))) for x in u], np.where(u < 0, -1, 1))


def code_of(bits, feedback):
    """In float64. A leaf of at least 256 entries is rotated in blocks of 256, the last one padded with zeros."""
    levels, h = LEVELS[bits], sylvester(BLOCK)

    def code(leaves, places, words):
        return [
            x if len(x) < BLOCK else decoded(x, signs_of(words, index))
            for x, index in zip(leaves, places.indices, strict=True)
        ]

    def decoded(x, signs):
        size = len(x)
        x, signs = np.pad(x, (0, -size % BLOCK)), np.pad(signs, (0, -size % BLOCK))
        y = np.zeros(len(x))
        for begin in range(0, len(x), BLOCK):
            part = slice(begin, begin + BLOCK)
            if not x[part].any():
                continue
            rotation = h * signs[part] / np.sqrt(BLOCK)
            rotated = rotation @ x[part]
            q = quantised(rotated * np.sqrt(BLOCK) / np.linalg.norm(x[part]), levels)
            scale = rotated @ q / (q @ q) if feedback else x[part] @ x[part] / (rotated @ q)
            y[part] = rotation.T @ (scale * q)
        return y[:size]

    return code


def row(bits, feedback, transport="all_gather", rare=True):
    def make(axis_name=None, **more):
        return gcjax.drive_compress(bits, feedback=feedback, key=KEY, transport=transport, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return CodecOracle(
            workers,
            sizes,
            code_of(bits, feedback),
            key=KEY,
            feedback=feedback,
            transport=transport,
            code_mean=code_of(bits, True),
            dtype=np.float64,
        )

    name = f"drive-{bits}{'-feedback' * feedback}{'-owners' * (transport == 'two_phase')}"
    return Row(name, "drive_compress", make, make_oracle, conserves=feedback, rtol=1e-5, rare=rare)


# With two workers, the largest leaf of the owners' rows is rotated.
ROWS = [row(1, False, rare=False), row(3, True), row(1, False, "two_phase"), row(3, True, "two_phase")]


# tests/laws/test_convergence.py has no leaf that is rotated; test_training_reaches_the_common_optimum has.
def chain(axis_name, learning_rate):
    return optax.chain(gcjax.drive_compress(key=KEY, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"drive_compress": chain}

NORMAL = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)


def update_of(x, key=KEY, **options):
    tx = gcjax.drive_compress(key=key, **options)
    return jax.jit(tx.update)(x, tx.init(x))[0]


def relative_error(y, x):
    return float(np.sum((y - x) ** 2) / np.sum(x**2))


@pytest.mark.parametrize("block", drive.BLOCKS)
def test_hadamard_equals_scipys_and_is_its_own_inverse(block):
    x = np.random.default_rng(0).integers(-8, 9, (2, block)).astype(np.float32)  # sums stay exact
    z = drive._hadamard(jnp.asarray(x))
    np.testing.assert_array_equal(drive._hadamard(z), block * x)
    if block <= 4096:
        side = math.isqrt(block)
        in_order = np.asarray(z).reshape(2, side, side).swapaxes(1, 2).reshape(2, block)
        np.testing.assert_array_equal(in_order, x @ scipy.linalg.hadamard(block))


def test_levels_are_optimal_for_a_normal_number():
    for levels in list(drive.LEVELS.values())[1:]:
        edges = [0, *[(a + b) / 2 for a, b in itertools.pairwise(levels)], np.inf]
        for low, high, level in zip(edges[:-1], edges[1:], levels, strict=True):
            assert level == pytest.approx(scipy.stats.truncnorm.mean(low, high), abs=2e-4)


# Squared errors of the best levels for a normal number (Max 1960); for signs the papers' pi / 2 - 1 and 1 - 2 / pi.
@pytest.mark.parametrize(("bits", "distortion"), [(1, 1 - 2 / math.pi), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_squared_errors_equal_those_of_the_papers(bits, distortion):
    least = relative_error(update_of(NORMAL, bits=bits, feedback=True), NORMAL)
    unbiased = relative_error(update_of(NORMAL, bits=bits), NORMAL)
    assert least == pytest.approx(distortion, rel=0.03)
    assert unbiased == pytest.approx(1 / (1 - distortion) - 1, rel=0.03)


def mean_of_many(x, bits, keys=1000):
    """The mean over keys and its standard errors."""
    x, keys = jnp.asarray(x), jax.random.split(jax.random.key(1), keys)
    updates = jax.lax.map(lambda key: update_of(x, key, bits=bits), keys, batch_size=100)
    return np.asarray(updates.mean(0)), np.asarray(updates.std(0)) / len(keys) ** 0.5


@pytest.mark.parametrize("bits", [1, 3])
def test_the_mean_over_many_keys_is_the_gradient(bits):
    x = NORMAL[:4096]
    mean, standard_error = mean_of_many(x, bits)
    error = (mean - x) / standard_error
    assert np.abs(error).max() < 5
    assert np.mean(error**2) < 1 + 5 * (2 / len(x)) ** 0.5


def test_the_bias_of_a_small_block_is_about_a_hundredth():
    x = NORMAL[:256] * np.linspace(0.1, 3, 256, dtype=np.float32)
    mean, standard_error = mean_of_many(x, bits=1, keys=3000)
    bias_squared = np.sum((mean - x) ** 2) - np.sum(standard_error**2)
    assert bias_squared < 0.02**2 * np.sum(x**2)


@pytest.mark.parametrize("transport", ["all_gather", "two_phase"])
def test_eight_workers_have_an_eighth_of_the_error_and_owners_add_theirs(transport):
    x = NORMAL[: 1 << 14]
    tx = gcjax.drive_compress(key=KEY, transport=transport, axis_name="data")
    update = Runner(tx, {"x": x}, 8).step({"x": np.stack([x] * 8)})["x"][0]
    error = (math.pi / 2 - 1) / 8  # of the mean of the messages
    left = 1 - 2 / math.pi  # of what an owner sends, error and all, in the direction of what it sends
    expected = error if transport == "all_gather" else (1 - 2 * left) * error + left * (1 + error)
    assert relative_error(update, x) == pytest.approx(expected, rel=0.05)


def test_the_larger_of_two_entries_becomes_too_large():
    """All signs are those of the larger entry, and (a * a + b * b) / a = 2.5. The smaller entry becomes zero."""
    g = jnp.zeros(256).at[jnp.array([7, 200])].set(jnp.array([2.0, -1.0]))
    np.testing.assert_array_equal(update_of(g), jnp.zeros(256).at[7].set(2.5))


def test_entries_that_cancel_when_rotated_are_sent_as_plus():
    """Half of the rotated entries are 0. Sent as plus, they add entries 0 and 7 ^ 200 to the update."""
    entry = np.arange(256)
    signs = signs_of(seed_words(KEY, 0, rank=0), entry % 8 * 32 + entry // 8)
    expected = np.zeros(256)
    expected[[7, 200]] = 1
    expected[0], expected[7 ^ 200] = signs[0], -signs[7] * signs[200] * signs[7 ^ 200]
    np.testing.assert_array_equal(update_of(jnp.zeros(256).at[jnp.array([7, 200])].set(1.0)), expected)


def test_with_feedback_the_smaller_entry_is_sent_next():
    g = jnp.zeros(256).at[jnp.array([7, 200])].set(jnp.array([2.0, -1.0]))
    tx = gcjax.drive_compress(feedback=True, key=KEY)
    step = jax.jit(tx.update)
    first, state = step(g, tx.init(g))
    second, state = step(jnp.zeros(256), state)
    np.testing.assert_array_equal(first, jnp.zeros(256).at[7].set(2.0))
    np.testing.assert_array_equal(second, jnp.zeros(256).at[200].set(-1.0))
    assert gcjax.info(state).residual_norm == 0


def test_words_by_hand():
    g = {"rotated": jnp.zeros(300).at[1].set(3.0), "small": jnp.array([1.0, -2.0])}
    tx = gcjax.drive_compress(bits=2, key=KEY)
    (words,), info = messages(tx, g)
    seeds = seed_words(KEY, 0, rank=0)
    flipped = signs_of(seeds, np.array([32, 320, 321])) < 0
    assert words[:2].tolist() == seeds.tolist()
    assert words[2:4].view(np.float32).tolist() == [-1.0 if flipped[1] else 1.0, 2.0 if flipped[2] else -2.0]
    # All rotated entries are 3 / 16, the upper level. 300 entries make two blocks, the second one of zeros.
    scale = words[4:6].view(np.float32)
    assert scale[0] == pytest.approx(3 / 256 / 1.5104, rel=1e-6)
    assert scale[1] == 0
    level, sign = words[6:].reshape(2, 16)  # in rows of 16
    assert level.tolist() == [0xFFFF] * 16
    # Row 1 of the Hadamard matrix alternates; the entries of the block are in columns of 16.
    assert sign.tolist() == [0x5555 if flipped[0] else 0xAAAA] * 16
    assert info.payload_bits == 64 + 2 * 32 + 2 * 32 + 2 * 2 * 256


@pytest.mark.parametrize("exponent", [-100, 70])
def test_a_power_of_two_as_scale_changes_nothing(exponent):
    unit = np.float32(2.0) ** exponent
    np.testing.assert_array_equal(update_of(NORMAL[:1024] * unit), update_of(NORMAL[:1024]) * unit)


def test_the_error_of_a_leaf_stays_in_it():
    g = {
        "large": jnp.full(300, 1e20),
        "scalar": jnp.float32(1.25),
        "other": jnp.asarray(NORMAL[:300]),
        "z": jnp.zeros(300),
    }
    updates = update_of(g)
    assert updates["scalar"] == 1.25
    assert relative_error(updates["other"], g["other"]) < 1
    assert not updates["z"].any()


@pytest.mark.full
def test_training_reaches_the_common_optimum():
    shapes = {"matrix": (30, 10), "vector": (300,)}

    def distance(steps, **options):
        tx = gcjax.drive_compress(key=KEY, axis_name="data", **options)
        return distance_after_training(optax.chain(tx, optax.sgd(decaying)), steps, shapes)

    early, late = distance(300), distance(2000)
    assert late < early / 2  # an unbiased method would reach early / 2.6
    assert late < 0.03
    assert distance(1000, feedback=True) < 0.008


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 0, "key": KEY}, ValueError, "bits must be from 1 to 4, got 0"),
        ({"bits": 5, "key": KEY}, ValueError, "bits.*5"),
        ({"bits": 1.0, "key": KEY}, TypeError, "bits must be an int, got 1.0"),
        ({"block": 512, "key": KEY}, ValueError, "block must be one of 256, 1024, 4096, 16384, got 512"),
        ({"feedback": 1, "key": KEY}, TypeError, "feedback must be True or False, got 1"),
        ({"key": 7}, TypeError, "key must be a key made by"),
        ({}, TypeError, "key"),
    ],
)
def test_bad_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        gcjax.drive_compress(**options)
