"""examples/common/checkpoints.py: damaged files, other runs; and what Orbax does not notice."""

import gc
import os

import jax
import numpy as np
import pytest
from common.checkpoints import Checkpoints
from common.cli import Problem

# After a damaged file Orbax leaves coroutines behind, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SETTINGS = {"batch": 8, "method": ("variance", {"alpha": 1.5})}


def make_state(seed):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = np.random.default_rng(seed).normal(size=(2, 3000)).astype(np.float32)
    key = jax.device_put(jax.random.key(seed), jax.NamedSharding(mesh, jax.P()))
    return {"rows": jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data"))), "key": key}


@pytest.fixture
def folder(tmp_path):
    """A folder with the checkpoints of the steps 3 and 8, whose states and records are of that number."""
    write(tmp_path, 1, 3, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "8"]
    yield tmp_path
    gc.collect()


def write(folder, *steps):
    with Checkpoints(folder, SETTINGS) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"rows": [step]})


def resume(folder, **settings):
    """The state and the step of the checkpoint that is restored."""
    with Checkpoints(folder, SETTINGS | settings) as checkpoints:
        state, step, record = checkpoints.start(make_state(0), resume=True)
    assert record == {"rows": [step]}
    assert state["key"] == jax.random.key(step)
    return np.asarray(state["rows"]), step


def arrays(folder):
    """The largest file of a checkpoint, which has the arrays."""
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("file", ["arrays", "state/manifest.ocdbt", "run/metadata"])
@pytest.mark.parametrize("spoil", [os.remove, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_a_missing_or_cut_file_is_named_and_the_checkpoint_before_is_used(file, spoil, folder, capsys):
    spoil(arrays(folder / "8") if file == "arrays" else folder / "8" / file)
    rows, _ = resume(folder)
    np.testing.assert_array_equal(rows, make_state(3)["rows"])
    said = capsys.readouterr().out
    assert said.startswith("--resume: the checkpoint of step 8 cannot be read, so the one before is used (")
    assert said.count("\n") == 1
    write(folder, 5, 8)  # training goes on, and saves the unreadable one anew
    assert resume(folder)[1] == 8


def test_without_a_readable_checkpoint_nothing_is_restored(folder, tmp_path):
    for step in ("3", "8"):
        os.remove(arrays(folder / step))
    with pytest.raises(Problem, match="there is no readable checkpoint in"):
        resume(folder)
    with pytest.raises(Problem, match="there is no readable checkpoint in"):
        resume(tmp_path / "new")


def test_orbax_does_not_notice_a_flipped_bit_of_an_array(folder):
    """As examples/README.md says. If this fails, Orbax has learned to, and the README may promise more."""
    path = arrays(folder / "8")
    content = path.read_bytes()
    silent = 0
    for part in range(1, 8):  # some bits are noticed: those of the file's own index, for one
        damaged = bytearray(content)
        damaged[part * len(content) // 8] ^= 1
        path.write_bytes(damaged)
        rows, step = resume(folder)
        silent += step == 8 and (rows != make_state(8)["rows"]).any()
    assert silent > 0


def test_another_run_is_neither_overwritten_nor_continued(folder):
    with Checkpoints(folder, SETTINGS) as checkpoints, pytest.raises(Problem, match="already holds a run: add --res"):
        checkpoints.start(make_state(0), resume=False)
    with pytest.raises(Problem, match=r"of a run with batch 8, not 16\. Give the same options"):
        resume(folder, batch=16)
