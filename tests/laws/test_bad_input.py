"""Bad use raises, with the value and the cure in the message."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Runner, mesh_of
from jax.sharding import PartitionSpec as P

import gcjax

G = {"w": jnp.ones(3), "b": jnp.ones(())}


VARIANCE = gcjax.variance_compress()
OF_AN_AXIS = gcjax.variance_compress(axis_name="data")


def update(tx=VARIANCE, state=None, **more):
    return tx.update(G, tx.init(G) if state is None else state, **more)


def placed(workers, **more):
    return gcjax.distribute(OF_AN_AXIS.init(G), mesh_of(workers, **more))


OTHER_SHAPE = r"leaf \['w'\] has shape \(4,\), the gradient \(3,\)"
WRONG = {  # the call, its error, and the message
    "unbound axis": (lambda: update(OF_AN_AXIS), ValueError, r"'data'.*not bound.*make_train_step"),
    "params of another structure": (lambda: update(params={"w": jnp.ones(3)}), ValueError, "params has the structure"),
    "squares of another structure": (
        lambda: update(sum_grad_squared={"w": jnp.ones(3)}),
        ValueError,
        "sum_grad_squared has the structure",
    ),
    "params of another shape": (lambda: update(params=G | {"w": jnp.ones(4)}), ValueError, f"params {OTHER_SHAPE}"),
    "squares of another shape": (
        lambda: update(sum_grad_squared=G | {"w": jnp.ones(4)}),
        ValueError,
        f"sum_grad_squared {OTHER_SHAPE}",
    ),
    "a negative square": (
        lambda: update(sum_grad_squared=G | {"w": jnp.array([1.0, -2.0, 0.0])}),
        ValueError,
        r"\['w'\] has a negative entry \(-2",
    ),
    "state of another tree": (
        lambda: update(state=VARIANCE.init({"w": jnp.ones(5)})),
        ValueError,
        "initialised for other leaves",
    ),
    "state of all workers": (
        lambda: update(OF_AN_AXIS, placed(2)),
        ValueError,
        "state of 2 workers at once.*state_specs",
    ),
    "mesh without the axis": (lambda: placed(2, axis="rows"), ValueError, r"\('rows',\).*\('data',\)"),
    "state that is placed already": (
        lambda: gcjax.distribute(placed(4), mesh_of(4)),
        ValueError,
        r"the state has 4 workers already\. Give distribute that of one worker",
    ),
    "info of an optimiser": (
        lambda: gcjax.info(optax.adam(1e-3).init(G)),
        ValueError,
        "no state of a gcjax compressor",
    ),
    "info inside jit": (lambda: jax.jit(gcjax.info)(VARIANCE.init(G)), TypeError, r"cannot run inside jax\.jit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_raises_with_the_cure(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")
def test_a_reduced_gradient_raises_with_the_cure():
    mesh = mesh_of(8)
    tx = gcjax.variance_compress(axis_name="data")
    state = gcjax.distribute(tx.init(G), mesh)
    specs = gcjax.state_specs(state)

    def loss(params, x):
        return jnp.sum(params["w"] * x) + params["b"]

    def step(take_gradient):
        def local(params, state, x):
            return tx.update(take_gradient(loss)(params, x[0]), state)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))

    x = np.ones((8, 3), np.float32)
    with pytest.raises(ValueError, match=r"already.*local_gradients.*make_train_step"):
        step(jax.grad)(G, state, x)
    updates, _ = step(lambda loss: gcjax.local_gradients(jax.grad(loss), "data"))(G, state, x)
    assert jax.tree.structure(updates) == jax.tree.structure(G)


@pytest.mark.parametrize(
    ("make", "made_with", "used_with", "difference"),
    [
        (
            gcjax.variance_compress,
            {"transport": "all_gather"},
            {"transport": "two_phase"},
            "its buckets.0.transport.name is 'all_gather', that of this transform 'two_phase'",
        ),
        (gcjax.variance_compress, {"threshold": 0.1}, {}, "buckets.0.reset is .*_hybrid_reset"),
        (
            gcjax.ef_sign_compress,
            {"transport": "all_gather"},
            {"transport": "auto"},
            r"buckets.0.owned.sharing is None, that of this transform Pieces\(fewest=3\)",
        ),
        (
            functools.partial(gcjax.contrib.random_k_compress, 0.5),
            {"key": jax.random.key(0), "feedback": True},
            {"key": jax.random.key(0), "feedback": False},
            r"error is \(1, 32, 128\), that of this transform \(1,\)",
        ),
    ],
)
def test_a_state_of_other_options_is_refused(make, made_with, used_with, difference):
    message = f"initialised by a transform with other options, such as another transport or feedback: .*{difference}"
    with pytest.raises(ValueError, match=message):
        make(**used_with).update(G, make(**made_with).init(G))


def as_restored(state):
    """The state as if its arrays came from a checkpoint of other options."""
    return optax.tree.set(state, options=optax.tree.get(state, "options") ^ 1)


def test_arrays_of_other_options_are_refused():
    tx = gcjax.top_k_compress(0.5)
    with pytest.raises(ValueError, match=r"were made with other options than the state.*0x.*A checkpoint of other opt"):
        tx.update(G, as_restored(tx.init(G)))


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_traced_step_on_arrays_of_other_options_trains_nothing(mode):
    tx = gcjax.top_k_compress(0.5, transport="all_gather", axis_name="data")
    runner, gradients = Runner(tx, G, 4, mode), jax.tree.map(lambda x: np.stack([x] * 4), G)
    for step in range(2):
        before = runner.state = as_restored(runner.state) if step == 0 else runner.state
        assert all(np.isnan(x).all() for x in jax.tree.leaves(runner.step(gradients)))
        jax.tree.map(np.testing.assert_array_equal, runner.state.buckets, before.buckets)
    with pytest.raises(ValueError, match="were made with other options than the state"):
        gcjax.info(runner.state)


CHECKSUMS = """
import jax, gcjax, optax
key = jax.random.key(0)
demo = gcjax.contrib.demo_compress(1)
for tx in (gcjax.variance_compress(), gcjax.qsgd_compress(4, key=key), gcjax.dgc_compress(0.1), demo):
    print(optax.tree.get(tx.init({"w": jax.numpy.ones(5000), "b": jax.numpy.ones(3)}), "options")[0])
"""


def test_the_checksum_of_the_options_is_the_same_in_every_process():
    seen = {
        subprocess.run(
            [sys.executable, "-c", CHECKSUMS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (checksums,) = seen
    assert len(set(checksums.split())) == 4


def test_a_state_serves_both_wires():
    g = {"w": jnp.array([3.0, 1.0, -2.0])}
    squares = jax.tree.map(jnp.zeros_like, g)
    words, compact = (gcjax.variance_compress(wire=wire, capacity=32) for wire in ("word", "compact"))
    first, state = jax.jit(words.update)(g, words.init(g), sum_grad_squared=squares)
    second, _ = jax.jit(compact.update)(g, state, sum_grad_squared=squares)
    np.testing.assert_array_equal(first["w"], second["w"])


def test_a_model_without_entries_trains():
    tx = optax.chain(gcjax.variance_compress(axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(lambda params, x: jnp.mean(x) + jnp.sum(params["w"]), tx, mesh_of(2))
    state, _ = step(step.init({"w": np.zeros((0, 3), np.float32)}), np.ones((4, 3), np.float32))
    assert state.params["w"].shape == (0, 3)
    assert gcjax.info(state.opt_state).sent.tolist() == [0, 0]
