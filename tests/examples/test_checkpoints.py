"""Checkpoints of the examples: what is damaged, other settings, a full disk, SIGTERM, and resuming within an epoch."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from commands import LIMIT, ROOT, curve, environment, result
from common import training
from common.checkpoints import Checkpoints, make_record, mean_residuals
from common.cli import Parser, Problem, Stopped
from common.log import Log
from common.options import add_training, method_names
from jax.experimental.compilation_cache import compilation_cache

import gcjax

SETTINGS = {"batch": 8, "method": ["variance", {"alpha": 1.5}], "learning_rate": 0.1, "width": None}


def make_state(value):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = jax.device_put(np.full((2, 300), value, np.float32), jax.NamedSharding(mesh, jax.P("data")))
    return {"w": rows, "key": jax.device_put(jax.random.key(value), jax.NamedSharding(mesh, jax.P()))}


def write(folder, *steps):
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), make_record(make_state(step), SETTINGS, rows=[step]))


def read(folder, allow=(), **settings):
    """What is restored, which must be all of one step."""
    with Checkpoints(folder) as checkpoints:
        state, record = checkpoints.restore(make_state(0), SETTINGS | settings, allow)
    assert (np.asarray(state["w"]) == record["rows"][0]).all()
    assert state["key"] == jax.random.key(record["rows"][0])
    return record["rows"][0]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    write(folder, 3, 8)
    return folder


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


DAMAGES = {
    "flipped": lambda path: flip(path, np.random.default_rng(path.stat().st_size).integers(8 * path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "removed": Path.unlink,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("flipped", "removed") else pytest.mark.full) for k in DAMAGES]
)
def test_a_damaged_checkpoint_never_restores_and_the_one_before_does(kind, sound, tmp_path, capsys):
    assert len(files(sound / "8")) > 8
    for name in files(sound / "8"):
        if (sound / "8" / name).stat().st_size == 0 and kind != "removed":
            continue
        folder = shutil.copytree(sound, tmp_path / "copy")
        DAMAGES[kind](folder / "8" / name)
        found, said = read(folder), capsys.readouterr().out
        if name.endswith(("commit_success.txt", "_CHECKPOINT_METADATA")):  # nothing is made of these
            assert (found, said) == (8, ""), name
        else:
            assert found == 3, name
            assert said.count("\n") == 1
            assert said.startswith("--resume: the checkpoint of step 8 is damaged: ")
            assert Path(name).name in said
            assert "going on from step 3" in said
            assert sorted(path.name for path in folder.iterdir()) == ["3", "8.damaged"]
        shutil.rmtree(folder)


def test_without_a_sound_checkpoint_there_is_one_line_and_nothing_is_renamed(sound, tmp_path):
    folder = copy(sound, tmp_path)
    flip(folder / "8" / "run" / "metadata", 99)
    shutil.rmtree(folder / "3")
    (folder / "3").mkdir()
    with pytest.raises(
        Problem, match=r"no checkpoint is whole \(.*8 is damaged.*'run/metadata'.*3 is damaged"
    ) as raised:
        read(folder)
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "8"]


def test_other_files_between_the_checkpoints_do_no_harm(sound, tmp_path):
    folder = copy(sound, tmp_path)
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    (folder / "notes").mkdir()
    (folder / "9").write_text("not a checkpoint")
    assert read(folder) == 8
    with pytest.raises(Problem, match="--out: cannot make the folder"):
        read(folder / "9" / "checkpoints")


def test_training_goes_on_after_a_fallback(sound, tmp_path):
    folder = copy(sound, tmp_path)
    flip(folder / "8" / "run" / "metadata", 99)
    assert read(folder) == 3
    write(folder, 8)
    assert read(folder) == 8


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch": 16}, "--batch 8, not 16. Give the same, or --allow batch "),
        ({"learning_rate": 0.2, "width": 3}, "--learning-rate 0.1, not 0.2. .* --allow learning-rate "),
        ({"width": 3}, "--width not given, not 3"),
        ({"method": ("variance", {"alpha": 2.0})}, r"--method variance\(alpha=1.5\), not variance\(alpha=2.0\)"),
    ],
)
def test_other_settings_are_refused_unless_allowed(other, message, sound, tmp_path):
    folder = copy(sound, tmp_path)
    with pytest.raises(Problem, match=message):
        read(folder, **other)
    assert read(folder, allow=[name.replace("_", "-") for name in other], **other) == 8
    with pytest.raises(Problem, match="--allow bach: no such setting; there are batch, "):
        read(folder, allow=["bach"])


def test_another_model_is_named_by_its_first_leaf(sound, tmp_path):
    with Checkpoints(copy(sound, tmp_path)) as checkpoints:
        state = make_state(0)
        state["w"] = jax.device_put(jnp.zeros((2, 5)), state["w"].sharding)
        with pytest.raises(
            Problem, match=r"another model.*state\['w'\] is float32\[2, 300\] in the .* float32\[2, 5\]"
        ):
            checkpoints.restore(state, SETTINGS, [])


def make_workers(number):
    """A training step on so many workers, its initial state, and a batch for any number of them."""
    mesh = jax.make_mesh((number,), ("data",), devices=jax.devices()[:number])
    tx = optax.chain(gcjax.top_k_compress(0.1, axis_name="data"), optax.sgd(0.1))
    step = gcjax.make_train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), tx, mesh, moments=None)
    return step, step.init(jnp.ones((40, 5))), np.random.default_rng(0).normal(size=(12, 40)).astype(np.float32)


@pytest.mark.parametrize("fewer", [pytest.param(1, marks=pytest.mark.full), 2])
def test_another_number_of_workers_is_named_and_with_leave_resized(fewer, tmp_path, capsys):
    step, state, batch = make_workers(3)
    state, _ = step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, make_record(state, SETTINGS))
    step, fresh, _ = make_workers(fewer)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(Problem, match=r"of 3 workers, and here are .*--allow workers: then gcjax\.resize makes"):
            checkpoints.restore(fresh, SETTINGS, [])
        restored, _ = checkpoints.restore(fresh, SETTINGS, ["workers"])
    said = capsys.readouterr().out
    assert float(re.search(rf"from 3 workers to {fewer}, after step 1\..* is kept to (\S+) of its", said)[1]) < 1e-6
    expected = gcjax.resize(state, fresh.params.sharding.mesh)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert gcjax.info(restored.opt_state).residual_norm.min() > 0
    step(restored, batch)


def test_what_changes_in_resizing_is_measured():
    step, state, batch = make_workers(3)
    state, _ = step(state, batch)
    before = mean_residuals(state)
    assert before.shape[0] >= 200
    state, _ = step(state, batch)
    assert np.abs(mean_residuals(state) - before).max() > 0.1 * np.abs(before).max()


def test_too_small_a_disk_gives_one_line_before_anything_is_written(sound, tmp_path):
    folder = copy(sound, tmp_path)
    before = files(folder)
    huge = make_state(0) | {"w": np.broadcast_to(np.float32(0), 10**15)}
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(Problem, match=r"has [\d,.]+ MB left, and the checkpoint of step 9 may take 4,000,000,000.0 MB"),
    ):
        checkpoints.save(9, huge, make_record(huge, SETTINGS))
    assert files(folder) == before


FAILED_WRITE = """
import resource, sys
import test_checkpoints

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    test_checkpoints.write(test_checkpoints.Path(sys.argv[1]), 9)
except test_checkpoints.Problem as problem:
    print(problem)
