"""bench/runs.py: which runs are run again, and what an interrupted table keeps."""

import json
from operator import itemgetter

import pytest

from bench import provenance, runs

RESULT = "char_lm"
HERE = provenance.provenance(RESULT)


def record(row, command="--method dense", **more):
    return {"row": row, "command": command} | provenance.origin(RESULT) | more


def measure(store, folder, commands, run):
    runs.measure(store, folder / f"{RESULT}.json", commands, itemgetter("row"), run)


def test_what_is_missing_changed_or_of_other_sources_is_run(tmp_path):
    store = HERE | {
        "runs": [record("kept"), record("changed", "--method top_k"), record("old", source="0"), record("gone")]
    }
    ran = []

    def run(row):
        ran.append(row)
        return {"row": row, "command": "--method dense", "figure": 1}

    commands = dict.fromkeys(("new", "old", "changed", "kept"), "--method dense")
    measure(store, tmp_path, commands, run)
    assert ran == ["new", "old", "changed"]
    assert [run["row"] for run in store["runs"]] == ["kept", "gone", "new", "old", "changed"]
    assert json.loads((tmp_path / f"{RESULT}.json").read_text()) == store
    measure(store, tmp_path, commands, run)
    assert len(ran) == 3


def test_a_failure_stops_the_table_and_loses_no_record(tmp_path):
    store, ran = HERE | {"runs": [record("b", "--method top_k")]}, []

    def run(row):
        ran.append(row)
        if row == "b":
            raise SystemExit("the example failed")
        return record(row)

    with pytest.raises(SystemExit, match="the example failed"):
        measure(store, tmp_path, dict.fromkeys("abcdef", "--method dense"), run)
    assert ran == ["a", "b"]
    kept = json.loads((tmp_path / f"{RESULT}.json").read_text())["runs"]
    assert [(run["row"], run["command"]) for run in kept] == [("b", "--method top_k"), ("a", "--method dense")]
