"""Codes of every entry: the parts of the owners, what each transport moves, what owners keep, and the mean of draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner, compress_state, shared_draws
from selection import cases

import gcjax
import gcjax.extend as gx
from gcjax._comm.simulated import ring_bytes, transfers_of
from gcjax._dense import parts
from gcjax._dense.parts import cut, parameters_of, part_of, uncut
from gcjax._kernels.layout import layout_of

KEY = jax.random.key(3)
METHODS = {
    "qsgd": functools.partial(gcjax.qsgd_compress, key=KEY),
    "natural": functools.partial(gcjax.contrib.natural_compress, key=KEY),
    "terngrad": functools.partial(gcjax.contrib.terngrad_compress, None, aggregate="gather", key=KEY),
    "ef_sign": gcjax.ef_sign_compress,
    "float16": functools.partial(gcjax.dense_compress, "float16"),
}
EACH = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)

# Both large leaves have blocks of their own, but of their halves only that of the second: it comes first.
SIZES = (36000, 8192, 300, 1)


@cases("workers", [1, 2, 3, 8], default=2)
def test_every_part_has_its_pieces_of_the_leaves(workers):
    leaves = [np.arange(1, n + 1, dtype=np.float32).reshape(-1, 100 if n % 100 == 0 else 1) for n in SIZES]
    (bucket,) = layout_of(leaves).buckets
    ordered = [leaves[s.leaf] for s in bucket.segments]
    parts, layout = cut(ordered, bucket, workers), part_of(bucket, workers)
    for worker, part in enumerate(parts):
        for s, piece in zip(layout.segments, layout.split(part), strict=True):
            whole = ordered[s.leaf].ravel()
            expected = whole[worker * s.size : (worker + 1) * s.size]
            np.testing.assert_array_equal(piece, np.pad(expected, (0, s.size - len(expected))))
        marked = parameters_of(jnp.ones(layout.shape), jnp.int32(worker), bucket, workers)
        np.testing.assert_array_equal(marked, part > 0)
    for got, leaf in zip(uncut(parts, bucket), ordered, strict=True):
        np.testing.assert_array_equal(got, leaf)


def transfers(make, sizes, workers, transport):
    """What one worker sends. tests/planner/test_transfers.py shows that these are the transfers of a real step."""
    params = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    return transfers_of(make(transport=transport), params, workers, squares=False)


def moved(make, sizes, workers, transport):
    return sum(ring_bytes(t, workers) for t in transfers(make, sizes, workers, transport))


@EACH
def test_two_phases_move_two_messages_for_any_number_of_workers(make):
    n = 1 << 20
    message = transfers(make, [n], 2, "all_gather")[-1].bytes
    for workers in (2, 8, 64):
        assert moved(make, [n], workers, "all_gather") == pytest.approx((workers - 1) * message, rel=0.01)
        two = 2 * message * (workers - 1) / workers
        assert moved(make, [n], workers, "two_phase") == pytest.approx(two, rel=0.02)


SAVES = [
    ([1 << 16], 2, "all_gather"),
    ([1 << 16], 3, "two_phase"),
    ([1 << 16], 8, "two_phase"),
    ([1 << 16, 300], 8, "two_phase"),
]


@cases(("name", "sizes", "workers", "expected"), [(name, *case) for case in SAVES for name in METHODS], default=10)
def test_auto_takes_the_transport_that_moves_less(name, sizes, workers, expected):
    make = METHODS[name]
    assert transfers(make, sizes, workers, "auto") == transfers(make, sizes, workers, expected)
    of = {transport: moved(make, sizes, workers, transport) for transport in ("all_gather", "two_phase")}
    assert of[expected] == min(of.values())


def test_two_workers_gather_even_where_two_phases_would_save_padding():
    # The leaf has 9 blocks of its own, a half shares 5.
    make, sizes = METHODS["ef_sign"], [(1 << 15) + 1]
    assert moved(make, sizes, 2, "two_phase") < moved(make, sizes, 2, "all_gather")
    assert transfers(make, sizes, 2, "auto") == transfers(make, sizes, 2, "all_gather")


@pytest.mark.parametrize(("name", "bits"), [("ef_sign", 32 + 32), ("natural", 9 * 32), ("float16", 16 * 32)])
def test_payload_bits_count_the_messages_of_both_phases(name, bits):
    runner = Runner(METHODS[name](transport="two_phase", axis_name="data"), {"a": np.zeros(96, np.float32)}, 3)
    runner.step({"a": np.ones((3, 96), np.float32)})
    assert gcjax.info(runner.state).payload_bits.tolist() == [4 * bits] * 3


def test_auto_gathers_small_leaves():
    # A leaf of 32 entries is a scale and a word; so is each of its pieces.
    make, sizes = METHODS["ef_sign"], [32] * 9
    assert transfers(make, sizes, 8, "auto") == transfers(make, sizes, 8, "all_gather")
    assert moved(make, sizes, 8, "auto") < moved(make, sizes, 8, "two_phase")


@EACH
def test_one_worker_sends_nothing(make):
    g = {"a": jnp.linspace(-1, 1, 300)}
    updates = []
    for transport in ("all_gather", "two_phase"):
        tx = make(transport=transport)
        update, state = jax.jit(tx.update)(g, tx.init(g))
        updates.append(update["a"])
        assert gcjax.info(state).wire_bytes == 0
    np.testing.assert_array_equal(*updates)


@cases("name", ["qsgd", "natural", "terngrad"], default=1)
def test_the_mean_of_many_draws_is_the_mean_gradient(name):
    # 65 entries: the last piece has one less.
    g = np.random.default_rng(0).normal(size=(3, 65)).astype(np.float32)
    tx = METHODS[name](transport="two_phase", axis_name="data")
    got = shared_draws(tx, g, 1000)
    standard_error = got.std(0) / 1000**0.5 + 1e-6
    error = (got.mean(0, dtype=np.float64) - g.mean(0)) / standard_error
    assert np.abs(error).max() < 5
    assert np.mean(error**2) < 1 + 5 * (2 / 65) ** 0.5


def test_a_code_that_draws_in_both_phases_draws_independently():
    def round_up_or_down(x, bucket, key):
        return gx.float_bits(jnp.floor(x + gx.uniform(key, bucket.positions()))).reshape(-1), 32 * bucket.entries

    def decode(payload, bucket):
        return gx.bits_float(payload).reshape(bucket.shape)

    codec = gx.dense_codec(round_up_or_down, decode, feedback=False, key=KEY, transport="two_phase")
    g = np.zeros((2, 2, 2000), np.float32)  # workers, owners, entries
    g[0], g[1, 0] = 0.5, 1.0  # an owner rounds means of 1/2: with the draw that made them, all go one way
    (update,) = shared_draws(gx.compress(codec, axis_name="data"), g, 1)
    np.testing.assert_allclose(update.mean(1), [0.75, 0.25], atol=5 * (0.75 * 0.25 / 2000) ** 0.5)


@pytest.mark.parametrize("transport", ["all_gather", "two_phase"])
def test_many_workers_are_added_in_a_loop(transport, monkeypatch):
    g = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    updates = []
    for unrolled in (16, 3):
        monkeypatch.setattr(parts, "UNROLLED", unrolled)
        runner = Runner(gcjax.contrib.natural_compress(key=KEY, transport=transport, axis_name="data"), {"a": g[0]}, 4)
        updates.append([runner.step({"a": g})["a"] for _ in range(3)])
    np.testing.assert_array_equal(*updates)


@pytest.mark.parametrize(
    ("transport", "workers", "kept"),
    [("two_phase", 1, None), ("two_phase", 2, 4096), ("auto", 2, None), ("auto", 8, 4096), ("all_gather", 8, None)],
)
def test_owners_keep_a_part_where_they_need_it(transport, workers, kept):
    params = {"a": np.zeros(1 << 12, np.float32)}
    tx = gcjax.ef_sign_compress(transport=transport, axis_name="data")
    state = compress_state(Runner(tx, params, workers).start)
    (bucket,) = state.buckets.stacked()
    value = bucket.owned.owed
    assert (None if value is None else value[0].size) == kept
