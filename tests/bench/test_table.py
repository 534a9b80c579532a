"""bench/table.py: commands that the example accepts, runs that continue, the figures of the table."""

import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")
import cifar10  # noqa: E402
from common.options import make_compressor  # noqa: E402

from bench import table  # noqa: E402


def options(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    return table.parse_options()


def record(row, seed, accuracy, **more):
    epoch = {"accuracy": accuracy, "wire_bytes": 2e6, "payload_bits": 3200.0, "sent": 100.0}
    epochs = [{"step": 5, "sent": 80.0}, epoch | {"step": 10}]
    figures = {"epochs": epochs, "compression_ratio": 10.0 * (seed + 1), "wire_ratio": 2.5, "cpu_seconds": 60.0}
    command = table.command("small", row, "adam", seed) if row in table.rows() else f"--method {row}"
    return {"row": row, "optimiser": "adam", "seed": seed, "command": command, "parameters": 200} | figures | more


def test_ratio_at_the_end_is_that_of_the_last_tenth_of_the_epochs():
    epochs = [{"step": 3 * i, "sent": 10.0 * i if i < 29 else 270.0 + 20.0 * (i - 27)} for i in range(1, 31)]
    assert table.last_ratio({"parameters": 40, "epochs": epochs}) == 40 * 9 / (330 - 270)
    assert table.last_ratio({"parameters": 40, "epochs": epochs[:1]}) == 40 * 3 / 10


@pytest.mark.parametrize("size", list(table.SIZES))
def test_example_accepts_every_row(size, monkeypatch):
    found = set()
    for row, optimiser, seed in table.wanted(options(monkeypatch, "--list", "--seeds", "2")):
        text = table.command(size, row, optimiser, seed)
        args = cifar10.parse_options(["--data", "x", *shlex.split(text)])
        make_compressor(args.method, axis_name=None, steps=97)
        assert (args.optimiser, args.seed) == (optimiser, seed)
        found.add(text)
    runs = sum(len(row.optimisers) for row in table.rows().values())
    assert len(found) == 2 * runs, "two rows are the same run"


def test_table_has_medians_ranges_and_diverged_runs():
    kept = ("row", "optimiser", "seed", "command")
    lost, alone = (
        {name: record(row, seed, 0.5)[name] for name in kept} | {"diverged": "the loss is nan"}
        for row, seed in (("variance 1", 1), ("strom 0.1", 0))
    )
    runs = [record("dense", s, a) for s, a in ((0, 0.6), (1, 0.64), (2, 0.61))] + [
        record("variance 1", 0, 0.5, cpu_seconds=None),
        lost,
        alone,
    ]
    lines = table.table({"runs": runs}).splitlines()
    assert "| dense | `dense` | 61.0 (60.0 to 64.0) | +0.0 | 20.0 | 50.0 | 2.5 | 32.0 | 2.0 | 60 | 3 |" in lines
    assert (
        "| variance 1 | `variance(alpha=1)` | 50.0 | -11.0 | 10.0 | 50.0 | 2.5 | 32.0 | 2.0 | - | 1, 1 diverged |"
        in lines
    )
    assert any(line.startswith("| strom 0.1 | `strom(threshold=0.1)` | diverged |") for line in lines)


def test_a_recorded_row_that_was_taken_out_keeps_its_figures(tmp_path):
    gone = record("budget 1/8", 0, 0.5, command="--method 'variance(alpha=1, budget=0.125)' --epochs 6")
    store = {"runs": [gone, record("dense", 0, 0.6)]}
    lines = table.table(store).splitlines()
    assert lines[-1].startswith("| budget 1/8 (taken out) | `variance(alpha=1, budget=0.125)` | 50.0 | -10.0 |")
    table.plot(store, tmp_path / "plot.png")


def test_plot_is_drawn_where_one_optimiser_has_no_runs(tmp_path):
    table.plot({"runs": [record("dense", 0, 0.6), record("qsgd 3 bits, two phases", 0, 0.5)]}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    diverged = record("dense", 0, 0.6)
    del diverged["epochs"]
    table.plot({"runs": [diverged]}, tmp_path / "empty.png")