"""


def test_a_failed_write_gives_one_line_and_keeps_the_older_checkpoints(sound, tmp_path):
    """In a process of its own: threads of Orbax may write on when the limit, which fails as a full disk, is lifted."""
    folder = copy(sound, tmp_path)
    here = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "examples")])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([here, str(ROOT)])}
    arguments = [sys.executable, "-B", "-c", FAILED_WRITE, str(folder)]
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=LIMIT)
    # Not stderr: on a busy machine TensorStore's threads print that the event loop they report to has ended.
    assert re.fullmatch(r"cannot save the checkpoint of step 9 .*File too large.*\n", done.stdout), done
    assert read(folder) == 8
    write(folder, 9)
    assert read(folder) == 9


def test_a_step_that_is_there_already_is_saved_anew(sound, tmp_path):
    folder = copy(sound, tmp_path)
    (folder / "8" / "run" / "metadata").write_text("cut")
    write(folder, 8)
    assert read(folder) == 8


# Resuming.

STEPS = 6  # of an epoch
OPTIONS = ("--workers", "2", "--batch", "4", "--epochs", "2", "--checkpoint-every", "2")


class Cut(Exception):
    """In place of a kill."""


def parse(*options):
    parser = Parser()
    parser.add_argument("--out", type=Path)
    add_training(parser, workers=2, batch=4, epochs=2, learning_rate=0.05)
    return parser.parse_args([*OPTIONS, *map(str, options)])


def make_task(at=None, cut=None):
    """A small regression, whose batches call `cut` before step `at`."""

    def init(key):
        return {"w": jax.random.normal(key, (40, 8)) * 0.1, "b": jnp.zeros(8)}, None

    def loss(params, batch, key):
        x, y = batch
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape[-1:]), x, 0.0)  # dropout
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def batches(epoch, first=0):
        rng = np.random.default_rng(epoch)
        for number in range(STEPS):
            batch = rng.normal(size=(8, 40)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
            if number >= first:
                if epoch * STEPS + number == at:
                    cut()
                yield batch

    def evaluate(params, _):
        return {"size": float(np.abs(params["w"]).sum())}

    def prepare(key, batch):
        return batch[0] + 0.1 * jax.random.normal(key, batch[0].shape), batch[1]

    return training.Task(init, loss, STEPS, batches, prepare, evaluate)


@pytest.fixture
def two_devices(monkeypatch, tmp_path):
    """Trains on two devices, as their number cannot be set any more, and compiles a program of several runs once."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    monkeypatch.setattr(training, "use_devices", lambda workers: mesh)
    options = {"compilation_cache_dir": str(tmp_path / "cache"), "persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, f"jax_{name}") for name in options}
    for name, value in options.items():
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()


def last_state(out):
    """Names and values of all that the last checkpoint has of the state."""
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        leaves = jax.tree_util.tree_leaves_with_path(manager.restore(manager.latest_step(), args=args)["state"])
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for _, x in leaves]
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for (path, _), x in zip(leaves, plain, strict=True)}


