"""Results that are older than the sources say so."""

import json
import shutil
import sys

import pytest

from bench import check_results, machine, provenance, table

NOTE = "Measured on an earlier version of the sources (commit 0123456789ab).\n\n"


def step_record(source=None):
    return {"commit": "0123456789abcdef", "source": source or provenance.source_digest("step"), "rows": []}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the package and the benchmarks."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("gcjax", "bench"):
        shutil.copytree(provenance.ROOT / name, root / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    return root


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("gcjax/methods/dense.py", {"step", "network"}),
        ("bench/step.py", {"step"}),
        ("bench/network/measure.py", {"network"}),
        ("bench/README.md", set()),
    ],
)
def test_digest_covers_the_package_and_the_results_script(file, changed, checkout):
    before = {result: provenance.source_digest(result, checkout) for result in ("step", "network")}
    path = checkout / file
    path.write_text("# of no effect\n" + path.read_text())
    assert before == {result: provenance.source_digest(result, checkout) for result in before}
    path.write_text(path.read_text() + "\nchanged = 1\n")
    after = {result: provenance.source_digest(result, checkout) for result in before}
    assert {result for result in before if before[result] != after[result]} == changed


def test_all_sources_and_all_result_files_are_known():
    for sources in provenance.SOURCES.values():
        assert all((provenance.ROOT / source).exists() for source in sources)
    assert {path.stem for path in provenance.RESULTS.glob("*.json")} <= provenance.SOURCES.keys()


def test_parts_of_a_result_do_not_overwrite_it(tmp_path, capsys):
    parser = machine.Parser()
    parser.add_argument("--models", nargs="*", default=["all"])
    parser.add_argument("--out", default=provenance.RESULTS)
    provenance.keep_whole(parser, parser.parse_args([]), "models")
    provenance.keep_whole(parser, parser.parse_args(["--models", "one", "--out", str(tmp_path)]), "models")
    with pytest.raises(SystemExit):
        provenance.keep_whole(parser, parser.parse_args(["--models", "one"]), "models")
    assert "with --models the result is not the usual one" in capsys.readouterr().err


def test_runs_made_elsewhere_say_so():
    record = provenance.provenance("step")
    here = provenance.here(record["versions"])
    record["machine"]["load_at_start"] = 99.0
    assert provenance.elsewhere(here, record) == {}
    record["machine"]["cpu"] = "another"
    found = provenance.elsewhere(here, record)
    assert found.keys() == {"machine"}
    head = provenance.machine_line(record | {"runs": [found, {}]})
    assert head.startswith("another (")
    assert head.count("; some of it on ") == 1


def test_check_lists_all_results_and_marks_their_tables(tmp_path, monkeypatch, capsys):
    (tmp_path / "step.json").write_text(json.dumps(step_record("000000000000")))
    (tmp_path / "step.md").write_text("| table |\n")
    provenance.save(tmp_path, "methods", {"source": provenance.source_digest("methods")}, "| methods |")
    monkeypatch.setattr(sys, "argv", ["check_results.py", "--folder", str(tmp_path), "--mark"])
    for _ in range(2):  # marking twice changes nothing
        check_results.main()
        assert (tmp_path / "step.md").read_text() == NOTE + "| table |\n"
    (tmp_path / "step.json").write_text(json.dumps(step_record()))
    check_results.main()
    assert (tmp_path / "step.md").read_text() == "| table |\n"
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    old = ["step.json", "older than the sources: measured at commit 0123456789ab"]
    assert lines == [["methods.json", "current"], old] * 2 + [["methods.json", "current"], ["step.json", "current"]]


def test_parts_with_their_own_sources_are_checked():
    now = provenance.origin("network")
    record = now | {"rows": []}
    assert provenance.outdated(record, "network") == []
    later = {"later": {"commit": "b" * 40, "source": "0"}}
    assert provenance.outdated(record | later, "network") == ["b" * 12]
    measured = {"measured": {"result": "network", "commit": "c" * 40, "source": "0"}}
    assert provenance.outdated(provenance.origin("step") | measured, "step") == ["c" * 12]
    runs = [now, {"commit": "d" * 40, "source": "0"}, {"source": "1"}]
    commits = provenance.outdated({"commit": "e" * 40, "source": "2", "runs": runs}, "network")
    assert provenance.commits_text(commits) == "commit dddddddddddd and an unknown commit"


def test_reported_table_of_old_runs_says_so(tmp_path, monkeypatch):
    epoch = {"accuracy": 0.5, "wire_bytes": 2e6, "payload_bits": 3200.0, "sent": 100.0, "step": 1}
    run = {"row": "dense", "optimiser": "adam", "seed": 0, "epochs": [epoch], "cpu_seconds": 60.0, "parameters": 100}
    run |= {"compression_ratio": 1.0, "wire_ratio": 1.0, "commit": "0123456789abcdef", "source": "0"}
    run["command"] = "--method dense"
    (tmp_path / "table-small.json").write_text(json.dumps({"runs": [run]}))
    monkeypatch.setattr(sys, "argv", ["table.py", "--report", "--out", str(tmp_path)])
    table.main()
    assert (tmp_path / "table-small.md").read_text().startswith(NOTE + "## adam\n")
