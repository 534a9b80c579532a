"""Several processes: what they compute, and what they say when something is wrong. Every process has a time limit."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from wire import collectives

import gcjax

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds; what hangs on a busy machine must not be taken for a hang, and nothing may hang for ever

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")


@pytest.fixture
def port():
    """A port that nobody else is given: bound but not listening, as JAX's coordinator can share it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def start():
    """Starts processes and ends those that are left over."""
    started = []

    def start(*command):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "PYTHONWARNINGS": "error"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen([sys.executable, *map(str, command)], env=variables, text=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def example(*options):
    return (ROOT / "examples" / "multihost.py", *options)


def member(port, process, processes, *options):
    joined = (f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={process}")
    # Starved of time, a process of a busy machine may miss heartbeats. On a CPU gloo notices a death without them.
    return example(*joined, "--devices-per-process=1", f"--wait={LIMIT}", f"--heartbeat={LIMIT}", *options)


def finish(process):
    """Exit status, output, errors."""
    out, errors = process.communicate(timeout=LIMIT)
    return process.returncode, out, errors


def digest(out):
    return re.search(r"bit-equal on all processes: SHA-256 (\w+)", out)[1]


def test_two_processes_end_with_the_parameters_of_one_process_with_two_devices(start):
    options = ("--steps=30", "--batch=16")
    status, out, errors = finish(start(*example("--local=2", f"--heartbeat={LIMIT}", *options)))
    assert status == 0, errors
    assert out.count("method  processes  workers") == 1  # process 0 alone prints
    row = next(line.split() for line in out.splitlines() if line.startswith("variance "))
    assert row[1:4] == ["2", "2", "30"]
    assert float(row[4]) > 50  # % of ten digits
    alone, out_alone, errors = finish(start(*example("--devices-per-process=2", *options)))
    assert alone == 0, errors
    assert digest(out) == digest(out_alone)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_process_makes_the_other_stop_and_say_so(victim, start, port):
    command = ("--method=dense", "--steps=1000000")
    processes = [start(*member(port, i, 2, *command, *["--child"] * (i == victim))) for i in (0, 1)]
    reading = threading.Timer(LIMIT, processes[0].kill)
    reading.start()
    shown = ""
    while "loss=" not in shown:  # the bar of process 0 has moved: training is under way
        character = processes[0].stdout.read(1)
        assert character, processes[0].stderr.read()
        shown += character
    reading.cancel()
    threading.Thread(target=processes[0].stdout.read, daemon=True).start()
    processes[victim].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    status = processes[1 - victim].wait(timeout=LIMIT)
    assert time.monotonic() - begin < 20
    errors = processes[1 - victim].stderr.read()
    assert status == 1
    assert errors.startswith("multihost.py: lost another process")
    assert "Traceback" not in errors
    assert "Check failure" not in errors


def test_different_options_are_caught_on_both_processes_before_the_first_step(start, port):
    processes = [start(*member(port, i, 2, f"--alpha={1.5 + 0.25 * i}")) for i in (0, 1)]
    for process in processes:
        status, out, errors = finish(process)
        words = " ".join(errors.split())
        assert status == 1
        assert words.startswith("multihost.py: the processes do not agree")
        assert re.search(r"process 0 has `[^`]*<1.5\d*e\+00>[^`]*` where process 1 has `[^`]*<1.75\d*e\+00>", words)
        assert "loss=" not in out


@pytest.mark.full
def test_different_numbers_of_devices_are_named_on_both_processes(start, port):
    processes = [start(*member(port, i, 2, f"--devices-per-process={1 + i}")) for i in (0, 1)]
    for process in processes:
        status, _, errors = finish(process)
        assert status == 1
        assert errors.startswith("multihost.py: the processes do not agree: they have [1, 2] devices")


@pytest.mark.full
def test_a_process_without_its_coordinator_says_where_it_looked(start, port):
    status, out, errors = finish(start(*member(port, 1, 2, "--wait=1")))
    assert status == 1
    assert not out
    assert f"nobody listened at --coordinator 127.0.0.1:{port}" in " ".join(errors.split())
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_process_that_never_starts_is_missed(start, port):
    status, _, errors = finish(start(*member(port, 0, 2, "--wait=1")))
    assert status == 1
    assert "not all 2 processes came together" in " ".join(errors.split())
    assert "Check failure" not in errors


def test_a_port_in_use_is_named(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, _, errors = finish(start(*member(port, 0, 2)))
    assert status == 1
    assert f"port {port} of this machine is in use" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--coordinator", "nowhere", "--processes", "2", "--process", "0"], "'nowhere'"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "got 2"),
    ],
)
def test_a_bad_option_gives_one_line_that_names_the_value(options, named, start):
    status, out, errors = finish(start(*example(*options)))
    assert status == 2
    assert errors.count("\n") == 1
    assert named in errors
    assert not out


# Agreement. One group of processes goes through all cases: nothing but the key-value store is used when they differ.

BASE = {"alpha": 1.5, "capacity": 64, "density": None, "rows": [4, 2, 4], "dtype": "float32", "seed": 0}
BASE["jax"] = jax.__version__
CASES = {  # what the last process does differently, and the part that the message must name
    "alpha": ({"alpha": 2.0}, "program: process 0 has `"),
    "capacity": ({"capacity": 128}, "program: process 0 has `"),
    "method": ({"density": 0.1}, "state: process 0 has `state.opt_state[0]"),
    "rows": (
        {"rows": [3]},
        "batch: process 0 has `batch[0]: float32[24, 2]` where process 2 has `batch[0]: float32[18",
    ),
    "later": (
        {"rows": [4, 3]},
        "batch: process 0 has `batch[0]: float32[12, 2]` where process 2 has `batch[0]: float3",
    ),
    "dtype": (
        {"dtype": "float16"},
        "batch: process 0 has `batch[0]: float32[24, 2]` where process 2 has `batch[0]: fl",
    ),
    "seed": ({"seed": 1}, "state: process 0 has `state.params['w']: float32[2] with SHA-256 "),
    "jax": ({"jax": "0.99"}, f"versions: process 0 has `jax {jax.__version__}` where process 2 has `jax 0.99`"),
}
DEVICES = 2  # of each process


def peer(port, processes, process):
    """What each process of a group does; returns what it found, by name."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    limits = {"initialization_timeout": LIMIT, "heartbeat_timeout_seconds": LIMIT, "shutdown_timeout_seconds": LIMIT}
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, processes, process, coordinator_bind_address=address, **limits)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    found = {}
    for case, (change, _) in CASES.items():
        found[case] = message_of(take_steps, mesh, BASE | (change if process == processes - 1 else {}))[0]
    asked = sum(gcjax._training.consistency._asked.values())
    message, state = message_of(take_steps, mesh, BASE)
    found["equal"] = message
    found["asked"] = sum(gcjax._training.consistency._asked.values()) - asked
    found["w"] = np.asarray(state.params["w"]).tobytes().hex()
    info = gcjax.info(state.opt_state)
    found["info"] = [info.sent.shape, info.residual_norm.shape, info.wire_bytes]
    found["options"], _ = message_of(gcjax.check_agreement, mesh, options={"lr": [0.1, 0.2 + process]})
    found["function"], _ = message_of(gcjax.check_agreement, mesh, options={"f": peer})
    alone = jax.make_mesh((DEVICES,), ("data",), devices=jax.local_devices())
    found["own mesh"], _ = message_of(gcjax.check_agreement, alone, options=process)
    gcjax._training.consistency.TIMEOUT_SECONDS = 2
    if process:
        found["missing"], _ = message_of(gcjax.check_agreement, mesh)
    return found


def message_of(run, *args, **kwargs):
    try:
        return None, run(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        return str(error), None


def take_steps(mesh, options):
    if options["density"]:
        compress = gcjax.top_k_compress(options["density"], axis_name="data")
    else:
        compress = gcjax.variance_compress(options["alpha"], capacity=options["capacity"], axis_name="data")
    step = gcjax.make_train_step(squares_loss, optax.chain(compress, optax.sgd(0.1)), mesh)
    state = step.init({"w": jax.random.normal(jax.random.key(options["seed"]), 2)})
    rng, over_workers = np.random.default_rng(jax.process_index()), jax.NamedSharding(mesh, jax.P("data"))
    known = jax.__version__
    jax.__version__ = options["jax"]
    try:
        for rows in options["rows"]:
            own = rng.normal(size=(DEVICES * rows, 2)).astype(options["dtype"])
            batch = jax.make_array_from_process_local_data(over_workers, own)
            state, _ = jax.block_until_ready(step(state, [batch]))
    except RuntimeError:
        assert not state.params["w"].is_deleted()  # nothing was given away
        raise
    finally:
        jax.__version__ = known
    return state


def squares_loss(params, batch):
    return jnp.mean(jnp.square(batch[0] @ params["w"] - 1.0))


@pytest.fixture(scope="module")
def group():
    """What three processes found."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "PYTHONWARNINGS": "error"}
        command = [sys.executable, __file__, str(held.getsockname()[1]), "3"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running = [subprocess.Popen([*command, str(i)], env=variables, text=True, **pipes) for i in range(3)]
        try:
            results = [process.communicate(timeout=LIMIT) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (_, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def test_equal_processes_agree_take_steps_and_end_equal(group):
    assert [found["equal"] for found in group] == [None] * 3
    assert len({found["w"] for found in group}) == 1
    assert [found["asked"] for found in group] == [2] * 3  # two shapes of batches, three steps


@pytest.mark.parametrize("case", CASES)
def test_a_process_that_differs_is_named_on_every_process(case, group):
    messages = {found[case] for found in group}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("the processes do not agree, so no step was taken: process 2 would run something else")
    assert CASES[case][1] in message


def test_info_reports_the_workers_of_its_own_process(group):
    for found in group:
        assert found["info"][:2] == [[DEVICES], [DEVICES]]
        assert found["info"][2] > 0


def test_check_agreement_compares_any_tree_and_names_all_who_differ(group):
    assert len({found["options"] for found in group}) == 1
    assert "processes 1, 2 would run something else than process 0" in group[0]["options"]
    assert "process 0 has `options['lr'][1]: 0.2` where process 1 has `options['lr'][1]: 1.2`" in group[0]["options"]


def test_check_agreement_refuses_what_has_no_text_of_its_own(group):
    assert all("options holds <function peer at 0x" in found["function"] for found in group)


def test_only_the_processes_of_the_mesh_are_asked(group):
    assert [found["own mesh"] for found in group] == [None] * 3


def test_a_process_that_does_not_ask_is_named_after_a_while(group):
    for found in group[1:]:
        assert "waited 2 seconds" in found["missing"]
        assert "but process 0 never came to that point" in found["missing"]


def test_a_single_process_is_not_asked():
    assert gcjax.check_agreement(mesh_of(4), function=peer) is None


def test_placing_state_exchanges_nothing(monkeypatch):
    # Processes with different options would wait for each other here, before they could compare notes.
    texts = []
    jit = jax.jit

    def spied(function, **options):
        def run(*args):
            compiled = jit(function, **options).lower(*args).compile()
            texts.append(compiled.as_text())
            return compiled(*args)

        return run

    monkeypatch.setattr("gcjax._training.sharding.jax.jit", spied)
    gcjax.place(gcjax.variance_compress(axis_name="data").init({"w": jnp.ones((30, 7))}), mesh_of(4))
    assert len(texts) == 1
    assert collectives(texts[0], 4) == []


if __name__ == "__main__":
    print(json.dumps(peer(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
