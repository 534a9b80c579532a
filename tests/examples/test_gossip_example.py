"""examples/gossip.py."""

import json
import sys

import commands
import gossip as example
import jax
import numpy as np
import optax
import pytest
from harness import mesh_of

import gcjax


def test_workers_draw_from_their_own_part_and_nothing_twice():
    parts = np.random.default_rng(0).permutation(33).reshape(3, 11)
    chosen = example.batches(np.random.default_rng(1), parts, 4)
    assert chosen.shape == (2, 12)
    for worker, part in enumerate(parts):
        drawn = chosen.reshape(2, 3, 4)[:, worker].ravel()
        assert set(drawn) < set(part)
        assert len(set(drawn)) == 8


@pytest.mark.parametrize("local_steps", ["1", "30"])
def test_every_algorithm_makes_a_transform(local_steps):
    params = {f"leaf {i}": np.zeros(i + 1, np.float32) for i in range(4)}
    args = example.parse_options(["--local-steps", local_steps, "--optimiser", "adamw"])
    for name, (_, make) in example.ALGORITHMS.items():
        tx = optax.chain(example.OPTIMISERS[args.optimiser](0.1), make(args, jax.random.key(0)))
        assert gcjax.info(tx.init(params)).step == 0, name
    assert len(example.COLOURS) >= len(example.ALGORITHMS)


def test_it_writes_table_plot_and_curves(tmp_path):
    options = "--workers 4 --epochs 3 --batch 32 --learning-rate 0.1 --algorithms all-reduce swarm-8"
    said = commands.run("gossip.py", *options.split(), "--out", tmp_path)
    record = json.loads((tmp_path / "gossip.json").read_text())
    rows = {line[:20].strip(): line[20:].split() for line in said.splitlines()}
    assert float(rows["SwarmSGD, 8 bits"][0]) > 80 < float(rows["all-reduce of models"][0])
    assert (tmp_path / "gossip.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    dense, swarm = (training["epochs"] for training in record["runs"])
    parameters, entries = 76_074, 76_096  # in codes the leaf of 10 counts as 32
    steps = 3 * (1437 // 4 // 32)
    assert [row["step"] for row in dense] == [steps // 3, 2 * steps // 3, steps]
    assert dense[-1]["bits"] == steps * 32 * parameters * 2 * 3 / 4  # of a ring all-reduce
    least = 8 * entries * (steps // 4) + 32 * parameters  # every fourth step, the first one in full
    assert least < swarm[-1]["bits"] < 1.05 * least
    assert dense[-1]["consensus_distance"] < 1e-6 < swarm[-1]["consensus_distance"]


def test_it_learns_a_text(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question: " * 100)
    options = f"--text {text} --workers 2 --epochs 2 --batch 2 --optimiser adamw --algorithms sparse-loco"
    monkeypatch.setattr(sys, "argv", ["gossip.py", *options.split(), "--out", str(tmp_path)])
    monkeypatch.setattr(example, "use_devices", mesh_of)  # in this process, whose devices cannot be set any more
    example.main()
    (training,) = json.loads((tmp_path / "gossip.json").read_text())["runs"]
    losses = [row["validation_loss"] for row in training["epochs"]]
    assert losses[-1] < losses[0] < 3.0  # nats; 18 characters that are equally likely have 2.9
    assert f"SparseLoCo, seed 0: validation loss {losses[-1]:.4f}" in capsys.readouterr().out.splitlines()
