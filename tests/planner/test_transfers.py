"""The transfers that the planner counts are those of real steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compact import compact_words
from harness import Runner, limited_buckets, mesh_of
from jax.sharding import PartitionSpec as P
from rows import SHAPES, methods
from selection import cases

import gcjax
from gcjax._comm.collectives import comm_for_axes, mesh_comm, replaced_comm
from gcjax._comm.simulated import Transfer, model_of, ring_bytes, simulated_workers, transfers_of

PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
WORKERS = 8


def real_bytes(row):
    """Bytes that the collectives of a real step move, with the largest branches. The step is only traced."""
    comms = []

    def recorded(comm):
        choices, meter = [], comm.metered
        comms.append((comm, choices))

        def metered():
            branch, branches = meter(), []
            choices.append(branches)

            def recorded_branch():
                branches.append(branch())
                return branches[-1]

            return recorded_branch

        comm.metered = metered
        return comm

    tx, mesh = row.make("data"), mesh_of(WORKERS)
    state = jax.eval_shape(lambda params: gcjax.distribute(tx.init(params), mesh), PARAMS)

    def local(state, gradient):
        return tx.update(gradient, state, **({"sum_grad_squared": gradient} if row.uses_squares else {}))

    specs = gcjax.state_specs(state)
    step = jax.shard_map(
        lambda state, stacked: local(state, jax.tree.map(lambda x: x[0], stacked)),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(P(), specs),
    )
    gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), PARAMS)
    with replaced_comm(lambda *axes: recorded(mesh_comm(*axes))):
        jax.eval_shape(step, state, gradients)
    ((comm, choices),) = comms
    largest = [max((branch.bytes_moved() for branch in branches), default=0) for branches in choices]
    return comm.bytes_moved() + sum(largest)


@cases("row", methods(), ids=lambda row: row.name, default=16)
def test_transfers_are_those_of_a_real_step(row):
    transfers = transfers_of(row.make(None), PARAMS, WORKERS, row.uses_squares)
    assert sum(ring_bytes(transfer, WORKERS) for transfer in transfers) == pytest.approx(real_bytes(row))


@pytest.mark.parametrize("name", ["variance-overflow", "onebit", "dense-float32", "random_k-entries"])
@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_transfers_add_up_to_the_bytes_of_info(name):
    row = next(row for row in methods() if row.name.startswith(name))
    runner = Runner(row.make("data"), jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS), WORKERS)
    rng = np.random.default_rng(0)
    runner.step({key: rng.normal(size=(WORKERS, *shape)).astype(np.float32) for key, shape in SHAPES.items()})
    transfers = transfers_of(row.make(None), PARAMS, WORKERS, False)
    wire = gcjax.info(runner.state).wire_bytes
    assert sum(ring_bytes(transfer, WORKERS) for transfer in transfers) == pytest.approx(wire)


def test_the_largest_capacity_counts_in_every_bucket():
    tx = gcjax.variance_compress(capacity=(32, 64), transport="all_gather")
    once = transfers_of(tx, jnp.zeros(1024), 4, True)
    with limited_buckets(512):
        twice = transfers_of(tx, jnp.zeros(1024), 4, True)
    of = {places: 2 + compact_words(64, places, 4) for places in (1024, 512)}  # a count and a scale
    in_eights = {places: 4 * 8 * math.ceil(words / 8) for places, words in of.items()}
    assert [t for t in once if t.kind == "all_gather"] == [Transfer("all_gather", in_eights[1024])]
    assert [t for t in twice if t.kind == "all_gather"] == [Transfer("all_gather", in_eights[512])] * 2


@pytest.mark.parametrize(
    ("tx", "kinds"),
    [
        (gcjax.top_k_compress(0.1), ["all_gather", "all_gather"]),
        (
            gcjax.top_k_compress(0.1, transport="two_phase"),
            ["all_to_all", "all_gather", "all_to_all", "all_gather"],
        ),
    ],
)
def test_messages_of_one_size_count_in_every_bucket_and_phase(tx, kinds):
    with limited_buckets(2048):
        transfers = transfers_of(tx, jnp.zeros(4096), 4, True)
    assert [t.kind for t in transfers if t.kind.startswith("all_") and t.kind != "all_reduce"] == kinds


def test_a_model_of_billions_is_planned_and_is_refused_on_one_device():
    model = [jax.ShapeDtypeStruct((1 << 28,), jnp.float32)] * 9
    assert len(transfers_of(gcjax.dense_compress(), model, 8, False)) >= 9
    mesh, tx = mesh_of(2), gcjax.dense_compress(axis_name="data")
    step = jax.shard_map(
        lambda gradient: tx.update(gradient, tx.init(gradient))[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="2,415,919,104 parameters, and gcjax counts to 2,147,483,647; shard"):
        jax.eval_shape(step, model)


def test_each_choice_between_branches_counts_once():
    def gather(comm, size):
        comm.gather(jnp.zeros(8 * size, jnp.uint8))

    def update(gradient, state, params=None):
        comm = comm_for_axes(())
        gather(comm, 3)
        first, second = comm.metered(), comm.metered()
        gather(first(), 1)
        gather(first(), 2)
        gather(second(), 1)
        gather(comm, 3)
        nested = comm.metered()()
        gather(nested, 2)
        within = nested.metered()
        gather(within(), 3)
        gather(within(), 1)
        return gradient, state

    tx = optax.GradientTransformation(lambda params: (), update)
    sizes = [transfer.bytes for transfer in transfers_of(tx, jnp.zeros(1), 2, False)]
    assert sizes == [8 * size for size in (3, 2, 1, 3, 2, 3)]


def test_transforms_without_axes_have_one_worker_outside():
    tx = gcjax.dense_compress()
    transfers_of(tx, jnp.zeros(4), 5, False)
    updates, state = tx.update(jnp.ones(4), tx.init(jnp.ones(4)))
    np.testing.assert_array_equal(updates, 1)
    assert gcjax.info(state).wire_bytes == 0


def test_simulated_step_decodes_every_payload():
    tx = gcjax.top_k_compress(0.5)
    gradient = jnp.asarray([3.0, -1.0, 2.0, 0.5])

    @jax.jit
    def step(zeros):
        with simulated_workers(3, zeros, []):
            return tx.update(gradient, tx.init(gradient))[0]

    np.testing.assert_allclose(step(jnp.zeros(3, jnp.int32)), [3, 0, 2, 0], rtol=1e-6)
    # The third worker's payload, uint32 words, begins with the number of its entries.
    assert step(jnp.asarray([0, 0, -1]))[2] < 2


def test_a_size_stands_for_square_matrices():
    assert [x.shape for x in model_of(2_003_005)] == [(1000, 1000), (1000, 1000), (3, 1000), (5,)]
    assert [x.shape for x in model_of(30)] == [(5, 5), (1, 5)]
    for size in (7_000_000_000, 70_000_000_000):  # 7,000 matrices would take minutes to trace
        shapes = [x.shape for x in model_of(size)]
        assert sum(map(math.prod, shapes)) == size
        assert len(shapes) < 300
