"""The transports of the sparse exchange: what each moves, who owns what, and that both give the same."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compact import compact_words
from harness import Runner, mesh_of
from jax.sharding import PartitionSpec as P
from oracle import quick_bits
from selection import cases

import gcjax
from gcjax._comm.collectives import SingleWorker, replaced_comm
from gcjax._comm.simulated import ring_bytes, transfers_of
from gcjax._sparse.capacities import capacities_for
from gcjax._sparse.owners import owner_of

N = 1 << 14
pytestmark = pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")  # only what is moved matters here
PARAMS = {"a": np.zeros(N, np.float32)}


@functools.cache
def gradients(workers, share=0.05, seed=0):
    """Each worker's own: `share` of the entries not zero, the same ones on all workers."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(N) < share
    return {"a": (rng.integers(-8, 9, (workers, N)) * chosen / 8).astype(np.float32)}


def moved(make, workers, transport):
    """Bytes that one worker sends. tests/planner/test_transfers.py shows that these are the bytes of a real step."""
    messages = transfers_of(make(transport), PARAMS, workers, squares=False)
    return sum(ring_bytes(message, workers) for message in messages)


def strom(transport):
    return gcjax.contrib.strom_compress(0.1, capacity=N // 4, transport=transport)


def test_two_phases_move_as_much_for_many_workers():
    by_gather = {workers: moved(strom, workers, "all_gather") for workers in (8, 64)}
    in_phases = {workers: moved(strom, workers, "two_phase") for workers in (8, 64)}
    # N/4 slots: a sign, a low bit, the slot and half a place for each; and codes of 4 bits for all entries.
    message, codes = N / 4 * (1 + 1 + 1 + 2) / 8, N / 2
    assert by_gather[8] == pytest.approx(7 * message, rel=0.02)
    assert by_gather[64] == pytest.approx(63 * message, rel=0.02)
    assert in_phases[8] == pytest.approx(7 / 8 * (message + codes), rel=0.1)
    assert in_phases[64] < 1.4 * in_phases[8]  # owners need more room for chance, the fewer words they have


WITH_TRANSPORT = {
    "variance": lambda transport: gcjax.variance_compress(1.5, capacity=3072, transport=transport),
    "top_k": lambda transport: gcjax.top_k_compress(3072 / N, transport=transport),
}


@cases(
    ("method", "workers"),
    itertools.product(WITH_TRANSPORT, (2, 3, 4, 8)),
    default=lambda method, workers: method == "variance" or workers in (2, 8),
)
def test_auto_takes_the_transport_that_moves_less(workers, method):
    make = WITH_TRANSPORT[method]
    of = {transport: moved(make, workers, transport) for transport in ("all_gather", "two_phase", "auto")}
    assert of["auto"] == min(of.values())
    assert of["all_gather"] != of["two_phase"]
    if method == "variance":
        assert (of["auto"] == of["all_gather"]) == (workers < 4)


def test_one_worker_sends_nothing():
    tx = gcjax.top_k_compress(0.1, transport="two_phase")
    g = {"a": jnp.arange(10.0)}
    update, state = jax.jit(tx.update)(g, tx.init(g))
    assert update["a"][-1] == 9
    assert gcjax.info(state).wire_bytes == 0


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


@pytest.mark.parametrize("transport", ["all_gather", "two_phase"])
def test_no_entry_starves_in_a_small_payload(transport):
    # 16 owners' rounds of words, all entries selected in every step, 32 slots an owner: a word each.
    tx = gcjax.contrib.strom_compress(1.0, capacity=64, transport=transport, axis_name="data")
    params = {"a": np.zeros(1024, np.float32)}
    runner, sent = Runner(tx, params, 2), np.zeros(1024)
    for _ in range(16):
        sent += runner.step({"a": np.full((2, 1024), 2.0, np.float32)})["a"][0] != 0
    assert (sent > 0).all()


def test_owners_send_the_codes_of_all_entries_where_that_is_shorter():
    tx = gcjax.variance_compress(1e-6, transport="two_phase", capacity=(64, N), axis_name="data")
    runner = Runner(tx, PARAMS, 8)
    few = runner.step(gradients(8, share=0.001)) and gcjax.info(runner.state)
    many = runner.step(gradients(8, share=0.9)) and gcjax.info(runner.state)
    places, maxima = N // 8, (5 + 1 + 1) * 2 * 7 / 8 * 4
    to_owners = {slots: 7 * 4 * (2 + compact_words(slots, places, 4)) for slots in (32, many.capacity // 8)}
    codes = 2 + 4 * places // 32  # words, gathered in whole 8
    assert many.wire_bytes == to_owners[many.capacity // 8] + 7 * 4 * 8 * math.ceil(codes / 8) + maxima
    assert few.capacity == 8 * 32
    assert to_owners[32] + maxima < few.wire_bytes < to_owners[32] + maxima + 7 * 4 * 60
    assert gcjax.info(runner.state).residual_norm.max() > 0


def test_owners_have_their_share_of_the_slots_and_room_for_chance():
    """An eighth of 64, 160 and 864 and three standard deviations are 16.5, 33.4 and 139.2 slots, in groups of 32."""
    tx = gcjax.variance_compress(1e-6, transport="two_phase", capacity=(64, 160, 864), axis_name="data")
    runner = Runner(tx, PARAMS, 8)
    for entries, slots in ((8, 32), (300, 64), (2000, 160)):
        g = np.zeros((8, N), np.float32)
        g[:, np.random.default_rng(0).choice(N, entries, replace=False)] = 1
        runner = runner.restart()
        runner.step({"a": g})
        assert gcjax.info(runner.state).capacity == 8 * slots


def test_a_state_for_another_number_of_workers_is_refused():
    tx = gcjax.top_k_compress(0.1, transport="two_phase", axis_name="data")
    state = tx.init(PARAMS)  # not placed

    def step(g):
        return tx.update({"a": g[0]}, state)[0]["a"]

    run = jax.shard_map(step, mesh=mesh_of(2), in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match=r"initialised for 1 worker\(s\), but 2 run.*gcjax\.distribute.*gcjax\.resize"):
        run(jnp.zeros((2, N)))


def test_init_inside_shard_map_knows_the_workers():
    tx = gcjax.top_k_compress(0.1, transport="two_phase", axis_name="data")

    def step(g):
        return tx.update({"a": g[0]}, tx.init(PARAMS))[0]["a"]

    run = jax.jit(jax.shard_map(step, mesh=mesh_of(2), in_specs=P("data"), out_specs=P()))
    assert (run(jnp.ones((2, N))) > 0).sum() > 0


@pytest.mark.parametrize(("capacity", "ends"), [(None, (512, 1 << 18)), (0.25, (512, 1 << 18)), (0.5, (1024, 1 << 19))])
def test_capacities_up_to_a_share(capacity, ends):
    sizes = np.array(capacities_for(capacity, 1 << 20))
    assert (sizes[0], sizes[-1]) == ends  # in whole groups of 16 or 32 lanes
    assert (sizes[1:] <= 2 * sizes[:-1]).all()
    assert (sizes[-10:] <= 1.5 * sizes[-11:-1]).all()
    assert capacities_for(capacity, 100) == ((32, 64) if capacity == 0.5 else (32,))


def test_a_message_that_claims_too_many_entries_makes_the_update_nan():
    tx = gcjax.top_k_compress(32 / N, transport="all_gather")

    @jax.jit
    def update(count):
        comm = SingleWorker()
        comm.gather = lambda x: SingleWorker().gather(x.at[0].set(count))
        comm.metered = lambda: lambda: comm
        with replaced_comm(lambda *axes: comm):
            return tx.update({"a": jnp.arange(N) / N}, tx.init(PARAMS))[0]["a"]

    for count in (32, 33, 2**32 - 1):
        found = np.isnan(update(np.uint32(count)))
        assert found.all() == found.any() == (count > 32)
