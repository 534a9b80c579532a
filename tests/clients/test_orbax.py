"""Checkpoints of Orbax that are restored into the state of a transform with other options."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from selection import cases

import gcjax

ocp = pytest.importorskip("orbax.checkpoint")
WORKERS = 4
OTHER_ARRAYS = r"the arrays of this state were made with other options than the state, such as another transport.*0x"
TOO_FEW = r"the state has 5 arrays per worker and should have 6: a checkpoint of other options, such as another transp"


def make_step(**options):
    tx = optax.chain(gcjax.top_k_compress(0.1, axis_name="data", **options), optax.sgd(0.1))
    return gcjax.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh_of(WORKERS), moments=None)


def batch_of(seed):
    return np.random.default_rng(seed).normal(size=(2 * WORKERS, 50)).astype(np.float32)


def trained(step):
    state = step.init(jnp.ones((50, 20)))
    for seed in range(3):
        state, _ = step(state, batch_of(seed))
    return state


def standard(folder, state, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", target)


def pytree(folder, state, target):
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(folder / "saved", state)
    how = ocp.checkpoint_utils.construct_restore_args(target)
    return checkpointer.restore(folder / "saved", args=ocp.args.PyTreeRestore(item=target, restore_args=how))


@pytest.mark.parametrize(
    ("saved", "restored", "message"),
    [
        ({"transport": "two_phase"}, {"transport": "all_gather"}, OTHER_ARRAYS),
        ({"transport": "all_gather"}, {"transport": "two_phase"}, TOO_FEW),
        ({"transport": "two_phase"}, {"transport": "auto"}, OTHER_ARRAYS),
    ],
    ids=["two_phase to all_gather", "all_gather to two_phase", "two_phase to auto"],
)
@cases("checkpointer", [standard, pytree], default=1)
def test_a_checkpoint_of_other_options_is_refused(saved, restored, message, checkpointer, tmp_path):
    step = make_step(**restored)
    state = checkpointer(tmp_path, trained(make_step(**saved)), step.init(jnp.ones((50, 20))))
    for read in (gcjax.info, gcjax.check_training):
        with pytest.raises(ValueError, match=message):
            read(state.opt_state)
    with pytest.raises(ValueError, match=message):
        step(state, batch_of(0))


def test_a_step_that_is_under_way_refuses_such_a_checkpoint_too(tmp_path):
    step = make_step(transport="all_gather")
    running = trained(step)
    state = standard(tmp_path, trained(make_step(transport="two_phase")), step.init(jnp.ones((50, 20))))
    with pytest.raises(ValueError, match=OTHER_ARRAYS):
        step(state, batch_of(3))
    step(running, batch_of(3))


@pytest.mark.parametrize("options", [{"transport": "two_phase"}, {"transport": "all_gather"}])
def test_a_checkpoint_of_the_same_options_takes_the_same_steps(options, tmp_path):
    step, again = make_step(**options), make_step(**options)
    state = trained(step)
    restored = standard(tmp_path, state, again.init(jnp.ones((50, 20))))
    found = [step(state, batch_of(3))[0], again(restored, batch_of(3))[0]]
    jax.tree.map(np.testing.assert_array_equal, *found)