def raise_cut():
    raise Cut


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


EARLY = """
import os, signal, sys, time, jax
from pathlib import Path
from common.checkpoints import Checkpoints
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
with Checkpoints(Path(sys.argv[2])) as checkpoints:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)  # JAX looks once a second
    print(checkpoints.should_stop())
"""


@pytest.mark.full
def test_sigterm_before_the_first_step_stops_a_run_after_it(tmp_path):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        arguments = [sys.executable, "-c", EARLY, str(held.getsockname()[1]), str(tmp_path)]
        variables = environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'examples'}")
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


NEEDS = {"strom": "threshold=0.01", "demo": "top_k=8"}
NEEDS |= dict.fromkeys(("top_k", "random_k", "gaussian_k", "dryden", "sketch"), "density=0.1")
DEFAULT = ("variance",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.full) for n in method_names()]
)
def test_a_resumed_run_goes_on_bit_for_bit(name, two_devices, tmp_path):
    options = ("--method", f"{name}({NEEDS.get(name, '')})")
    training.train(make_task(), parse("--out", tmp_path / "whole", *options))
    # A batch is drawn while the step before the last one runs: the steps 3 and 8 end, the steps 4 and 9 do not begin.
    for cut, at, error, kept in ((raise_cut, 5, Cut, 2), (terminate, 9, Stopped, 8)):
        options = (*options, *(["--resume"] if at > 5 else []))
        with pytest.raises(error):
            training.train(make_task(at, cut), parse("--out", tmp_path / "cut", *options))
        assert (tmp_path / "cut" / "checkpoints" / str(kept)).is_dir()
    training.train(make_task(), parse("--out", tmp_path / "cut", *options))
    assert curve(tmp_path / "whole", "steps") == curve(tmp_path / "cut", "steps")
    assert curve(tmp_path / "whole", "epochs") == curve(tmp_path / "cut", "epochs")
    assert len(curve(tmp_path / "cut", "steps")) == 2 * STEPS
    assert result(tmp_path / "cut")["compression_ratio"] == result(tmp_path / "whole")["compression_ratio"]
    assert last_state(tmp_path / "cut") == last_state(tmp_path / "whole")


