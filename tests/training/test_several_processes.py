"""Several processes: what they compute, and what they say when they differ; how state is placed for them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import agreement_peer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement_peer import BASE, CHANGES, DEVICES, EQUAL_ROWS, LIMIT
from harness import mesh_of

import gcjax
from gcjax._hlo import collectives
from gcjax._training.bad_steps import STEPS_AHEAD

ROOT = Path(__file__).parents[2]
PROCESSES = 3
CASES = (*CHANGES, "later", "sum")
pytestmark = pytest.mark.xdist_group("several processes")  # one worker starts them, once

NAMED = {  # by case: what the message must say differs
    "alpha": "program: process 0 has `",
    "capacity": "program: process 0 has `",
    "method": "state: process 0 has `state.opt_state[0]",
    "rows": "batch: process 0 has `batch[0]: float32[24, 2]` where process 2 has `batch[0]: float32[18",
    "later": "batch: process 0 has `batch[0]: float32[6, 2]` where process 2 has `batch[0]: float32[18",
    "dtype": "batch: process 0 has `batch[0]: float32[24, 2]` where process 2 has `batch[0]: float16[24, 2]`",
    "seed": "state: process 0 has `state.params['w']: float32[2] with SHA-256 ",
    "jax": f"versions: process 0 has `jax {jax.__version__}` where process 2 has `jax 0.99`",
}


@pytest.fixture(scope="module")
def group(request):
    """What each process found in the cases that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [case for case in CASES if any(f"[{case}]" in item.nodeid for item in items)]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": " ".join(flags), "PYTHONWARNINGS": "error"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with socket.socket() as held:  # bound but not listening: JAX can share the port, no other program gets it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        command = [sys.executable, agreement_peer.__file__, str(held.getsockname()[1]), str(PROCESSES)]
        each = [[*command, str(i), *cases] for i in range(PROCESSES)]
        running = [subprocess.Popen(one, env=variables, text=True, **pipes) for one in each]
        try:
            results = [process.communicate(timeout=LIMIT) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (_, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def test_equal_processes_train_as_one_process(group):
    mesh = mesh_of(PROCESSES * DEVICES)
    step, state = agreement_peer.make_step(mesh, BASE)
    start = np.asarray(state.params["w"])
    rngs = [np.random.default_rng(process) for process in range(PROCESSES)]
    for rows in EQUAL_ROWS:
        batch = np.concatenate([agreement_peer.own_rows(rng, rows) for rng in rngs])
        state, _ = step(state, [batch])
    w = np.asarray(state.params["w"])
    assert {found["w"] for found in group} == {w.tobytes().hex()}
    assert (w != start).all()
    whole = np.random.default_rng(0).normal(size=(4 * PROCESSES * DEVICES, 2)).astype(np.float32)
    state, _ = step(state, [whole])  # each process has all of it
    assert {found["whole"] for found in group} == {np.asarray(state.params["w"]).tobytes().hex()}


def test_a_batch_that_one_process_has_alone_is_refused(group):
    for process, found in enumerate(group):
        for message in found["alone"]:
            assert f"batch leaf [0] of shape (12, 2) lies on process {process} alone" in message
            assert "jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P(('data',))), rows)" in message
            assert "jax.device_put(batch, " in message


def test_processes_compare_once_for_each_batch_shape(group):
    assert [found["checks"] for found in group] == [len(set(EQUAL_ROWS))] * PROCESSES


@pytest.mark.parametrize("case", CASES[:-1])
@pytest.mark.full
def test_every_process_names_the_one_that_differs(case, group):
    messages = {found[case] for found in group}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("the processes do not agree, so no step was taken: process 2 would run something else")
    assert NAMED[case] in message


@pytest.mark.parametrize("case", ["sum"])
@pytest.mark.full
def test_every_process_finds_the_same_fault_in_a_loss(case, group):
    assert len({found[case] for found in group}) == 1
    assert "loss_fn sums over its samples" in group[0][case]


def test_all_processes_stop_before_the_same_step(group):
    start = agreement_peer.make_step(mesh_of(2), BASE)[1].params["w"]
    assert [found["stopped"] for found in group] == [[2 + STEPS_AHEAD - 1, np.asarray(start).tolist()]] * PROCESSES


def test_info_reports_the_own_workers(group):
    for found in group:
        assert found["gossip info"] == [0] * DEVICES
        assert found["info"][:2] == [[DEVICES], [DEVICES]]
        assert found["info"][2] > 0


def test_check_agreement_compares_any_tree(group):
    assert len({found["options"] for found in group}) == 1
    assert "processes 1, 2 would run something else than process 0" in group[0]["options"]
    assert "process 0 has `options['lr'][1]: 0.2` where process 1 has `options['lr'][1]: 1.2`" in group[0]["options"]


def test_check_agreement_rejects_text_with_an_address(group):
    assert all("options holds <function main at 0x" in found["function"] for found in group)


def test_only_processes_of_the_mesh_are_compared(group):
    assert [found["own mesh"] for found in group] == [None] * PROCESSES


def test_a_process_that_does_not_compare_is_named(group):
    for found in group[1:]:
        assert "waited 2 seconds" in found["missing"]
        assert "but process 0 never came to that point" in found["missing"]


def test_a_single_process_compares_nothing():
    assert gcjax.check_agreement(mesh_of(4), function=mesh_of) is None


def test_placing_state_exchanges_nothing():
    # Processes with different options would wait for each other here, before they could compare anything.
    state = gcjax.variance_compress(axis_name="data").init({"w": jnp.ones((30, 7))})
    program = jax.jit(lambda state: gcjax.distribute(state, mesh_of(4))).lower(state).compile()
    assert len(jax.tree.leaves(program.output_shardings)[0].device_set) == 4
    assert collectives(program.as_text()) == []
