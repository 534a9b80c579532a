"""The transports of the sparse exchange: what each moves, who owns what, and that both give the same."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner
from oracle import quick_bits

import gcjax
from gcjax._comm.simulated import ring_bytes, transfers_of
from gcjax._sparse.exchange import default_capacities
from gcjax._sparse.reduce_scatter import owner_of, word_of

N = 1 << 14
PARAMS = {"a": np.zeros(N, np.float32)}


@functools.cache
def gradients(workers, share=0.05, seed=0):
    """Each worker's own: `share` of the entries not zero, the same ones on all workers."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(N) < share
    return {"a": (rng.integers(-8, 9, (workers, N)) * chosen / 8).astype(np.float32)}


def run(workers, transport):
    """The updates of all workers in two steps."""
    tx = gcjax.variance_compress(1e-6, values="float32", capacity=2048, transport=transport, axis_name="data")
    runner = Runner(tx, PARAMS, workers)
    return [runner.step(gradients(workers))["a"] for _ in range(2)]


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.full), 8])
def test_transports_agree_when_all_sums_fit(workers):
    by_gather = run(workers, "all_gather")
    assert by_gather[0].any()
    np.testing.assert_array_equal(by_gather, run(workers, "reduce_scatter"))


def moved(make, workers, transport):
    """Bytes that one worker sends. tests/planner/test_transfers.py shows that these are the bytes of a real step."""
    messages = transfers_of(make(transport), PARAMS, workers, squares=False)
    return sum(ring_bytes(message, workers) for message in messages)


def test_reduce_scatter_moves_less_than_three_payloads():
    payload = 4 * 8192  # bytes: one word an entry

    def strom(transport):
        return gcjax.strom_compress(0.1, capacity=8192, transport=transport)

    for workers in (2, 4, 8, 64):
        assert moved(strom, workers, "all_gather") == pytest.approx((workers - 1) * payload, rel=0.01)
        three = 3 * payload * (workers - 1) / workers
        assert moved(strom, workers, "reduce_scatter") == pytest.approx(three, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "values", "expected"),
    # A worker sends each other one k words, or k/p and 2k/p: fewer from p = 4 on; with two words an entry from p = 3.
    [(2, "power_of_two", "all_gather"), (3, "power_of_two", "all_gather"), (4, "power_of_two", "reduce_scatter"),
     (2, "float32", "all_gather"), (3, "float32", "reduce_scatter"), (8, "power_of_two", "reduce_scatter")],
)  # fmt: skip
def test_auto_takes_the_transport_that_moves_less(workers, values, expected):
    def variance(transport):
        return gcjax.variance_compress(1.5, values=values, capacity=3072, transport=transport)

    of = {transport: moved(variance, workers, transport) for transport in ("all_gather", "reduce_scatter", "auto")}
    assert of["auto"] == of[expected] == min(of.values())
    assert of["all_gather"] != of["reduce_scatter"]


def test_one_worker_sends_nothing():
    tx = gcjax.top_k_compress(0.1, transport="reduce_scatter")
    g = {"a": jnp.arange(10.0)}
    update, state = tx.update(g, tx.init(g))
    assert update["a"][-1] == 9
    assert gcjax.info(state).wire_bytes == 0


@pytest.mark.parametrize("workers", [2, 3, 8, 48])
def test_every_owner_gets_one_word_per_round(workers):
    rounds = 64
    word = np.asarray(word_of(np.arange(workers)[:, None], np.arange(rounds), workers))
    assert sorted(word.ravel()) == list(range(workers * rounds))
    assert (np.sort(word, axis=0) == np.arange(workers)[:, None] + workers * np.arange(rounds)).all()
    owner, turn = owner_of(word, workers)
    np.testing.assert_array_equal(owner, np.broadcast_to(np.arange(workers)[:, None], word.shape))
    np.testing.assert_array_equal(turn, np.broadcast_to(np.arange(rounds), word.shape))


def test_busy_columns_are_spread_over_all_owners():
    workers, rounds = 8, 4096
    turn = quick_bits(np.uint32(0), np.arange(rounds)) % workers
    for period in (1, 2, 8, 32):  # in rounds: every period-th round's first word is busy
        owners = (0 - turn[::period].astype(int)) % workers
        ours = np.asarray(owner_of(np.arange(0, rounds, period) * workers, workers)[0])
        np.testing.assert_array_equal(ours, owners)
        counts = np.bincount(ours, minlength=workers)
        mean = rounds / period / workers
        assert (np.abs(counts - mean) < 5 * mean**0.5).all()


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
def test_no_entry_starves_in_a_small_payload(transport):
    # 16 owners' rounds of words, all entries selected in every step, 32 slots an owner: a word each.
    tx = gcjax.strom_compress(1.0, capacity=64, transport=transport, axis_name="data")
    params = {"a": np.zeros(1024, np.float32)}
    runner, sent = Runner(tx, params, 2), np.zeros(1024)
    for _ in range(16):
        sent += runner.step({"a": np.full((2, 1024), 2.0, np.float32)})["a"][0] != 0
    assert (sent > 0).all()


def words_of_first():
    """The numbers of the two words, of four, that owner 0 of 2 gets."""
    return np.flatnonzero(np.asarray(owner_of(np.arange(4), 2)[0]) == 0)


def test_sums_not_passed_on_wait_in_the_owners_residual():
    # Owner 0 gets 32 ones from worker 0 and 32 twos from worker 1, and may pass on 32.
    tx = gcjax.top_k_compress(64 / 128, transport="reduce_scatter", axis_name="data")
    runner = Runner(tx, {"a": np.zeros(128, np.float32)}, 2)
    g = np.zeros((2, 128), np.float32)
    first, second = (np.arange(word, 128, 4) for word in words_of_first())  # a word is every fourth entry
    g[0, first], g[1, second] = 1.0, 2.0
    update = runner.step({"a": g})["a"][0]
    np.testing.assert_array_equal(update[first], 0)
    np.testing.assert_array_equal(update[second], 1.0)
    np.testing.assert_allclose(gcjax.info(runner.state).residual_norm, [32**0.5, 0.0], rtol=1e-6)


def test_returned_sums_join_the_rounding_error():
    # As above, in the second of two leaves: worker 0 sends 3 as 2, which comes back to it; worker 1 sends 6 as 4.
    tx = gcjax.variance_compress(1e-6, feedback=True, capacity=64, transport="reduce_scatter", axis_name="data")
    runner = Runner(tx, {"a": np.zeros(32, np.float32), "b": np.zeros(96, np.float32)}, 2)
    g = np.zeros((2, 128), np.float32)
    entries = [np.arange(32), *(np.arange(32 + k, 128, 3) for k in range(3))]  # of each word: the second leaf has three
    first, second = words_of_first()
    assert second > 0  # its second word lies in the second leaf
    g[1, entries[first]], g[0, entries[second]] = 6.0, 3.0
    runner.step({"a": g[:, :32], "b": g[:, 32:]})
    np.testing.assert_allclose(gcjax.info(runner.state).residual_norm, [3 * 32**0.5, 2 * 32**0.5], rtol=1e-6)


def test_an_unknown_transport_is_named():
    for make in (gcjax.variance_compress, gcjax.strom_compress, gcjax.top_k_compress, gcjax.drop_compress):
        with pytest.raises(
            ValueError, match="transport must be one of 'all_gather', 'reduce_scatter', 'auto', got 'x'"
        ):
            make(0.5, transport="x")


def test_default_capacities():
    assert default_capacities(1 << 20) == tuple(1 << k for k in range(10, 17))
    assert default_capacities(1000) == (32, 64)