@pytest.mark.parametrize(("found", "said"), [(4, "has 4 batches"), (6, "has more batches")])
def test_another_number_of_batches_is_named(found, said):
    with pytest.raises(Problem, match=f"this process {said} where 5 remain in the epoch"):
        list(training.exactly(5, range(found)))
    assert list(training.exactly(5, range(5))) == [0, 1, 2, 3, 4]


def make_countdown(steps):
    """A task whose gradient is always 1: with plain SGD the loss falls by the learning rate."""

    def loss(params, batch, key):
        return params[0] + 0 * jnp.mean(batch)

    def batches(epoch, first=0):
        return (np.ones((8, 1), np.float32) for _ in range(first, steps))

    def evaluate(params, _):
        return {"loss after": float(params[0])}

    return training.Task(lambda key: (jnp.zeros(1), None), loss, steps, batches, lambda key, batch: batch, evaluate)


def test_schedules_keep_their_place_when_the_number_of_steps_changes(two_devices, tmp_path):
    options = ("--out", tmp_path, "--method", "dense", "--optimiser", "sgd", "--momentum", "0", "--learning-rate", "1")
    task = make_countdown(6)
    with pytest.raises(Problem, match="this process has 0 batches"):  # it ends after the first of two epochs
        training.train(task._replace(batches=lambda epoch, _: task.batches(0, 6 * epoch)), parse(*options))
    training.train(make_countdown(3), parse(*options, "--batch", "8", "--resume", "--allow", "batch"))
    losses = [float(row["loss"]) for row in curve(tmp_path, "steps")]
    losses.append(float(curve(tmp_path, "epochs")[-1]["loss after"]))
    rates = [0.5 + 0.5 * np.cos(np.pi * k / 12) for k in range(6)] + [
        0.5 + 0.5 * np.cos(np.pi * k / 6) for k in (3, 4, 5)
    ]
    np.testing.assert_allclose(-np.diff(losses), rates, rtol=1e-5)


def test_another_number_of_steps_needs_an_allowed_option(tmp_path):
    options = ("--out", tmp_path, "--checkpoint-every", 1)
    with Log(parse(*options), steps=6) as log:
        for step in (1, 2, 3):
            log.rows["steps"].append({"step": step})
            log.save(make_state(step), 1, step)
    said = "a run with 6 steps in an epoch, and here are 12: these are other data"
    with Log(parse(*options, "--resume"), steps=12) as log, pytest.raises(Problem, match=said):
        log.start(make_state(0))
    with Log(parse(*options, "--resume", "--allow", "epochs"), steps=12) as log, pytest.raises(Problem, match=said):
        log.start(make_state(0))
    with Log(parse(*options, "--resume", "--allow", "batch"), steps=12) as log:
        assert log.start(make_state(0))[:2] == (1, 6)
    fewer = parse(*options, "--resume", "--epochs", 1, "--allow", "epochs")
    with Log(fewer, steps=6) as log, pytest.raises(Problem, match="the checkpoint is past the end of --epochs 1"):
        log.start(make_state(0))
