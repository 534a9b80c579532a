"""The digest of what a recorded training run executes."""

import subprocess
import sys

import pytest
from harness import mesh_of

from bench import machine, programs, provenance

pytest.importorskip("orbax.checkpoint")
sys.path.insert(0, str(machine.ROOT / "examples"))
SMALL = "--model cnn --width 8 --images 64 --workers 2 --batch 8"


def test_digest_follows_the_program(monkeypatch):
    methods = ("dense", "top_k(density=0.1)", "dense --epochs 9", "variance(budget=0.1)", "top_k(density=2)")
    commands = [f"{SMALL} --method {method}" for method in methods]
    dense, top_k, longer, *gone = programs.digests("table-small", commands)
    assert gone == ["", ""]  # options that there are no longer are of no program
    assert len({dense, top_k, longer}) == 3  # the learning rate falls more slowly in a longer run
    record = {"runs": [{"command": commands[0], "program": dense, "source": "0", "commit": "a" * 40}]}
    monkeypatch.setattr(programs, "digests", lambda result, commands: [dense])
    assert provenance.outdated(record, "table-small") == []
    record["runs"][0]["program"] = top_k
    assert provenance.outdated(record, "table-small") == ["a" * 12]


@pytest.mark.parametrize(
    ("result", "options"),
    [
        ("char_lm", ["--width 8 --heads 2 --layers 1", "--width 8 --heads 2 --layers 1 --seed 1"]),
        ("local", ["--workers 2 --algorithms local", "--workers 2 --algorithms local --local-steps 5"]),
        ("local-text", ["--workers 2 --algorithms local", "--workers 2 --algorithms diloco"]),
    ],
)
def test_digests_of_the_other_examples(result, options, monkeypatch):
    monkeypatch.setattr("common.training.use_devices", mesh_of)
    first, other, again = (programs.digest(result, command) for command in (*options, options[0]))
    assert first == again != other


def test_code_without_docstrings_and_comments_runs_alike():
    source = (
        '"""Doc."""\nclass A:\n    """Doc."""\ndef f(x):\n    """Doc."""\n    return x  # why\nprint(f("""kept"""))\n'
    )
    bare = programs.without_docstrings(source)
    assert "Doc" not in bare
    assert "why" not in bare
    assert subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True).stdout == "kept\n"
