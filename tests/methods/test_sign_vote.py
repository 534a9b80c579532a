"""sign_vote_compress and signum_compress: majorities by hand, ties, faulty workers, bytes, momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, mesh_of
from jax.sharding import PartitionSpec as P

import gcjax
from gcjax.contrib import sign_vote


def vote(per_worker, tx=None):
    """The update when worker w has the gradient per_worker[w]."""
    gradients = np.asarray(per_worker, np.float32)
    tx = tx or gcjax.contrib.sign_vote_compress(axis_name="data")
    return Runner(tx, {"x": gradients[0]}, len(gradients)).step({"x": gradients})["x"][0].tolist()


def test_the_update_is_the_sign_of_most_workers():
    assert vote([[9.0, -1.0, 5.0], [-0.1, -2.0, 1e-38], [-0.1, 3.0, 7.0]]) == [-1.0, -1.0, 1.0]


def test_ties_and_zeros_count_as_plus():
    assert vote([[1.0, -1.0, -1.0], [-1.0, -1.0, 1.0]]) == [1.0, -1.0, 1.0]
    assert vote([[0.0, -0.0, -1.0], [-1.0, -0.0, -0.0], [-1.0, -1.0, 0.0]]) == [-1.0, 1.0, 1.0]


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 15, 16, 17, 33])  # more than 16 are added in a loop
def test_the_majority_is_taken_bit_by_bit(workers):
    votes = np.random.default_rng(workers).integers(0, 2**32, (workers, 50), dtype=np.uint32)
    majority = np.asarray(sign_vote._majority(jnp.asarray(votes)))
    for column in range(50):
        for bit in range(32):
            count = sum(int(word) >> bit & 1 for word in votes[:, column])
            assert int(majority[column]) >> bit & 1 == (count > workers / 2)


def test_a_minority_of_adversaries_changes_nothing():
    honest = np.random.default_rng(0).normal(size=100).astype(np.float32)
    signs = np.sign(honest).tolist()
    assert vote([honest] * 4 + [-1e20 * honest] * 3) == signs
    assert vote([honest] * 3 + [-honest] * 4) == (-np.sign(honest)).tolist()


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_worker_sends_less_than_two_bits_per_entry(workers):
    entries = 4096
    runner = Runner(gcjax.contrib.sign_vote_compress(axis_name="data"), {"x": np.zeros(entries)}, workers)
    runner.step({"x": np.ones((workers, entries), np.float32)})
    info = gcjax.info(runner.state)
    check = 2 * (workers - 1) / workers * 20  # that of the checks
    assert info.wire_bytes - check == pytest.approx(2 * (workers - 1) / workers * entries / 8)
    assert info.payload_bits.tolist() == [entries] * workers


def test_the_momentum_of_signum_by_hand():
    tx = gcjax.contrib.signum_compress(momentum=0.75)
    state, votes, momenta = tx.init(jnp.zeros(1)), [], []
    for g in (8.0, -4.0, -4.0, 0.0):
        updates, state = tx.update(jnp.array([g]), state)
        votes.append(float(updates[0]))
        momenta.append(float(state.buckets.value[0].momentum[0, 0, 0]))
    assert momenta == [2.0, 0.5, -0.625, -0.46875]
    assert votes == [1.0, 1.0, -1.0, -1.0]


def test_signum_votes_with_each_workers_momentum():
    """The momentum of the mean gradient is positive in every step."""
    tx = gcjax.contrib.signum_compress(momentum=0.5, axis_name="data")
    runner = Runner(tx, {"x": np.zeros(1)}, 3)
    big, small = np.array([[9.0], [-1.0], [-1.0]], np.float32), np.array([[-1.0], [0.25], [-0.25]], np.float32)
    assert runner.step({"x": big})["x"][0].tolist() == [-1.0]
    assert runner.step({"x": small})["x"][0].tolist() == [-1.0]  # m: 1.75, -0.125, -0.375; the gradients also vote -1
    assert runner.step({"x": -small})["x"][0].tolist() == [-1.0]  # m: 1.375, -0.1875, -0.0625; the gradients vote +1


def trained(tx, centres):
    """The parameters after training on |x - c_w|^2 / 2 with one worker for each centre."""
    mesh = mesh_of(len(centres))
    params = jnp.zeros(len(centres[0]))
    opt_state = gcjax.distribute(tx.init(params), mesh)
    specs = gcjax.state_specs(opt_state)

    def train(params, opt_state, centre):
        def step(carry, _):
            params, opt_state = carry
            updates, opt_state = tx.update(params - centre[0], opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(step, (params, opt_state), length=400)[0][0]

    run = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=P()))
    return np.asarray(run(params, opt_state, np.asarray(centres, np.float32)))


def test_a_vote_ends_at_the_median_and_feedback_at_the_mean():
    centres = [[0.0, 3.0], [1.0, -1.0], [5.0, 0.0]]

    def rate(t):
        return 0.5 / (1 + t / 10)

    ends = {
        name: trained(optax.chain(make(axis_name="data"), optax.sgd(rate)), centres)
        for name, make in (("vote", gcjax.contrib.sign_vote_compress), ("feedback", gcjax.ef_sign_compress))
    }
    np.testing.assert_allclose(ends["vote"], [1.0, 0.0], atol=0.03)
    np.testing.assert_allclose(ends["feedback"], [2.0, 2 / 3], atol=0.03)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_bad_momentum_raises(momentum):
    with pytest.raises(ValueError, match=rf"momentum must be in \[0, 1\), got {momentum}"):
        gcjax.contrib.signum_compress(momentum)
