"""bench/damage.py and bench/elastic.py: what counts as a failure, and the tables."""

import json
import random
import sys

import jax.numpy as jnp
import pytest

pytest.importorskip("orbax.checkpoint")
from bench import damage, elastic, machine

RECORD = {"machine": {"cpu": "CPU", "architecture": "x", "cores": 2, "memory_gb": 3}, "commit": "0" * 12}
RECORD |= {"versions": {"jax": "1"}, "source": "0", "command": "python -m bench.x"}


def test_damaged_pickles_are_named_or_read():
    row = damage.measure("damaged CIFAR-10 pickles", 60, seed=0)
    assert row["failed"] == 0
    assert row["failures"] == []
    assert row["outcomes"]["named"] > 30
    assert sum(row["outcomes"].values()) == row["tried"] == 60


def test_wrong_values_and_silence_are_failures(tmp_path):
    sound = damage.Sound(tmp_path / "sound")
    assert sound.outcome(sound.folder) == ("as it was", None)
    damage.flip_bit(sound.folder / "2" / "state", random.Random(0))
    sound.digests[1][0] = b"other"
    outcome, failure = sound.outcome(sound.folder)
    assert (outcome, failure) == ("other values", "restored values are not those of step 1")
    outcome, failure = sound.outcome(sound.folder)  # the damaged one has another name now
    assert failure is not None
    sound.fresh = sound.fresh._replace(params=jnp.ones(3))
    assert sound.outcome(sound.folder)[0] == "error"


def test_table_of_damage_shows_what_failed(tmp_path, monkeypatch):
    run = {"row": "flipped bits of a checkpoint", "tried": 2000, "failed": 1}
    run |= {"outcomes": {"the one before": 1999, "error": 1}, "failures": ["ValueError: no"]}
    (tmp_path / "damage.json").write_text(json.dumps(RECORD | {"runs": [run]}))
    monkeypatch.setattr(sys, "argv", ["damage.py", "--report", "--out", str(tmp_path)])
    damage.main()
    text = (tmp_path / "damage.md").read_text()
    assert "| flipped bits of a checkpoint | 2,000 | 1 | 1,999 the one before, 1 error |" in text
    assert "- flipped bits of a checkpoint: ValueError: no" in text


def test_table_of_kills_shows_what_was_lost(tmp_path, monkeypatch, capsys):
    lost = {"seconds": 21.26, "steps_lost": 7, "residual_error": None}
    back = {"seconds": 30.0, "steps_lost": 0, "residual_error": 4.7e-08}
    kills = [{"kind": "process", "host": 1, "load": 2.0, "lost": lost}]
    kills += [{"kind": "link", "host": 0, "load": 3.0, "lost": lost | {"residual_error": 1e-7}, "back": back}]
    record = RECORD | {"hosts": 3, "place": "network namespaces of one machine", "kills": kills}
    (tmp_path / "elastic.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--report", "--out", str(tmp_path)])
    elastic.main()
    text = capsys.readouterr().out
    assert "Training went on after each of the 2 kills. At most 7 steps and 21 seconds were lost, and 0 steps" in text
    assert "| training process | 1 | 7 | 21.3 | none |  |  |  |" in text
    assert "| link, then host | 0 | 7 | 21.3 | 1e-07 | 0 | 30.0 | 5e-08 |" in text


def test_options_of_the_examples_are_accepted():
    sys.path.insert(0, str(machine.ROOT / "examples"))
    import multihost

    multihost.parse_options([*elastic.OPTIONS.split(), "--elastic=a:1", "--out=x"])
    multihost.parse_options([*damage.TRAINING.split(), "--out=x"])
    assert set(damage.METHODS) <= set(multihost.METHODS)
